//! The scheduler: queues of requests, and what is shared by [`admission`](crate::admission) (requests in),
//! [`schedule`](crate::schedule) (plans out) and [`commit`](crate::commit) (tokens in).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;

pub use crate::admission::RequestOptions;
pub use crate::config::{Config, Policy, PreemptionMode};

use crate::beam::Stuck;
use crate::block_manager::BlockManager;
use crate::block_map::{BlockMap, RequestState};
use crate::detokenizer::Vocabulary;
use crate::draft::{Draft, Flight};
use crate::error::{Error, Result};
use crate::grammar::Compiler;
use crate::limits::EngineLimits;
use crate::output::Output;
use crate::processor::Processor;
use crate::sequence::{Group, Request, State};
use crate::stats::{Counters, Queued, Stats};

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
    pub(crate) limits: EngineLimits,
    pub(crate) blocks: BlockManager,
    pub(crate) vocabulary: Option<Arc<Vocabulary>>,
    /// What `logits_processors` may name.
    pub(crate) processors: HashMap<String, Processor>,
    /// None without a vocabulary.
    pub(crate) compiler: Option<Compiler>,
    pub(crate) groups: Vec<Option<Box<Group>>>,
    pub(crate) waiting: BTreeSet<Key>,
    /// What the waiting groups will take.
    pub(crate) queued: Queued,
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
    /// Requests that cannot go on after the tokens being committed, and why.
    pub(crate) broken: Vec<(Arc<str>, Stuck)>,
    /// Last outputs of requests that failed.
    pub(crate) failed: Vec<Output>,
    pub(crate) by_id: HashMap<Arc<str>, u32>,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) next_arrival: u64,
    pub(crate) seed_state: u64,
    start: Instant,
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
            limits: EngineLimits::new(&config, vocabulary.is_some()),
            processors: HashMap::new(),
            compiler: vocabulary.clone().map(|vocabulary| {
                let eos = config.eos_token_ids.iter().copied().filter(|&id| (id as usize) < config.vocab_size);
                Compiler::new(vocabulary, config.vocab_size, eos.collect())
            }),
            vocabulary,
            groups: Vec::new(),
            waiting: BTreeSet::new(),
            queued: Queued::default(),
            running: Vec::new(),
            swapped: BTreeSet::new(),
            num_reserved: 0,
            flights: VecDeque::with_capacity(2),
            draft: Draft::default(),
            next_step: 0,
            counters: Counters::default(),
            broken: Vec::new(),
            failed: Vec::new(),
            by_id: HashMap::new(),
            free_slots: Vec::new(),
            next_arrival: 0,
            seed_state: config.seed,
            start: Instant::now(),
            config,
        })
    }

    /// Let requests name this processor.
    pub fn register(&mut self, name: String, processor: Processor) {
        self.limits.processors.push(name.clone());
        self.processors.insert(name, processor);
    }

    /// Seconds since the scheduler was made.
    pub(crate) fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    pub(crate) fn key(&self, request: &Request, slot: u32) -> Key {
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
        self.dequeue(key, &mut group);
        for sequence in &mut group.sequences {
            self.blocks.release(std::mem::take(&mut sequence.table));
        }
        self.by_id.remove(&group.request.request_id);
        self.free_slots.push(slot);
        Some(group)
    }

    /// Move a group from its queue to another.
    pub(crate) fn requeue(&mut self, key: Key, state: State) {
        let Some(mut group) = self.groups[key.slot as usize].take() else { return };
        self.dequeue(key, &mut group);
        match state {
            State::Waiting => {
                self.waiting.insert(key);
                self.queued.add(&group.request);
            }
            State::Swapped => drop(self.swapped.insert(key)),
            State::Running => {
                let at = self.running.binary_search(&key).unwrap_or_else(|at| at);
                self.running.insert(at, key);
                group.reserved = group.reservation();
                self.num_reserved += group.reserved;
            }
        }
        group.state = state;
        self.groups[key.slot as usize] = Some(group);
    }

    fn dequeue(&mut self, key: Key, group: &mut Group) {
        match group.state {
            State::Waiting => {
                self.waiting.remove(&key);
                self.queued.remove(&group.request);
            }
            State::Swapped => drop(self.swapped.remove(&key)),
            State::Running => {
                if let Ok(at) = self.running.binary_search(&key) {
                    self.running.remove(at);
                }
                self.num_reserved -= std::mem::take(&mut group.reserved);
            }
        }
    }

    /// Whether a request is alive, or has failed and nobody has been told.
    pub fn has_unfinished(&self) -> bool {
        !self.by_id.is_empty() || !self.failed.is_empty()
    }

    /// Whether a request waits for its grammar.
    pub fn is_compiling(&self) -> bool {
        self.compiler.as_ref().is_some_and(Compiler::is_busy)
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
            num_compiling: self.groups().filter(|group| group.compiling).count(),
            queued: self.queued,
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

    /// What a request may ask for.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Who holds which block.
    pub fn block_map(&self) -> BlockMap {
        let requests: Vec<RequestState> = self.groups().map(RequestState::new).collect();
        let mut owners = vec![-1; self.blocks.num_device_blocks()];
        for (index, group) in self.groups().enumerate().filter(|(_, group)| group.state == State::Running) {
            for &block in group.sequences.iter().flat_map(|sequence| sequence.table.blocks()) {
                let owner: &mut i32 = &mut owners[block as usize];
                if *owner < 0 {
                    *owner = index as i32;
                }
            }
        }
        let (ref_counts, cached) = self.blocks.device_blocks();
        BlockMap { ref_counts, owners, cached, requests }
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
        let mut waiting = Queued::default();
        self.groups().filter(|group| group.state == State::Waiting).for_each(|group| waiting.add(&group.request));
        if reserved == self.num_reserved && queued == self.by_id.len() && waiting == self.queued {
            return Ok(());
        }
        let known = self.by_id.len();
        Err(Error::Internal(format!("{queued} of {known} requests queued, {reserved} reserved, {waiting:?} waiting")))
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
