//! `schedule()`: plans out. Running groups go on, swapped ones come back, waiting ones are admitted.
//!
//! There is no prefill or decode phase: each sequence's `num_computed_tokens` catches up with its tokens, within the
//! step's token budget. Blocks are taken as tokens are scheduled (a prompt's all at once, on admission); when they
//! run out, the youngest running group that is not yet part of the step is preempted. A step that preempts brings
//! nobody back, so no block is both source and destination of the step's moves.

use crate::block_manager::{BlockId, BlockManager};
use crate::draft::{Draft, Entry};
use crate::fault::Fault;
use crate::plan::{Header, StepPlan};
use crate::scheduler::{Config, Key, PreemptionMode, Scheduler};
use crate::sequence::{Group, Sequence, State};

/// Tokens of a sequence that a group wants computed.
#[derive(Clone, Copy, Debug)]
struct Want {
    sequence: usize,
    start: usize,
    len: usize,
}

impl Scheduler {
    /// The next step, or None: nothing can run before the next commit. At most two steps are outstanding.
    pub fn schedule(&mut self) -> Option<StepPlan> {
        if self.flights.len() >= 2 {
            return None;
        }
        self.take_grammars();
        let mut draft = std::mem::take(&mut self.draft);
        draft.clear();
        let mut budget = self.config.max_num_batched_tokens;
        let preempted = self.schedule_running(&mut draft, &mut budget);
        if !preempted {
            self.bring_back(&mut draft, &mut budget);
            if self.swapped.is_empty() {
                self.admit(&mut draft, &mut budget);
            }
        }
        let plan = (!draft.is_empty()).then(|| {
            let step = self.next_step;
            self.next_step = self.next_step.wrapping_add(1) & 0x7fff_ffff;
            let Config { block_size, graph_sizes, cascade_tokens, .. } = &self.config;
            let cascade_blocks = cascade_tokens.div_ceil(*block_size);
            let (plan, flight) = draft.write(step, &mut self.groups, *block_size, graph_sizes, cascade_blocks);
            self.flights.push_back(flight);
            self.counters.step_tokens.observe(plan.header(Header::NumTokens) as u64);
            plan
        });
        self.draft = draft;
        for (request_id, why) in self.draft.take_broken() {
            self.fail_grammar(&request_id, &why);
        }
        plan
    }

