//! A fake device. It works from a plan's buffer alone, as a worker would, and holds for each slot of the KV memory a
//! digest of the history that was written there. A table that does not give back one consistent history is an error.

use pyvllm_core::commit::Sampled;
use pyvllm_core::error::Result as CoreResult;
use pyvllm_core::output::{LogprobTable, Output};
use pyvllm_core::plan::{Header, MAGIC, NUM_SECTIONS, ROW_PARAMS, RowParam, Section, StepPlan};
use pyvllm_core::{Scheduler, plan};

use super::model::{self, Digest, EMPTY, Row, VOCAB};

/// KV of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    token: u32,
    position: u32,
    digest: Digest,
}

const BLANK: Slot = Slot { token: u32::MAX, position: u32::MAX, digest: 0 };

/// What a step's sampler returns.
#[derive(Debug)]
pub struct Results {
    pub step: u32,
    pub num_rows: usize,
    pub num_candidates: usize,
    pub token_ids: Vec<i32>,
    pub logprobs: Vec<f32>,
    pub sample_table: Option<LogprobTable>,
    pub prompt_table: Option<LogprobTable>,
    pub candidate_table: Option<LogprobTable>,
}

impl Results {
    pub fn commit(&self, scheduler: &mut Scheduler) -> CoreResult<Vec<Output>> {
        let sampled = Sampled {
            token_ids: &self.token_ids,
            logprobs: &self.logprobs,
            sample_table: self.sample_table.as_ref(),
            prompt_table: self.prompt_table.as_ref(),
            candidate_table: self.candidate_table.as_ref(),
        };
        scheduler.commit(self.step, sampled)
    }
}

/// One scheduled sequence, read from the plan.
#[derive(Clone, Copy)]
struct Query<'a> {
    first: usize,
    end: usize,
    table: &'a [i32],
}

pub struct Device {
    block_size: usize,
    kv: Vec<Slot>,
    host: Vec<Slot>,
    /// First column of the latest step's tokens.
    pub previous: Vec<i32>,
    pub steps: usize,
    pub swapped_in: usize,
    pub shared_rows: usize,
    pub cascades: usize,
}

type Checked<T> = Result<T, String>;

fn ensure(ok: bool, message: impl FnOnce() -> String) -> Checked<()> {
    if ok { Ok(()) } else { Err(message()) }
}

