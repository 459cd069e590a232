//! The scheduler: queues of requests, their admission, and what is shared by [`schedule`](crate::schedule) (plans out)
//! and [`commit`](crate::commit) (tokens in).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;

use crate::beam::BeamSearch;
use crate::block_manager::BlockManager;
use crate::detokenizer::{StopStrings, Vocabulary};
use crate::draft::{Draft, Flight};
use crate::error::{Error, Result};
use crate::output::{LogprobTable, Timing};
use crate::plan::RowParam;
use crate::request::{Limits, SamplingParams};
use crate::sequence::{Group, History, Request, Sequence, State};
use crate::stats::{Counters, Stats};

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
    /// Seed of requests without one.
    pub seed: u64,
}

/// Place of a group in a queue: orders by policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    priority: i64,
    arrival: u64,
    pub slot: u32,
}

/// Queues, budgets, KV blocks, stops and text of all requests.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) blocks: BlockManager,
    pub(crate) vocabulary: Option<Arc<Vocabulary>>,
    pub(crate) groups: Vec<Option<Box<Group>>>,
    pub(crate) waiting: BTreeSet<Key>,
    /// Sorted; victims of preemption come from the end.
    pub(crate) running: Vec<Key>,
    pub(crate) swapped: BTreeSet<Key>,
    /// Sequences that running groups count for in `max_num_seqs`.
    pub(crate) num_reserved: usize,
    /// Scheduled steps whose results are outstanding, oldest first; at most two.
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) draft: Draft,
    pub(crate) next_step: u32,
    pub(crate) counters: Counters,
    by_id: HashMap<Arc<str>, u32>,
    free_slots: Vec<u32>,
    next_arrival: u64,
    seed_state: u64,
    start: Instant,
}

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

fn at_least(name: &str, value: usize, least: usize) -> Result<()> {
    if value >= least { Ok(()) } else { Err(Error::range(name, &format!("at least {least}"), value)) }
}

impl Config {
    fn validate(&self) -> Result<()> {
        at_least("max_num_seqs", self.max_num_seqs, 1)?;
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)?;
        at_least("max_model_len", self.max_model_len, 1)?;
        at_least("vocab_size", self.vocab_size, 1)?;
        if !(1..=128).contains(&self.block_size) {
            return Err(Error::range("block_size", "from 1 to 128", self.block_size));
        }
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

impl Scheduler {
    /// A scheduler without requests. Fails with the first bad field of the configuration.
    pub fn new(config: Config, vocabulary: Option<Arc<Vocabulary>>) -> Result<Self> {
        config.validate()?;
        let mut config = config;
        config.graph_sizes.sort_unstable();
        Ok(Self {
            blocks: BlockManager::new(
                config.num_gpu_blocks,
                config.num_cpu_blocks,
                config.block_size,
                config.enable_prefix_caching,
            ),
            vocabulary,
            groups: Vec::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            swapped: BTreeSet::new(),
            num_reserved: 0,
            flights: VecDeque::with_capacity(2),
            draft: Draft::default(),
            next_step: 0,
            counters: Counters::default(),
            by_id: HashMap::new(),
            free_slots: Vec::new(),
            next_arrival: 0,
            seed_state: config.seed,
            start: Instant::now(),
            config,
        })
    }