    /// Schedule running groups, oldest first; true if one was preempted.
    fn schedule_running(&mut self, draft: &mut Draft, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut wants = Vec::new();
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let key = self.running[at];
            let Some(group) = self.groups[key.slot as usize].as_deref() else { return preempted };
            self.wants(group, *budget, &mut wants);
            let needed = self.blocks_needed(group, &wants);
            while needed > self.blocks.num_free() {
                let Some(victim) = self.running.last().copied() else { break };
                self.preempt(victim, draft);
                preempted = true;
                if victim == key {
                    return preempted;
                }
            }
            self.place(key.slot, &wants, draft, budget);
            at += 1;
        }
        preempted
    }

    /// What a running group would compute, within `budget` tokens.
    fn wants(&self, group: &Group, budget: usize, wants: &mut Vec<Want>) {
        wants.clear();
        let prompt_len = group.prompt_len();
        if !group.forked {
            let root = group.live().next().map(|(i, root)| (i, root.num_computed_tokens));
            wants.extend(root.and_then(|(i, start)| self.chunk(i, start, group.shared_len(), budget)));
            return;
        }
        if group.beam.is_some() {
            self.beam_wants(group, budget, wants);
            return;
        }
        let mut left = budget;
        for (i, sequence) in group.live() {
            let must_wait = group.request.waits_for_host && sequence.in_flight > 0;
            if must_wait || sequence.is_complete(group.request.max_output) {
                continue;
            }
            let end = sequence.num_tokens(prompt_len) + usize::from(sequence.in_flight);
            let Some(want) = self.chunk(i, sequence.num_computed_tokens, end, left) else { continue };
            left -= want.len;
            wants.push(want);
        }
    }

    /// The tokens of a sequence from `start` up to `end`, as far as `budget` allows.
    fn chunk(&self, sequence: usize, start: usize, end: usize, budget: usize) -> Option<Want> {
        let all = end.saturating_sub(start);
        let len = all.min(budget);
        let whole = len == all || self.config.enable_chunked_prefill;
        (len > 0 && whole).then_some(Want { sequence, start, len })
    }

    /// Beams sample together: all catch up with their last tokens first, then compute those in one step.
    fn beam_wants(&self, group: &Group, budget: usize, wants: &mut Vec<Want>) {
        if group.has_in_flight() && !self.blocks.faults.has(Fault::BeamsRunAhead) {
            return;
        }
        let prompt_len = group.prompt_len();
        let mut left = budget;
        for (i, sequence) in group.live() {
            let want = self.chunk(i, sequence.num_computed_tokens, sequence.num_tokens(prompt_len) - 1, left);
            left -= want.map_or(0, |want| want.len);
            wants.extend(want);
        }
        let behind = |sequence: &Sequence| sequence.num_computed_tokens + 1 < sequence.num_tokens(prompt_len);
        if group.live().any(|(_, sequence)| behind(sequence)) || group.sequences.len() > budget {
            return;
        }
        let last =
            |(i, sequence): (usize, &Sequence)| Want { sequence: i, start: sequence.num_computed_tokens, len: 1 };
        wants.extend(group.live().map(last));
    }

    /// Free blocks that computing `wants` takes: new ones, and copies of shared tails. Of a tail's holders the last
    /// writes in place, if all of them write.
    fn blocks_needed(&self, group: &Group, wants: &[Want]) -> usize {
        let block_size = self.config.block_size;
        let mut needed = 0;
        let mut shared: Vec<BlockId> = Vec::new();
        for want in wants {
            let table = &group.sequences[want.sequence].table;
            needed += (want.start + want.len).div_ceil(block_size).saturating_sub(table.len());
            let first = want.start / block_size;
            if self.blocks.is_shared(table, first) {
                shared.push(table.blocks()[first]);
            }
        }
        shared.sort_unstable();
        for holders in shared.chunk_by(|a, b| a == b) {
            let all_write = self.blocks.ref_count(holders[0]) as usize == holders.len();
            needed += holders.len() - usize::from(all_write);
        }
        needed
    }

    /// Put tokens into the step: blocks, copy-on-write, rows at the end of what is known, the fork of n > 1.
    fn place(&mut self, slot: u32, wants: &[Want], draft: &mut Draft, budget: &mut usize) {
        let Some(mut group) = self.groups[slot as usize].take() else { return };
        let block_size = self.config.block_size;
        let prompt_len = group.prompt_len();
        for want in wants {
            let end = want.start + want.len;
            let sequence = &mut group.sequences[want.sequence];
            self.blocks.make_writable(&mut sequence.table, want.start / block_size, &mut draft.copies);
            self.blocks.grow(&mut sequence.table, end.div_ceil(block_size));
            sequence.num_computed_tokens = end;
            *budget -= want.len;
            let caught_up = end == sequence.num_tokens(prompt_len) + usize::from(sequence.in_flight);
            let mut entry = Entry {
                slot,
                sequence: want.sequence as u32,
                start: want.start as u32,
                len: want.len as u32,
                first_row: want.sequence as u32,
                num_rows: u32::from(caught_up),
                prompt_rows: prompt_rows(&mut group, want),
            };
            // Kernels of decode steps read blocks before the step's own keys are in them: a token that is alone publishes
            // what it completes when it is committed.
            if want.len > 1 {
                self.publish(&mut group, want.sequence);
            }
            if !group.forked && end == group.shared_len() {
                self.hand_on(&mut group, want.sequence);
                entry.num_rows *= group.sequences.len() as u32;
            }
            let rows = entry.first_row as usize..(entry.first_row + entry.num_rows) as usize;
            group.sequences[rows].iter_mut().for_each(|sequence| sequence.in_flight += 1);
            draft.entries.push(entry);
        }
        self.groups[slot as usize] = Some(group);
    }

    /// The KV of what all sequences begin with is scheduled: let the others share it. At first that is the prompt, and
    /// they are made here (beams: from the first step's candidates, at its commit); after a recomputation they exist
    /// and have tokens of their own.
    fn hand_on(&mut self, group: &mut Group, root: usize) {
        let computed = group.shared_len();
        group.forked = true;
        let fresh = group.sequences.len() == 1 && group.sequences[root].history.output.is_empty();
        if fresh && group.beam.is_none() {
            let width = group.request.params.width() as u32;
            group.sequences.extend((1..width).map(|index| Sequence { index, ..Sequence::default() }));
        }
        let published = group.sequences[root].num_published;
        for i in 0..group.sequences.len() {
            if i == root || !group.sequences[i].is_live() {
                continue;
            }
            let table = self.blocks.fork(&group.sequences[root].table);
            let hashes = if fresh { group.sequences[root].hashes.clone() } else { Vec::new() };
            let history = fresh.then(|| group.sequences[root].history.clone());
            let sequence = &mut group.sequences[i];
            sequence.table = table;
            sequence.num_computed_tokens = computed;
            if let Some(history) = history {
                sequence.history = history;
                sequence.hashes = hashes;
            }
            sequence.num_published = published.min(sequence.hashes.len());
        }
    }

    /// Take a running group's device blocks away.
    fn preempt(&mut self, key: Key, draft: &mut Draft) {
        let Some(mut group) = self.groups[key.slot as usize].take() else { return };
        let lone = group.beam.is_none() && group.live().count() == 1;
        let swap = match self.config.preemption_mode {
            PreemptionMode::Auto => !lone,
            PreemptionMode::Swap => true,
            PreemptionMode::Recompute => false,
        };
        let live = group.sequences.iter_mut().filter(|sequence| sequence.is_live());
        let mut tables: Vec<_> = live.map(|sequence| &mut sequence.table).collect();
        let swapped = swap && self.blocks.swap_out(&mut tables, &mut draft.swap_out);
        if !swapped {
            for sequence in &mut group.sequences {
                self.blocks.release(std::mem::take(&mut sequence.table));
                sequence.num_computed_tokens = 0;
                sequence.num_published = 0;
            }
            group.forked = group.request.params.width() == 1;
        }
        group.num_preemptions += 1;
        self.counters.num_swap_outs += u64::from(swapped);
        self.counters.num_recomputations += u64::from(!swapped);
        self.groups[key.slot as usize] = Some(group);
        self.requeue(key, if swapped { State::Swapped } else { State::Waiting });
    }

    /// Bring swapped groups back while there is room.
    fn bring_back(&mut self, draft: &mut Draft, budget: &mut usize) {
        while let Some(&key) = self.swapped.first().filter(|_| *budget > 0) {
            let Some(mut group) = self.groups[key.slot as usize].take() else { return };
            let reserve = if self.running.is_empty() { 0 } else { group.live().count() };
            let distinct = BlockManager::distinct(group.live().map(|(_, sequence)| &sequence.table));
            let fits = distinct + reserve <= self.blocks.num_free()
                && self.num_reserved + group.reservation() <= self.config.max_num_seqs
                && !group.has_in_flight();
            let (mut wants, mut needed) = (Vec::new(), 0);
            if fits {
                let live = group.sequences.iter_mut().filter(|sequence| sequence.is_live());
                let mut tables: Vec<_> = live.map(|sequence| &mut sequence.table).collect();
                self.blocks.swap_in(&mut tables, &mut draft.swap_in);
                // The blocks are new ones: offer them to the cache from the first again.
                group.sequences.iter_mut().for_each(|sequence| sequence.num_published = 0);
                self.wants(&group, *budget, &mut wants);
                needed = self.blocks_needed(&group, &wants);
            }
            self.groups[key.slot as usize] = Some(group);
            if !fits {
                return;
            }
            self.requeue(key, State::Running);
            if needed <= self.blocks.num_free() {
                self.place(key.slot, &wants, draft, budget);
            }
        }
    }

    /// The first request that waits for room alone.
    fn first_waiting(&self) -> Option<Key> {
        let ready = |key: &&Key| self.groups[key.slot as usize].as_ref().is_some_and(|group| !group.compiling);
        self.waiting.iter().find(ready).copied()
    }

    /// Admit waiting groups, in order, while there is room.
    fn admit(&mut self, draft: &mut Draft, budget: &mut usize) {
        while let Some(key) = self.first_waiting().filter(|_| *budget > 0) {
            let Some(mut group) = self.groups[key.slot as usize].take() else { return };
            let want = self.try_admit(&mut group, *budget);
            self.groups[key.slot as usize] = Some(group);
            let Some(want) = want else { return };
            self.requeue(key, State::Running);
            self.place(key.slot, &[want], draft, budget);
        }
    }

    /// Give a waiting group the blocks of its first sequence's known tokens, cached ones as far as possible. None,
    /// and nothing changed, if it cannot run now.
    fn try_admit(&mut self, group: &mut Group, budget: usize) -> Option<Want> {
        if group.has_in_flight() || self.num_reserved + group.reservation() > self.config.max_num_seqs {
            return None;
        }
        let block_size = self.config.block_size;
        let (root, sequence) = group.live().next()?;
        let prompt_len = group.prompt_len();
        let tokens = sequence.num_tokens(prompt_len);
        let span = if group.forked { tokens } else { group.shared_len() };
        // A request that still wants log-probabilities of its prompt computes all of it.
        let reuse = group.prompt_logprobs.is_none() || group.prompt_rows_scheduled + 1 >= prompt_len;
        let most = if reuse { ((span - 1) / block_size).min(sequence.hashes.len()) } else { 0 };
        let (matched, matched_free) = self.blocks.match_prefix(&sequence.hashes[..most]);
        let available = self.blocks.num_free() - matched_free;
        let total = span.div_ceil(block_size);
        let watermark = if self.running.is_empty() { 0 } else { self.config.num_gpu_blocks.div_ceil(100) };
        if total - matched + self.blocks_behind(group) + watermark > available {
            return None;
        }
        let start = matched * block_size;
        let want = self.chunk(root, start, span, budget)?;
        if group.num_preemptions == 0 {
            self.counters.prefix_queries += prompt_len as u64;
            self.counters.prefix_hits += start as u64;
            self.counters.prompt_tokens += prompt_len as u64;
            group.num_cached_tokens = start;
            group.timing.scheduled = self.now();
        }
        let sequence = &mut group.sequences[root];
        let hashes = &sequence.hashes[..matched];
        self.blocks.adopt(&mut sequence.table, hashes);
        self.blocks.grow(&mut sequence.table, total);
        sequence.num_computed_tokens = start;
        sequence.num_published = matched;
        Some(want)
    }

    /// Blocks that a group's sequences will take as soon as what they share is handed on to them.
    fn blocks_behind(&self, group: &Group) -> usize {
        if group.forked || group.request.max_output == 1 {
            return 0;
        }
        let block_size = self.config.block_size;
        let (prompt_len, shared_len) = (group.prompt_len(), group.shared_len());
        let whole = shared_len / block_size;
        let root_tail = shared_len.div_ceil(block_size) - whole;
        let started = group.sequences.len() > 1 || !group.sequences[0].history.output.is_empty();
        let own = |sequence: &Sequence| sequence.num_tokens(prompt_len).div_ceil(block_size) - whole;
        if started {
            let all: usize = group.live().map(|(_, sequence)| own(sequence)).sum();
            all.saturating_sub(root_tail)
        } else {
            group.request.params.width() - root_tail
        }
    }
}

/// Prompt positions in `want` whose log-probabilities are still to be had, as (first, count) from its start.
fn prompt_rows(group: &mut Group, want: &Want) -> (u32, u32) {
    if group.prompt_logprobs.is_none() {
        return (0, 0);
    }
    let first = group.prompt_rows_scheduled.max(want.start);
    let end = (want.start + want.len).min(group.prompt_len() - 1);
    if first >= end {
        return (0, 0);
    }
    group.prompt_rows_scheduled = end;
    ((first - want.start) as u32, (end - first) as u32)
}