impl Device {
    pub fn new(blocks: usize, host_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            kv: vec![BLANK; blocks * block_size],
            host: vec![BLANK; host_blocks * block_size],
            previous: Vec::new(),
            steps: 0,
            swapped_in: 0,
            shared_rows: 0,
            cascades: 0,
        }
    }

    /// Run one step: swap out, swap in, copies, KV writes, attention, sampling.
    pub fn launch(&mut self, plan: &StepPlan) -> Checked<Results> {
        self.check_header(plan)?;
        self.move_blocks(plan)?;
        let queries = queries(plan)?;
        let ids = self.resolve(plan)?;
        self.write(plan, &queries, &ids)?;
        for query in &queries {
            self.read(plan, query, &ids)?;
        }
        self.check_cascades(plan, &queries)?;
        self.steps += 1;
        self.sample(plan, &queries)
    }

    fn check_header(&self, plan: &StepPlan) -> Checked<()> {
        let header = |scalar| plan.header(scalar);
        ensure(header(Header::Magic) == MAGIC && header(Header::NumSections) == NUM_SECTIONS as i32, || {
            "not a plan".to_owned()
        })?;
        ensure(header(Header::Step) as u32 == plan.step, || "the plan's step differs".to_owned())?;
        let (tokens, seqs) = (header(Header::NumTokens) as usize, header(Header::NumSeqs) as usize);
        let (rows, graph) = (header(Header::NumRows) as usize, header(Header::GraphSize) as usize);
        let padded = |real: usize| if graph == 0 { real } else { graph };
        let lens = [
            (Section::TokenIds, padded(tokens)),
            (Section::Positions, padded(tokens)),
            (Section::SlotMapping, padded(tokens)),
            (Section::QueryStartLoc, padded(seqs) + 1),
            (Section::SeqLens, padded(seqs)),
            (Section::RowToken, padded(rows)),
            (Section::RowParams, padded(rows) * ROW_PARAMS),
            (Section::BlockTableOffsets, padded(seqs) + 1),
            (Section::CascadeSeqs, padded(seqs)),
            (Section::CascadeOffsets, padded(seqs) + 1),
            (Section::CascadeBlocks, padded(seqs)),
        ];
        for (section, len) in lens {
            let found = plan.section(section).len();
            ensure(found == len, || format!("{section:?} has {found} words, expected {len}"))?;
        }
        let padding = &plan.section(Section::SlotMapping)[tokens..];
        ensure(padding.iter().all(|&slot| slot == -1), || "padding writes KV".to_owned())?;
        ensure(graph == 0 || (tokens == seqs && rows == seqs && seqs <= graph), || "not a decode step".to_owned())
    }

    /// Members decode and share blocks that lie before the token they compute; nobody is in two cascades.
    fn check_cascades(&mut self, plan: &StepPlan, queries: &[Query<'_>]) -> Checked<()> {
        let (seqs, starts) = (plan.section(Section::CascadeSeqs), plan.section(Section::CascadeOffsets));
        let (blocks, lens) = (plan.section(Section::CascadeBlocks), plan.section(Section::SeqLens));
        let count = plan.header(Header::NumCascades) as usize;
        self.cascades += count;
        let end = starts[count] as usize;
        ensure(starts[count..].iter().all(|&start| start as usize == end), || format!("cascade offsets {starts:?}"))?;
        ensure(blocks[count..].iter().all(|&shared| shared == 0), || format!("cascade blocks {blocks:?}"))?;
        let distinct: std::collections::BTreeSet<_> = seqs[..end].iter().collect();
        ensure(distinct.len() == end, || format!("a sequence is in two cascades: {seqs:?}"))?;
        for i in 0..count {
            let members = &seqs[starts[i] as usize..starts[i + 1] as usize];
            let shared = blocks[i] as usize;
            let prefix = |seq: i32| &queries[seq as usize].table[..shared];
            let whole = |&seq: &i32| {
                let query = &queries[seq as usize];
                query.end - query.first == 1 && shared * self.block_size < lens[seq as usize] as usize
            };
            ensure(members.len() > 1 && members.iter().all(whole), || format!("cascade {i} of {members:?}"))?;
            let same = members.iter().all(|&seq| prefix(seq) == prefix(members[0]));
            ensure(same, || format!("cascade {i}: {members:?} do not share {shared} blocks"))?;
        }
        Ok(())
    }

    /// Blocks of one kind of move are read before any is written: no block may be source and destination.
    fn move_blocks(&mut self, plan: &StepPlan) -> Checked<()> {
        let pairs = |section| plan.section(section).as_chunks::<2>().0;
        for section in [Section::SwapOut, Section::SwapIn, Section::Copies] {
            let moves = pairs(section);
            for (i, [_, to]) in moves.iter().enumerate() {
                let twice = moves[..i].iter().any(|[_, other]| other == to);
                let read = section == Section::Copies && moves.iter().any(|[from, _]| from == to);
                ensure(!twice && !read, || format!("{section:?} races on block {to}: {moves:?}"))?;
            }
        }
        let overlap =
            pairs(Section::SwapOut).iter().any(|[_, host]| pairs(Section::SwapIn).iter().any(|[from, _]| from == host));
        ensure(!overlap, || "a host block is swapped out to and in from in one step".to_owned())?;
        let size = self.block_size;
        let at = |block: i32| block as usize * size..(block as usize + 1) * size;
        for &[device, host] in pairs(Section::SwapOut) {
            self.host[at(host)].copy_from_slice(&self.kv[at(device)]);
        }
        for &[host, device] in pairs(Section::SwapIn) {
            self.kv[at(device)].copy_from_slice(&self.host[at(host)]);
            self.swapped_in += 1;
        }
        for &[from, to] in pairs(Section::Copies) {
            self.kv.copy_within(at(from), to as usize * size);
        }
        Ok(())
    }

    /// Token ids, those of the previous step's rows filled in.
    fn resolve(&self, plan: &StepPlan) -> Checked<Vec<u32>> {
        let tokens = &plan.section(Section::TokenIds)[..plan.header(Header::NumTokens) as usize];
        tokens.iter().map(|&id| self.resolve_one(id)).collect()
    }

    fn resolve_one(&self, id: i32) -> Checked<u32> {
        if id >= 0 {
            return Ok(id as u32);
        }
        let row = (-1 - id) as usize;
        let found = self.previous.get(row);
        found.map(|&id| id as u32).ok_or_else(|| format!("row {row} of a step of {} rows", self.previous.len()))
    }

    /// Write KV. A token's KV depends on the one before it, which another sequence may write in this very step (a
    /// prefix found in the cache), as every layer writes before it reads: so go by what each write waits for.
    fn write(&mut self, plan: &StepPlan, queries: &[Query], ids: &[u32]) -> Checked<()> {
        let slots = plan.section(Section::SlotMapping);
        let positions = plan.section(Section::Positions);
        let mut pending = vec![false; self.kv.len()];
        for &slot in &slots[..ids.len()] {
            let slot = slot as usize;
            ensure(slot < pending.len(), || format!("slot {slot} is outside the pool"))?;
            ensure(!std::mem::replace(&mut pending[slot], true), || format!("slot {slot} is written twice"))?;
        }
        let mut left: Vec<&Query> = queries.iter().collect();
        while !left.is_empty() {
            let before = left.len();
            let mut waiting = Vec::new();
            for query in left {
                let start = positions[query.first] as usize;
                let previous = start.checked_sub(1).map(|position| self.slot(query.table, position));
                if previous.is_some_and(|slot| pending[slot]) {
                    waiting.push(query);
                    continue;
                }
                let mut digest = previous.map_or(EMPTY, |slot| self.kv[slot].digest);
                for token in query.first..query.end {
                    let position = positions[token] as usize;
                    let slot = slots[token] as usize;
                    ensure(slot == self.slot(query.table, position), || "slot and table differ".to_owned())?;
                    digest = model::extend(digest, ids[token], position);
                    self.kv[slot] = Slot { token: ids[token], position: position as u32, digest };
                    pending[slot] = false;
                }
            }
            ensure(waiting.len() < before, || "sequences wait for one another's writes".to_owned())?;
            left = waiting;
        }
        Ok(())
    }

    fn slot(&self, table: &[i32], position: usize) -> usize {
        table[position / self.block_size] as usize * self.block_size + position % self.block_size
    }

    /// Attention: the table must give back one consistent history, from the first token to the last.
    fn read(&self, plan: &StepPlan, query: &Query, ids: &[u32]) -> Checked<()> {
        let positions = plan.section(Section::Positions);
        let len = positions[query.end - 1] as usize + 1;
        let mut before = EMPTY;
        for position in 0..len {
            let slot = self.slot(query.table, position);
            let found = self.kv[slot];
            before = model::extend(before, found.token, position);
            ensure(found.position as usize == position && found.digest == before, || {
                format!("step {}: slot {slot} is not position {position} of its history: {found:?}", plan.step)
            })?;
        }
        let last = self.kv[self.slot(query.table, len - 1)];
        ensure(last.token == ids[query.end - 1], || "the last token's KV was overwritten".to_owned())
    }

    fn sample(&mut self, plan: &StepPlan, queries: &[Query]) -> Checked<Results> {
        let num_rows = plan.header(Header::NumRows) as usize;
        let k = plan.header(Header::NumCandidates) as usize;
        let row_token = &plan.section(Section::RowToken)[..num_rows];
        self.shared_rows += row_token.windows(2).filter(|pair| pair[0] == pair[1]).count();
        let mut rows = Vec::with_capacity(num_rows);
        for &token in row_token {
            let query = queries.iter().find(|query| query.end == token as usize + 1);
            let query = query.ok_or_else(|| format!("row of token {token}, not the last one of a sequence"))?;
            let position = plan.section(Section::Positions)[token as usize] as usize;
            rows.push(Row::new(self.kv[self.slot(query.table, position)].digest));
        }
        self.adjust(plan, &mut rows)?;
        let params = plan.section(Section::RowParams).as_chunks::<ROW_PARAMS>().0;
        let (mut token_ids, mut logprobs) = (Vec::with_capacity(num_rows * k), Vec::with_capacity(num_rows * k));
        for (row, params) in rows.iter().zip(params) {
            match params[RowParam::NumCandidates as usize] {
                1 => {
                    let (token, logprob) = row.sample();
                    token_ids.push(token as i32);
                    logprobs.push(logprob);
                }
                count => {
                    for (token, logprob) in row.best(count as usize) {
                        token_ids.push(token as i32);
                        logprobs.push(logprob);
                    }
                }
            }
            token_ids.resize(token_ids.len().next_multiple_of(k), 0);
            logprobs.resize(token_ids.len(), f32::NAN);
        }
        self.previous = token_ids.iter().step_by(k).copied().collect();
        let width = plan.header(Header::MaxLogprobs) + 1;
        let sample_table = (width > 0).then(|| sample_table(&rows, &self.previous, width as usize));
        let prompt_table = self.prompt_table(plan, queries);
        Ok(Results {
            step: plan.step,
            num_rows,
            num_candidates: k,
            token_ids,
            logprobs,
            sample_table,
            prompt_table,
            candidate_table: None,
        })
    }

    /// Noise, penalties, bias, allowed and banned tokens.
    fn adjust(&self, plan: &StepPlan, rows: &mut [Row]) -> Checked<()> {
        let params = plan.section(Section::RowParams).as_chunks::<ROW_PARAMS>().0;
        for (row, params) in rows.iter_mut().zip(params) {
            let random = plan.header(Header::Flags) & plan::flags::RANDOM != 0;
            if params[RowParam::Temperature as usize] != 0 {
                ensure(random, || "a random row in a step without the flag".to_owned())?;
                let word = |field: RowParam| u64::from(params[field as usize] as u32);
                row.noise = word(RowParam::NoiseKey0) | word(RowParam::NoiseKey1) << 32;
            }
        }
        let offsets = plan.section(Section::PenaltyOffsets);
        let tokens = plan.section(Section::PenaltyTokens).as_chunks::<2>().0;
        for (i, &row) in plan.section(Section::PenaltyRows).iter().enumerate() {
            let mut counts = [None; VOCAB as usize];
            for &[id, count] in &tokens[offsets[i] as usize..offsets[i + 1] as usize] {
                *counts[self.resolve_one(id)? as usize].get_or_insert(0) += count;
            }
            let effects =
                counts.iter().enumerate().filter_map(|(id, count)| Some(model::penalty(id as u32, (*count)?)));
            rows[row as usize].adjusted = effects.fold(rows[row as usize].adjusted, u64::wrapping_add);
        }
        for &[row, id, bits] in plan.section(Section::Bias).as_chunks::<3>().0 {
            let adjusted = &mut rows[row as usize].adjusted;
            *adjusted = adjusted.wrapping_add(model::bias(id as u32, bits));
        }
        let (offsets, ids) = (plan.section(Section::AllowedOffsets), plan.section(Section::AllowedIds));
        for (i, &row) in plan.section(Section::AllowedRows).iter().enumerate() {
            let ids = &ids[offsets[i] as usize..offsets[i + 1] as usize];
            rows[row as usize].allowed = ids.iter().fold(0, |mask, &id| mask | 1 << id);
        }
        for &[row, id] in plan.section(Section::Banned).as_chunks::<2>().0 {
            rows[row as usize].banned |= 1 << id;
        }
        Ok(())
    }

    fn prompt_table(&self, plan: &StepPlan, queries: &[Query]) -> Option<LogprobTable> {
        let rows = plan.section(Section::PromptRows).as_chunks::<3>().0;
        let width = 1 + rows.iter().map(|row| row[2]).max()? as usize;
        let mut table = LogprobTable::new(width);
        for &[token, next, _] in rows {
            let query = queries.iter().find(|query| (query.first..query.end).contains(&(token as usize)))?;
            let position = plan.section(Section::Positions)[token as usize] as usize;
            let row = Row::new(self.kv[self.slot(query.table, position)].digest);
            push_row(&mut table, &row, next);
        }
        Some(table)
    }
}

