//! What is fixed for a scheduler's life, and its validation.

use crate::error::{Error, Result};

/// How a group loses its device blocks when they run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PreemptionMode {
    /// Recompute a lone sequence; swap groups, keeping what they share.
    #[default]
    Auto,
    /// Swap while the host pool has room.
    Swap,
    /// Recompute always.
    Recompute,
}

/// Order of waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// By arrival.
    #[default]
    Fcfs,
    /// By priority, lower first, then by arrival.
    Priority,
}

/// Fixed for a scheduler's life.
#[derive(Clone, Debug)]
pub struct Config {
    /// Device blocks of `block_size` tokens.
    pub num_gpu_blocks: usize,
    /// Host blocks for swapping; 0 turns swapping off.
    pub num_cpu_blocks: usize,
    /// Tokens a block holds, 1 to 128.
    pub block_size: usize,
    /// Most sequences running at once.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and output.
    pub max_model_len: usize,
    /// Logits of the model.
    pub vocab_size: usize,
    /// Ids that end a text; the first is the tokenizer's own.
    pub eos_token_ids: Vec<u32>,
    /// Reuse blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Compute long prompts over several steps.
    pub enable_chunked_prefill: bool,
    /// Order of waiting requests.
    pub policy: Policy,
    /// How groups are preempted.
    pub preemption_mode: PreemptionMode,
    /// Most top log-probabilities a request may want; -1: no limit.
    pub max_logprobs: i64,
    /// Sizes that decode-only plans are padded to, ascending.
    pub graph_sizes: Vec<usize>,
    /// Fewest keys that cascades of a step must save reading; 0: plans have no cascades.
    pub cascade_tokens: usize,
    /// Seed of requests without one.
    pub seed: u64,
}

/// Counts, ids and slots travel in plans as `i32`.
const MAX: usize = i32::MAX as usize;

fn within(name: &str, value: usize, low: usize, high: usize) -> Result<()> {
    if (low..=high).contains(&value) {
        Ok(())
    } else {
        Err(Error::range(name, &format!("from {low} to {high}"), value))
    }
}

impl Config {
    pub(crate) fn validate(&self) -> Result<()> {
        within("max_num_seqs", self.max_num_seqs, 1, MAX)?;
        within("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX)?;
        within("max_model_len", self.max_model_len, 1, MAX)?;
        within("vocab_size", self.vocab_size, 1, MAX)?;
        within("block_size", self.block_size, 1, 128)?;
        within("num_gpu_blocks", self.num_gpu_blocks, 1, MAX / self.block_size)?;
        within("num_cpu_blocks", self.num_cpu_blocks, 0, MAX)?;
        within("cascade_tokens", self.cascade_tokens, 0, MAX)?;
        self.graph_sizes.iter().try_for_each(|&size| within("graph_sizes", size, 1, MAX))?;
        let needed = self.max_model_len.div_ceil(self.block_size);
        if self.num_gpu_blocks < needed {
            let message = format!(
                "num_gpu_blocks ({}) is too small: one sequence of max_model_len ({}) tokens needs {needed} blocks of \
                 {} tokens; enlarge the KV pool or lower max_model_len to at most {}",
                self.num_gpu_blocks,
                self.max_model_len,
                self.block_size,
                self.num_gpu_blocks * self.block_size
            );
            return Err(Error::parameter("num_gpu_blocks", message));
        }
        if !self.enable_chunked_prefill && self.max_num_batched_tokens < self.max_model_len {
            let message = format!(
                "max_num_batched_tokens ({}) must be at least max_model_len ({}) without chunked prefill",
                self.max_num_batched_tokens, self.max_model_len
            );
            return Err(Error::parameter("max_num_batched_tokens", message));
        }
        Ok(())
    }
}
