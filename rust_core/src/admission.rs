//! Requests coming in: what can be said against one when it is added, and its state before the first step.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hashbrown::HashSet;

use crate::beam::BeamSearch;
use crate::detokenizer::StopStrings;
use crate::error::{Error, Result};
use crate::output::{LogprobTable, Timing};
use crate::request::{Limits, SamplingParams, top_count};
use crate::scheduler::Scheduler;
use crate::sequence::{Group, History, Request, Sequence, State};

/// What comes with a request besides its tokens and parameters.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    /// The prompt as text.
    pub prompt: Option<String>,
    /// Lower runs first, under the priority policy.
    pub priority: i64,
    /// Requests share cached blocks only with those of the same salt.
    pub cache_salt: Option<String>,
    /// Identity of the adapter's weights; 0 is the base model.
    pub adapter_id: u64,
}

impl Scheduler {
    /// Queue a request. Fails, and changes nothing, if a field is out of range or the request could never run.
    pub fn add_request(
        &mut self,
        request_id: &str,
        prompt: Vec<u32>,
        params: SamplingParams,
        options: RequestOptions,
    ) -> Result<()> {
        let max_output = self.check_request(request_id, &prompt, &params)?;
        let request = self.make_request(request_id, prompt, params, options, max_output);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.groups.push(None);
            self.groups.len() as u32 - 1
        });
        let key = self.key(&request, slot);
        self.by_id.insert(Arc::clone(&request.request_id), slot);
        self.groups[slot as usize] = Some(Box::new(self.make_group(request)));
        self.waiting.insert(key);
        Ok(())
    }

    /// Everything that can be said against a request when it is added; returns the longest output it may have.
    fn check_request(&self, request_id: &str, prompt: &[u32], params: &SamplingParams) -> Result<usize> {
        let config = &self.config;
        if self.by_id.contains_key(request_id) {
            let message = format!("request_id {request_id:?} is in use by an unfinished request");
            return Err(Error::parameter("request_id", message));
        }
        params.validate_for(&Limits {
            vocab_size: config.vocab_size,
            max_logprobs: config.max_logprobs,
            has_vocabulary: self.vocabulary.is_some(),
        })?;
        if prompt.is_empty() {
            return Err(Error::parameter("prompt_token_ids", "prompt_token_ids must hold at least one token"));
        }
        if let Some((i, id)) = prompt.iter().enumerate().find(|&(_, &id)| id as usize >= config.vocab_size) {
            let message = format!(
                "prompt_token_ids[{i}] must be from 0 to {} (the model's vocabulary), got {id}",
                config.vocab_size - 1
            );
            return Err(Error::parameter("prompt_token_ids", message));
        }
        let room = config.max_model_len.saturating_sub(prompt.len());
        if room == 0 {
            let message = format!(
                "prompt_token_ids has {} tokens; with at least one token to generate the model's length \
                 (max_model_len, {}) allows at most {}",
                prompt.len(),
                config.max_model_len,
                config.max_model_len - 1
            );
            return Err(Error::parameter("prompt_token_ids", message));
        }
        if params.min_tokens as usize > room {
            let message = format!(
                "min_tokens must be at most {room} (max_model_len {} less {} prompt tokens), got {}",
                config.max_model_len,
                prompt.len(),
                params.min_tokens
            );
            return Err(Error::parameter("min_tokens", message));
        }
        self.check_min_tokens(params)?;
        let max_output = params.max_tokens.map_or(room, |max| room.min(max as usize));
        self.check_fits(prompt.len(), max_output, params)?;
        Ok(max_output)
    }

    /// Whether a token is left to generate while those that end the text are masked.
    fn check_min_tokens(&self, params: &SamplingParams) -> Result<()> {
        if params.min_tokens == 0 {
            return Ok(());
        }
        let banned: HashSet<u32> = self.stop_tokens(params).into_iter().map(|(id, _)| id).collect();
        let left = match &params.allowed_token_ids {
            Some(allowed) => allowed.iter().any(|&id| !banned.contains(&(id as u32))),
            None => banned.len() < self.config.vocab_size,
        };
        if left {
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
    fn stop_tokens(&self, params: &SamplingParams) -> Vec<(u32, bool)> {
        let eos = self.config.eos_token_ids.iter().enumerate().map(|(i, &id)| (id, i > 0));
        // A tokenizer may name an end of sequence that the model has no logit for.
        let eos = eos.filter(|&(id, _)| !params.ignore_eos && (id as usize) < self.config.vocab_size);
        let stop_ids = params.stop_token_ids.iter().map(|&id| (id as u32, true));
        let mut known = HashSet::new();
        eos.chain(stop_ids).filter(|&(id, _)| known.insert(id)).collect()
    }

    /// Whether the request could run if it were alone.
    fn check_fits(&self, prompt_len: usize, max_output: usize, params: &SamplingParams) -> Result<()> {
        let config = &self.config;
        let width = params.width();
        let name = if params.best_of.is_some() { "best_of" } else { "n" };
        if width > config.max_num_seqs {
            let message = format!("{name} ({width}) must be at most max_num_seqs ({})", config.max_num_seqs);
            return Err(Error::parameter(name, message));
        }
        if params.use_beam_search && width > config.max_num_batched_tokens {
            let most = config.max_num_batched_tokens;
            let message = format!("beam width ({width}) must be at most max_num_batched_tokens ({most})");
            return Err(Error::parameter(name, message));
        }
        let shared = prompt_len / config.block_size;
        // The last token is sampled, never computed.
        let longest = (prompt_len + max_output - 1).div_ceil(config.block_size);
        let needed = if width == 1 { longest } else { shared + width * (longest - shared) };
        if needed > config.num_gpu_blocks {
            let message = format!(
                "the request can never fit: {width} sequences of {prompt_len} prompt and {max_output} output tokens \
                 need {needed} KV blocks of {} tokens, the pool has {}; lower {name} or max_tokens",
                config.block_size, config.num_gpu_blocks
            );
            return Err(Error::parameter(name, message));
        }
        Ok(())
    }

    fn make_request(
        &mut self,
        request_id: &str,
        prompt: Vec<u32>,
        params: SamplingParams,
        options: RequestOptions,
        max_output: usize,
    ) -> Request {
        let stop_tokens = self.stop_tokens(&params);
        let num_candidates = if params.use_beam_search {
            let candidates = params.width() * (1 + stop_tokens.len()).max(2);
            candidates.min(self.config.vocab_size)
        } else {
            1
        };
        let mut prompt_counts: Vec<[i32; 2]> = Vec::new();
        if params.has_repetition_penalty() {
            prompt_counts.extend(prompt.iter().map(|&id| [id as i32, 0]));
            prompt_counts.sort_unstable();
            prompt_counts.dedup();
        }
        self.next_arrival += 1;
        self.seed_state = self.seed_state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let seed = params.seed.filter(|&seed| seed != -1).map_or(self.seed_state, |seed| seed as u64);
        let vocab_size = self.config.vocab_size;
        Request {
            request_id: request_id.into(),
            arrival: self.next_arrival,
            priority: options.priority,
            prompt_text: options.prompt.map(Into::into),
            prompt: prompt.into(),
            stops: StopStrings::new(&params.stop),
            stop_tokens,
            max_output,
            row_params: params.row_params(vocab_size, num_candidates),
            flags: params.flags(vocab_size),
            seed,
            prompt_counts,
            has_extras: params.has_penalties()
                || params.min_tokens > 0
                || !params.logit_bias.is_empty()
                || params.allowed_token_ids.is_some(),
            root_hash: self.blocks.root_hash(options.cache_salt.as_deref().unwrap_or(""), options.adapter_id),
            params,
        }
    }

    fn make_group(&self, request: Request) -> Group {
        let mut sequence =
            Sequence { history: History::new(&request, self.vocabulary.as_deref()), ..Sequence::default() };
        if self.config.enable_prefix_caching {
            let mut hash = request.root_hash;
            sequence.hashes.extend(request.prompt.chunks_exact(self.config.block_size).map(|tokens| {
                hash = self.blocks.chain_hash(hash, tokens);
                hash
            }));
        }
        let params = &request.params;
        let width = |top| 1 + top_count(top, self.config.vocab_size);
        Group {
            state: State::Waiting,
            sequences: smallvec::smallvec![sequence],
            forked: params.width() == 1,
            beam: params.use_beam_search.then(|| BeamSearch::new(params.width())),
            reserved: 0,
            prompt_logprobs: params.prompt_logprobs.map(|top| LogprobTable::new(width(top))),
            prompt_rows_scheduled: 0,
            num_cached_tokens: 0,
            num_preemptions: 0,
            timing: Timing {
                arrival_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
                queued: self.now(),
                ..Timing::default()
            },
            touched: false,
            request,
        }
    }
}
