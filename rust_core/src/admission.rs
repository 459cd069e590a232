//! Requests coming in: their state before the first step. What can be said against one is in [`limits`](crate::limits).

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::beam::BeamSearch;
use crate::detokenizer::StopStrings;
use crate::error::Result;
use crate::limits::in_use;
use crate::output::{LogprobTable, Timing};
use crate::processor::Processor;
use crate::request::{SamplingParams, top_count};
use crate::rows::mix;
use crate::scheduler::Scheduler;
use crate::sequence::{Group, History, Request, Sequence, State};
use crate::stop_regex::StopRegexes;

/// What comes with a request besides its tokens and parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestOptions {
    /// The prompt as text, which stays where outputs are read.
    #[serde(skip)]
    pub prompt: Option<String>,
    /// Lower runs first, under the priority policy.
    pub priority: i64,
    /// Requests share cached blocks only with those of the same salt.
    pub cache_salt: Option<String>,
    /// Identity of the adapter's weights; 0 is the base model.
    pub adapter_id: u64,
    /// Changes its logits, in place of what `logits_processors` names; does not travel.
    #[serde(skip)]
    pub processor: Option<Processor>,
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
        if self.by_id.contains_key(request_id) {
            return Err(in_use(request_id));
        }
        let prompt = self.limits.truncate(prompt, &params);
        let max_output = self.limits.check(&prompt, &params)?;
        let request = self.make_request(request_id, prompt, params, options, max_output);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.groups.push(None);
            self.groups.len() as u32 - 1
        });
        let key = self.key(&request, slot);
        self.by_id.insert(Arc::clone(&request.request_id), slot);
        self.queued.add(&request);
        self.groups[slot as usize] = Some(Box::new(self.make_group(request)));
        self.waiting.insert(key);
        self.compile_grammar(slot);
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
        let stop_tokens = self.limits.stop_tokens(&params);
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
        // Mixed, so that sequences of engines whose seeds are neighbours do not share theirs.
        let seed = params.seed.filter(|&seed| seed != -1).map_or_else(|| mix(self.seed_state), |seed| seed as u64);
        let vocab_size = self.config.vocab_size;
        let named = |processors: &HashMap<String, Processor>| {
            params.logits_processors.iter().filter_map(|name| processors.get(name).cloned()).collect()
        };
        let processors = options.processor.map_or_else(|| named(&self.processors), |processor| vec![processor]);
        Request {
            request_id: request_id.into(),
            arrival: self.next_arrival,
            priority: options.priority,
            prompt_text: options.prompt.map(Into::into),
            prompt: prompt.into(),
            stops: StopStrings::new(&params.stop),
            stop_regexes: if params.stop_regex.is_empty() { None } else { StopRegexes::new(&params.stop_regex).ok() },
            stop_tokens,
            max_output,
            row_params: params.row_params(vocab_size, num_candidates),
            flags: params.flags(vocab_size),
            seed,
            prompt_counts,
            has_extras: params.has_penalties()
                || params.min_tokens > 0
                || !params.logit_bias.is_empty()
                || params.allowed_token_ids.is_some()
                || !params.bad_word_ids.is_empty(),
            waits_for_host: params.structured_outputs.is_some()
                || !processors.is_empty()
                || params.bad_word_ids.iter().any(|word| word.len() > 1),
            processors,
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
            compiling: params.structured_outputs.is_some(),
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
