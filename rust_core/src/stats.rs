//! Numbers about the scheduler.

use serde::{Deserialize, Serialize};

use crate::sequence::Request;

/// What waiting requests will take once they run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Sequences they will have.
    pub num_sequences: usize,
    /// Tokens of their prompts.
    pub num_tokens: usize,
}

impl Queued {
    pub(crate) fn add(&mut self, request: &Request) {
        self.num_sequences += request.params.width();
        self.num_tokens += request.prompt.len();
    }

    pub(crate) fn remove(&mut self, request: &Request) {
        self.num_sequences -= request.params.width();
        self.num_tokens -= request.prompt.len();
    }
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Preemptions that dropped blocks.
    pub num_recomputations: u64,
    /// Preemptions that moved blocks to the host.
    pub num_swap_outs: u64,
    /// Prompt tokens looked up in the prefix cache; recomputations do not count.
    pub prefix_queries: u64,
    /// Of those, found.
    pub prefix_hits: u64,
    /// Prompt tokens of requests that were scheduled.
    pub prompt_tokens: u64,
    /// Tokens committed.
    pub generation_tokens: u64,
}

/// A snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Sequences running.
    pub num_running: usize,
    /// Requests waiting.
    pub num_waiting: usize,
    /// What those will take.
    pub queued: Queued,
    /// Sequences on the host.
    pub num_swapped: usize,
    /// Device blocks.
    pub num_gpu_blocks: usize,
    /// Device blocks that no sequence holds, cached ones included.
    pub num_free_gpu_blocks: usize,
    /// Of those, the ones the prefix cache can still serve.
    pub num_cached_gpu_blocks: usize,
    /// Host blocks.
    pub num_cpu_blocks: usize,
    /// Host blocks that no sequence holds.
    pub num_free_cpu_blocks: usize,
    /// Blocks copied on write, since the start.
    pub num_copies: u64,
    /// Counts since the start.
    pub counters: Counters,
}