/// One table row: the token itself, then the best ones.
fn push_row(table: &mut LogprobTable, row: &Row, token: i32) {
    let (mut ids, mut logprobs) = (vec![token], vec![row.logprob(token as u32)]);
    for (id, logprob) in row.best(table.width - 1) {
        ids.push(id as i32);
        logprobs.push(logprob);
    }
    let rank = 1 + row.best(VOCAB as usize).iter().position(|(id, _)| *id == token as u32).unwrap_or(0);
    table.push(&ids, &logprobs, rank as i32);
}

fn sample_table(rows: &[Row], tokens: &[i32], width: usize) -> LogprobTable {
    let mut table = LogprobTable::new(width);
    rows.iter().zip(tokens).for_each(|(row, &token)| push_row(&mut table, row, token));
    table
}

/// The plan's sequences; fails where its sections contradict one another.
fn queries(plan: &StepPlan) -> Checked<Vec<Query<'_>>> {
    let (starts, lens) = (plan.section(Section::QueryStartLoc), plan.section(Section::SeqLens));
    let (offsets, ids) = (plan.section(Section::BlockTableOffsets), plan.section(Section::BlockTableIds));
    let positions = plan.section(Section::Positions);
    let num_seqs = plan.header(Header::NumSeqs) as usize;
    let mut queries = Vec::with_capacity(num_seqs);
    for i in 0..num_seqs {
        let (first, end) = (starts[i] as usize, starts[i + 1] as usize);
        ensure(first < end, || format!("sequence {i} has no token"))?;
        let consecutive = (first..end - 1).all(|token| positions[token] + 1 == positions[token + 1]);
        ensure(consecutive && positions[end - 1] + 1 == lens[i], || format!("positions of sequence {i}"))?;
        let decode = i < plan.header(Header::NumDecodes) as usize;
        ensure(decode == (end - first == 1), || format!("sequence {i} of {} decodes", end - first))?;
        queries.push(Query { first, end, table: &ids[offsets[i] as usize..offsets[i + 1] as usize] });
    }
    let tokens = plan.header(Header::NumTokens) as usize;
    ensure(starts[num_seqs] as usize == tokens, || "query_start_loc and num_tokens differ".to_owned())?;
    Ok(queries)
}