    /// Seconds since the scheduler was made.
    pub(crate) fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

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
        let key = self.key(&request, 0);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.groups.push(None);
            self.groups.len() as u32 - 1
        });
        self.by_id.insert(Arc::clone(&request.request_id), slot);
        self.groups[slot as usize] = Some(Box::new(self.make_group(request)));
        self.waiting.insert(Key { slot, ..key });
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
        let max_output = params.max_tokens.map_or(room, |max| room.min(max as usize));
        self.check_fits(prompt.len(), max_output, params)?;
        Ok(max_output)
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
        let eos = self.config.eos_token_ids.iter().enumerate().map(|(i, &id)| (id, i > 0));
        let eos = eos.filter(|_| !params.ignore_eos);
        let stop_ids = params.stop_token_ids.iter().map(|&id| (id as u32, true));
        let mut stop_tokens: Vec<(u32, bool)> = Vec::new();
        for (id, reported) in eos.chain(stop_ids) {
            if stop_tokens.iter().all(|&(known, _)| known != id) {
                stop_tokens.push((id, reported));
            }
        }
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
        let mut sequence = Sequence {
            history: History::new(&request, self.vocabulary.as_deref()),
            ..Sequence::default()
        };
        if self.config.enable_prefix_caching {
            let mut hash = request.root_hash;
            sequence.hashes.extend(request.prompt.chunks_exact(self.config.block_size).map(|tokens| {
                hash = self.blocks.chain_hash(hash, tokens);
                hash
            }));
        }
        let params = &request.params;
        let all = request.row_params[RowParam::NumLogprobs as usize].max(0) as usize;
        let width = |top: i64| 1 + if top == -1 { self.config.vocab_size } else { top as usize };
        debug_assert!(params.logprobs.is_none_or(|top| width(top) == 1 + all));
        Group {
            state: State::Waiting,
            sequences: vec![sequence],
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

    fn key(&self, request: &Request, slot: u32) -> Key {
        let priority = if self.config.policy == Policy::Priority { request.priority } else { 0 };
        Key { priority, arrival: request.arrival, slot }
    }

    /// Drop the request of exactly this id at once, wherever it is; rows in flight will be ignored.
    pub fn abort(&mut self, request_id: &str) -> bool {
        let Some(&slot) = self.by_id.get(request_id) else { return false };
        self.remove(slot);
        true
    }

    /// Take a group out of its queue and out of existence, giving its blocks back.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<Box<Group>> {
        let mut group = self.groups[slot as usize].take()?;
        let key = self.key(&group.request, slot);
        match group.state {
            State::Waiting => drop(self.waiting.remove(&key)),
            State::Swapped => drop(self.swapped.remove(&key)),
            State::Running => {
                if let Ok(at) = self.running.binary_search(&key) {
                    self.running.remove(at);
                }
                self.num_reserved -= group.reserved;
            }
        }
        for sequence in &mut group.sequences {
            self.blocks.release(std::mem::take(&mut sequence.table));
        }
        self.by_id.remove(&group.request.request_id);
        self.free_slots.push(slot);
        Some(group)
    }

    /// Move a group from its queue to another.
    pub(crate) fn requeue(&mut self, key: Key, state: State) {
        let Some(group) = &mut self.groups[key.slot as usize] else { return };
        match group.state {
            State::Waiting => drop(self.waiting.remove(&key)),
            State::Swapped => drop(self.swapped.remove(&key)),
            State::Running => {
                if let Ok(at) = self.running.binary_search(&key) {
                    self.running.remove(at);
                }
                self.num_reserved -= std::mem::take(&mut group.reserved);
            }
        }
        match state {
            State::Waiting => drop(self.waiting.insert(key)),
            State::Swapped => drop(self.swapped.insert(key)),
            State::Running => {
                let at = self.running.binary_search(&key).unwrap_or_else(|at| at);
                self.running.insert(at, key);
                group.reserved = group.reservation();
                self.num_reserved += group.reserved;
            }
        }
        group.state = state;
    }

    /// Whether a request is alive.
    pub fn has_unfinished(&self) -> bool {
        !self.by_id.is_empty()
    }

    /// Live requests.
    pub fn num_unfinished(&self) -> usize {
        self.by_id.len()
    }

    /// Forget all cached blocks. False, and nothing done, while a request is alive.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let idle = !self.has_unfinished();
        if idle {
            self.blocks.clear_cache();
        }
        idle
    }

    /// A snapshot.
    pub fn stats(&self) -> Stats {
        let live = |keys: &mut dyn Iterator<Item = &Key>| {
            keys.filter_map(|key| self.groups[key.slot as usize].as_ref()).map(|group| group.live().count()).sum()
        };
        Stats {
            num_running: live(&mut self.running.iter()),
            num_waiting: self.waiting.len(),
            num_swapped: live(&mut self.swapped.iter()),
            num_gpu_blocks: self.blocks.num_device_blocks(),
            num_free_gpu_blocks: self.blocks.num_free(),
            num_cached_gpu_blocks: self.blocks.num_cached_free(),
            num_cpu_blocks: self.blocks.num_host_blocks(),
            num_free_cpu_blocks: self.blocks.num_free_host(),
            num_copies: self.blocks.num_copies(),
            counters: self.counters,
        }
    }

    /// The blocks, for the oracle test.
    pub fn block_manager(&mut self) -> &mut BlockManager {
        &mut self.blocks
    }

    /// Live groups, for the oracle test.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().flatten().map(|group| &**group)
    }

    /// Check the design's invariants; says which does not hold.
    pub fn check_invariants(&self) -> Result<()> {
        let tables = self.groups().flat_map(|group| group.sequences.iter().map(|sequence| &sequence.table));
        self.blocks.check(&tables.collect::<Vec<_>>()).map_err(Error::Internal)?;
        for group in self.groups() {
            self.check_group(group).map_err(|what| {
                Error::Internal(format!("request {:?} ({:?}): {what}", group.request.request_id, group.state))
            })?;
        }
        let reserved: usize = self.groups().map(|group| group.reserved).sum();
        let queued = self.waiting.len() + self.running.len() + self.swapped.len();
        if reserved == self.num_reserved && queued == self.by_id.len() {
            return Ok(());
        }
        Err(Error::Internal(format!("{queued} of {} requests queued, {reserved} reserved", self.by_id.len())))
    }

    fn check_group(&self, group: &Group) -> std::result::Result<(), String> {
        for sequence in &group.sequences {
            let (table, computed) = (&sequence.table, sequence.num_computed_tokens);
            let tokens = sequence.num_tokens(group.prompt_len());
            let outstanding = usize::from(sequence.in_flight);
            if computed > tokens + outstanding.saturating_sub(1) || outstanding > self.flights.len() {
                return Err(format!("{computed} tokens computed of {tokens}, {outstanding} in flight"));
            }
            if !table.is_empty() && (group.state == State::Waiting || !sequence.is_live()) {
                return Err("owns blocks while waiting or ended".to_owned());
            }
            if !table.is_empty() && table.is_on_host() != (group.state == State::Swapped) {
                return Err("its blocks are in the wrong pool".to_owned());
            }
            if group.state != State::Waiting && table.len() < self.blocks.blocks_for(computed) && sequence.is_live() {
                return Err(format!("{} blocks for {computed} tokens", table.len()));
            }
            if sequence.num_published * self.config.block_size > computed {
                return Err(format!("{} blocks published, {computed} tokens computed", sequence.num_published));
            }
        }
        Ok(())
    }
}
