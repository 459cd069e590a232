//! What an engine allows a request to ask for, whatever state it is in.

use hashbrown::HashSet;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::request::{Limits, SamplingParams};

/// One check for all doors: the scheduler has these limits, and so has a front end in another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLimits {
    /// What concerns parameters alone.
    pub request: Limits,
    /// See [`Config`], as all below.
    pub max_model_len: usize,
    /// Most sequences running at once.
    pub max_num_seqs: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Tokens a block holds.
    pub block_size: usize,
    /// Device blocks.
    pub num_gpu_blocks: usize,
    /// Ids that end a text; the first is the tokenizer's own.
    pub eos_token_ids: Vec<u32>,
    /// Names that `logits_processors` may have.
    pub processors: Vec<String>,
}

/// The error for a name that is taken.
pub(crate) fn in_use(request_id: &str) -> Error {
    Error::parameter("request_id", format!("request_id {request_id:?} is in use by an unfinished request"))
}

impl EngineLimits {
    /// The limits of an engine. `has_vocabulary`: whether it can make text.
    pub fn new(config: &Config, has_vocabulary: bool) -> Self {
        Self {
            request: Limits { vocab_size: config.vocab_size, max_logprobs: config.max_logprobs, has_vocabulary },
            max_model_len: config.max_model_len,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            block_size: config.block_size,
            num_gpu_blocks: config.num_gpu_blocks,
            eos_token_ids: config.eos_token_ids.clone(),
            processors: Vec::new(),
        }
    }

    /// Most tokens of a prompt that `truncate_prompt_tokens` leaves, or None: all. -1 leaves room for `max_tokens`,
    /// unless these are more than a context and thus no wish.
    pub fn prompt_limit(&self, params: &SamplingParams) -> Option<usize> {
        let most = params.truncate_prompt_tokens?;
        if most != -1 {
            return Some(most.max(1) as usize);
        }
        let output = params.max_tokens.filter(|&most| most < self.max_model_len as i64).unwrap_or(params.min_tokens);
        Some(self.max_model_len.saturating_sub(output.max(1) as usize).max(1))
    }

    /// The prompt's end, as much as `prompt_limit` leaves.
    pub fn truncate(&self, mut prompt: Vec<u32>, params: &SamplingParams) -> Vec<u32> {
        let most = self.prompt_limit(params).unwrap_or(usize::MAX);
        prompt.drain(..prompt.len().saturating_sub(most));
        prompt
    }

    /// Everything that can be said against a request, whatever else is in the engine; returns the longest output it may
    /// have.
    pub fn check(&self, prompt: &[u32], params: &SamplingParams) -> Result<usize> {
        params.validate_for(&self.request)?;
        if let Some(name) = params.logits_processors.iter().find(|name| !self.processors.contains(name)) {
            let message = format!(
                "logits_processors must be functions that the engine knows {:?}, got {name:?}",
                self.processors
            );
            return Err(Error::parameter("logits_processors", message));
        }
        if prompt.is_empty() {
            return Err(Error::parameter("prompt_token_ids", "prompt_token_ids must hold at least one token"));
        }
        if let Some((i, id)) = prompt.iter().enumerate().find(|&(_, &id)| id as usize >= self.request.vocab_size) {
            let message = format!(
                "prompt_token_ids[{i}] must be from 0 to {} (the model's vocabulary), got {id}",
                self.request.vocab_size - 1
            );
            return Err(Error::parameter("prompt_token_ids", message));
        }
        let room = self.max_model_len.saturating_sub(prompt.len());
        if room == 0 {
            let message = format!(
                "prompt_token_ids has {} tokens; with at least one token to generate the model's length \
                 (max_model_len, {}) allows at most {}",
                prompt.len(),
                self.max_model_len,
                self.max_model_len - 1
            );
            return Err(Error::parameter("prompt_token_ids", message));
        }
        if params.min_tokens as usize > room {
            let message = format!(
                "min_tokens must be at most {room} (max_model_len {} less {} prompt tokens), got {}",
                self.max_model_len,
                prompt.len(),
                params.min_tokens
            );
            return Err(Error::parameter("min_tokens", message));
        }
        self.check_tokens_left(params)?;
        let max_output = params.max_tokens.map_or(room, |max| room.min(max as usize));
        self.check_fits(prompt.len(), max_output, params)?;
        Ok(max_output)
    }

    /// Whether a token is left to generate beside those that are banned.
    fn check_tokens_left(&self, params: &SamplingParams) -> Result<()> {
        let bad: HashSet<u32> = params.bad_tokens().collect();
        let left = |banned: &HashSet<u32>| match &params.allowed_token_ids {
            Some(allowed) => allowed.iter().any(|&id| !banned.contains(&(id as u32))),
            None => banned.len() < self.request.vocab_size,
        };
        if !left(&bad) {
            let message = "bad_words must leave a token that may be generated (allowed_token_ids), got words for all";
            return Err(Error::parameter("bad_words", message));
        }
        let mut banned = bad;
        banned.extend(self.stop_tokens(params).into_iter().map(|(id, _)| id));
        if params.min_tokens == 0 || left(&banned) {
            return Ok(());
        }
        let message = format!(
            "min_tokens must be 0 when every token that may be generated ends the text (end of sequence and \
             stop_token_ids), got {}",
            params.min_tokens
        );
        Err(Error::parameter("min_tokens", message))
    }

    /// Tokens that end the text, and whether the output names them. The tokenizer's own end of sequence comes first.
    pub fn stop_tokens(&self, params: &SamplingParams) -> Vec<(u32, bool)> {
        let eos = self.eos_token_ids.iter().enumerate().map(|(i, &id)| (id, i > 0));
        // A tokenizer may name an end of sequence that the model has no logit for.
        let eos = eos.filter(|&(id, _)| !params.ignore_eos && (id as usize) < self.request.vocab_size);
        let stop_ids = params.stop_token_ids.iter().map(|&id| (id as u32, true));
        let mut known = HashSet::new();
        eos.chain(stop_ids).filter(|&(id, _)| known.insert(id)).collect()
    }

    /// Whether the request could run if it were alone.
    fn check_fits(&self, prompt_len: usize, max_output: usize, params: &SamplingParams) -> Result<()> {
        let width = params.width();
        let name = if params.best_of.is_some() { "best_of" } else { "n" };
        if width > self.max_num_seqs {
            let message = format!("{name} ({width}) must be at most max_num_seqs ({})", self.max_num_seqs);
            return Err(Error::parameter(name, message));
        }
        if params.use_beam_search && width > self.max_num_batched_tokens {
            let most = self.max_num_batched_tokens;
            let message = format!("beam width ({width}) must be at most max_num_batched_tokens ({most})");
            return Err(Error::parameter(name, message));
        }
        let shared = prompt_len / self.block_size;
        // The last token is sampled, never computed.
        let longest = (prompt_len + max_output - 1).div_ceil(self.block_size);
        let needed = if width == 1 { longest } else { shared + width * (longest - shared) };
        if needed > self.num_gpu_blocks {
            let message = format!(
                "the request can never fit: {width} sequences of {prompt_len} prompt and {max_output} output tokens \
                 need {needed} KV blocks of {} tokens, the pool has {}; lower {name} or max_tokens",
                self.block_size, self.num_gpu_blocks
            );
            return Err(Error::parameter(name, message));
        }
        Ok(())
    }
}
