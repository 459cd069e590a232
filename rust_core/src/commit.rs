//! `commit()`: tokens in. Publishes blocks, makes text, looks for stops, ends sequences, tells what is new.

use std::sync::Arc;

use crate::beam::{self, Offer, Stuck};
use crate::draft::{Flight, RowRef};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::output::{Completion, LogprobTable, Output};
use crate::plan::RowParam;
use crate::request::OutputKind;
use crate::scheduler::Scheduler;
use crate::sequence::{Group, History, Request, Sequence};

/// What a step's sampler returned, in the order of its rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sampled<'a> {
    /// rows × candidates ids; a beam row's candidates best first.
    pub token_ids: &'a [i32],
    /// rows × candidates log-probabilities.
    pub logprobs: &'a [f32],
    /// One row for each logits row, if a row wants log-probabilities.
    pub sample_table: Option<&'a LogprobTable>,
    /// One row for each prompt row.
    pub prompt_table: Option<&'a LogprobTable>,
    /// rows × candidates rows of one column: log-probabilities of candidates as they are to be told, if beams are
    /// ranked by others.
    pub candidate_table: Option<&'a LogprobTable>,
}

impl<'a> Sampled<'a> {
    fn check(&self, flight: &Flight) -> Result<()> {
        let expected = flight.rows.len() * flight.num_candidates;
        for (name, len) in [("token_ids", self.token_ids.len()), ("logprobs", self.logprobs.len())] {
            if len != expected {
                let message = format!("commit of step {}: {name} has {len} entries, expected {expected}", flight.step);
                return Err(Error::Internal(message));
            }
        }
        let prompt_rows = flight.prompt_rows.iter().map(|(_, count)| count).sum();
        let told_width = usize::from(self.candidate_table.is_some());
        let any_more = usize::MAX;
        for (name, table, rows, width, widest) in [
            ("sample_table", self.sample_table, flight.rows.len(), flight.table_width, any_more),
            ("prompt_table", self.prompt_table, prompt_rows, flight.prompt_table_width, any_more),
            ("candidate_table", self.candidate_table, expected, told_width, 1),
        ] {
            let fits = |table: &LogprobTable| table.len() == rows && (width.max(1)..=widest).contains(&table.width);
            if !table.map_or(width == 0, fits) {
                let found = table.map_or("no table".to_owned(), |table| format!("[{}, {}]", table.len(), table.width));
                let message = format!("commit of step {}: {name} must be [{rows}, {width}], got {found}", flight.step);
                return Err(Error::Internal(message));
            }
        }
        Ok(())
    }

    /// Table row of a logits row: (ids, log-probabilities, rank).
    fn table_row(&self, row: usize) -> Option<(&'a [i32], &'a [f32], i32)> {
        let table = self.sample_table?;
        let at = row * table.width..(row + 1) * table.width;
        Some((&table.token_ids[at.clone()], &table.logprobs[at], table.ranks[row]))
    }
}

impl Scheduler {
    /// Take in what the oldest outstanding step sampled. Returns requests that ended, and those that want news of
    /// each step and advanced.
    pub fn commit(&mut self, step: u32, sampled: Sampled) -> Result<Vec<Output>> {
        let Some(flight) = self.flights.front().filter(|flight| flight.step == step) else {
            let oldest = self.flights.front().map(|flight| flight.step);
            return Err(Error::Internal(format!("commit of step {step}, the oldest outstanding one is {oldest:?}")));
        };
        sampled.check(flight)?;
        let vocab = self.config.vocab_size as i32;
        if let Some(id) = sampled.token_ids.iter().find(|&&id| id < 0 || id >= vocab) {
            return Err(Error::Internal(format!("step {step} sampled token {id}, the vocabulary has {vocab}")));
        }
        let Some(flight) = self.flights.pop_front() else { return Ok(Vec::new()) };
        self.commit_prompt_rows(&flight, sampled);
        let now = self.now();
        let mut touched: Vec<u32> = Vec::new();
        let mut row = 0;
        while row < flight.rows.len() {
            row += self.commit_row(&flight, row, sampled, now, &mut touched);
        }
        for (request_id, stuck) in std::mem::take(&mut self.broken) {
            match stuck {
                Stuck::Grammar(why) => self.fail_grammar(&request_id, &why),
                Stuck::NothingFollows => drop(self.fail(&request_id, nothing_follows())),
            }
        }
        Ok(touched.into_iter().filter_map(|slot| self.tell(slot)).collect())
    }

    fn is_alive(&self, reference: RowRef) -> bool {
        let group = self.groups[reference.slot as usize].as_ref();
        group.is_some_and(|group| group.request.arrival == reference.arrival)
    }

    fn commit_prompt_rows(&mut self, flight: &Flight, sampled: Sampled) {
        let Some(source) = sampled.prompt_table else { return };
        let mut row = 0;
        for &(reference, count) in &flight.prompt_rows {
            let alive = self.is_alive(reference);
            let group = self.groups[reference.slot as usize].as_mut().filter(|_| alive);
            if let Some(table) = group.and_then(|group| group.prompt_logprobs.as_mut()) {
                for row in row..row + count {
                    let at = row * source.width..(row + 1) * source.width;
                    table.push(&source.token_ids[at.clone()], &source.logprobs[at], source.ranks[row]);
                }
            }
            row += count;
        }
    }

    /// Take in one row, or all rows of a beam group; returns how many.
    fn commit_row(&mut self, flight: &Flight, row: usize, sampled: Sampled, now: f64, touched: &mut Vec<u32>) -> usize {
        let reference = flight.rows[row];
        if !self.is_alive(reference) {
            return 1;
        }
        let Some(mut group) = self.groups[reference.slot as usize].take() else { return 1 };
        let rows = if group.beam.is_some() {
            self.commit_beams(&mut group, flight, row, sampled, touched)
        } else {
            self.commit_token(&mut group, reference, row * flight.num_candidates, row, sampled, touched);
            1
        };
        if group.timing.first_token == 0.0 {
            group.timing.first_token = now;
        }
        group.timing.last_token = now;
        self.groups[reference.slot as usize] = Some(group);
        rows
    }

    fn commit_token(
        &mut self,
        group: &mut Group,
        reference: RowRef,
        at: usize,
        row: usize,
        sampled: Sampled,
        touched: &mut Vec<u32>,
    ) {
        let index = reference.sequence as usize;
        let Group { request, sequences, .. } = &mut *group;
        let sequence = &mut sequences[index];
        sequence.in_flight -= 1;
        if !sequence.is_live() {
            return;
        }
        let history = &mut sequence.history;
        history.accept(sampled.token_ids[at] as u32, request, self.vocabulary.as_deref());
        if let Some(why) = history.grammar_error.take() {
            self.broken.push((Arc::clone(&request.request_id), Stuck::Grammar(why)));
            return;
        }
        self.counters.generation_tokens += 1;
        if request.row_params[RowParam::NumLogprobs as usize] >= 0 {
            history.cumulative_logprob += sampled.logprobs[at];
        }
        if let (Some(table), Some((ids, logprobs, rank))) = (&mut history.logprobs, sampled.table_row(row)) {
            table.push(ids, logprobs, rank);
        }
        let finished = history.finish.is_some();
        if (request.prompt.len() + history.output.len()) / self.config.block_size > sequence.num_published {
            self.publish(group, index);
        }
        if finished {
            self.blocks.release(std::mem::take(&mut group.sequences[index].table));
            let freed = usize::from(group.reserved > 0);
            group.reserved -= freed;
            self.num_reserved -= freed;
            touch(group, reference.slot, touched);
        } else if group.request.params.output_kind != OutputKind::FinalOnly {
            touch(group, reference.slot, touched);
        }
    }

    /// Offer a sequence's full blocks, as far as their KV is scheduled and their tokens are known, to the cache.
    pub(crate) fn publish(&mut self, group: &mut Group, index: usize) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let sequence = &group.sequences[index];
        if sequence.table.is_on_host() {
            return;
        }
        let known = sequence.num_tokens(group.prompt_len());
        let ready = if self.blocks.faults.has(Fault::PublishUncomputed) {
            known.min(sequence.table.len() * block_size)
        } else {
            known.min(sequence.num_computed_tokens)
        };
        for block in sequence.num_published..ready / block_size {
            let sequence = &group.sequences[index];
            let hash = sequence.hashes.get(block).copied().unwrap_or_else(|| {
                let parent = sequence.hashes.last().copied().unwrap_or(group.request.root_hash);
                self.blocks.chain_hash(parent, &group.block_tokens(sequence, block, block_size))
            });
            let sequence = &mut group.sequences[index];
            if block == sequence.hashes.len() {
                sequence.hashes.push(hash);
            }
            self.blocks.publish(&sequence.table, block, hash);
            sequence.num_published = block + 1;
        }
    }

    fn commit_beams(
        &mut self,
        group: &mut Group,
        flight: &Flight,
        row: usize,
        sampled: Sampled,
        touched: &mut Vec<u32>,
    ) -> usize {
        let reference = flight.rows[row];
        let same = |other: &&RowRef| other.arrival == reference.arrival;
        let rows = flight.rows[row..].iter().take_while(same).count();
        let k = flight.num_candidates;
        let mine = group.request.row_params[RowParam::NumCandidates as usize] as usize;
        let offers: Vec<Offer> = (row..row + rows)
            .map(|row| {
                let candidates = row * k..row * k + mine;
                let told = sampled.candidate_table;
                Offer {
                    token_ids: &sampled.token_ids[candidates.clone()],
                    logprobs: &sampled.logprobs[candidates.clone()],
                    told: told.map(|table| (&table.logprobs[candidates.clone()], &table.ranks[candidates])),
                    top: sampled.table_row(row).map(|(ids, logprobs, _)| (&ids[1..], &logprobs[1..])),
                }
            })
            .collect();
        group.sequences.iter_mut().for_each(|sequence| sequence.in_flight = sequence.in_flight.saturating_sub(1));
        let ended = match beam::advance(group, &offers, &mut self.blocks, self.vocabulary.as_deref()) {
            Ok(ended) => ended,
            Err(stuck) => {
                self.broken.push((Arc::clone(&group.request.request_id), stuck));
                return rows;
            }
        };
        self.counters.generation_tokens += group.sequences.len().max(1) as u64;
        if !ended {
            (0..group.sequences.len()).for_each(|index| self.publish(group, index));
        }
        if ended || group.request.params.output_kind != OutputKind::FinalOnly {
            touch(group, reference.slot, touched);
        }
        rows
    }

    /// End a request that cannot go on, with what it has so far; `take_failed` tells of it. False if there is none.
    pub fn fail(&mut self, request_id: &str, error: Error) -> bool {
        let Some(mut group) = self.by_id.get(request_id).copied().and_then(|slot| self.remove(slot)) else {
            return false;
        };
        for sequence in group.sequences.iter_mut().filter(|sequence| sequence.is_live()) {
            sequence.history.fail();
        }
        self.failed.push(Output { error: Some(error), ..output(&mut group, true) });
        true
    }

    /// The last outputs of requests that failed since the last time.
    pub fn take_failed(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.failed)
    }

    /// The output of a group with news; ends the group if all its sequences have ended.
    fn tell(&mut self, slot: u32) -> Option<Output> {
        let group = self.groups[slot as usize].as_deref_mut()?;
        group.touched = false;
        if group.live().next().is_none() {
            let mut group = self.remove(slot)?;
            return Some(output(&mut group, true));
        }
        let params = &group.request.params;
        // Which of more sequences than are wanted are the best is known only at the end.
        let only_at_end =
            params.output_kind == OutputKind::FinalOnly || (params.ranks_outputs() && group.beam.is_none());
        if only_at_end {
            return None;
        }
        let Group { request, sequences, beam, .. } = &*group;
        if beam.as_ref().is_some_and(|beam| beam.news(sequences, request).is_none()) {
            return None;
        }
        Some(output(group, false))
    }
}

fn nothing_follows() -> Error {
    let message = "use_beam_search must leave a token for a beam to go on with: bad_words, allowed_token_ids, \
                   structured_outputs and logits_processors together leave none";
    Error::parameter("use_beam_search", message)
}

fn touch(group: &mut Group, slot: u32, touched: &mut Vec<u32>) {
    if !std::mem::replace(&mut group.touched, true) {
        touched.push(slot);
    }
}

fn output(group: &mut Group, finished: bool) -> Output {
    let whole = group.prompt_logprobs.as_ref().is_some_and(|table| table.len() + 1 == group.prompt_len());
    let last_time = finished || group.request.params.output_kind == OutputKind::Delta;
    let prompt_logprobs = match &mut group.prompt_logprobs {
        table if whole && last_time => table.take(),
        table if whole => table.clone(),
        _ => None,
    };
    Output {
        request_id: group.request.request_id.clone(),
        prompt: group.request.prompt_text.clone(),
        prompt_token_ids: group.request.prompt.clone(),
        prompt_logprobs,
        completions: completions(group, finished),
        error: None,
        finished,
        num_cached_tokens: group.num_cached_tokens,
        num_preemptions: group.num_preemptions,
        timing: group.timing,
    }
}

fn completions(group: &mut Group, finished: bool) -> Vec<Completion> {
    let Group { request, sequences, beam, .. } = group;
    let wants_logprobs = request.row_params[RowParam::NumLogprobs as usize] >= 0;
    let whole = |index: usize, history: &History| Completion {
        index,
        text: history.visible_text(request).to_owned(),
        token_ids: history.output.clone(),
        cumulative_logprob: wants_logprobs.then_some(history.cumulative_logprob),
        logprobs: history.logprobs.as_deref().cloned(),
        finish_reason: history.finish.as_ref().map(|(reason, _)| *reason),
        stop_reason: history.finish.as_ref().and_then(|(_, stop)| stop.clone()),
    };
    let n = request.params.n as usize;
    if let Some(beam) = beam {
        return beam.completions(sequences, request, finished);
    }
    if request.params.ranks_outputs() {
        let mut ranked: Vec<&Sequence> = sequences.iter().collect();
        ranked.sort_by(|a, b| b.history.cumulative_logprob.total_cmp(&a.history.cumulative_logprob));
        return ranked.iter().take(n).enumerate().map(|(i, sequence)| whole(i, &sequence.history)).collect();
    }
    if request.params.output_kind != OutputKind::Delta {
        return sequences.iter().map(|sequence| whole(sequence.index as usize, &sequence.history)).collect();
    }
    sequences.iter_mut().filter_map(|sequence| delta(sequence, request, wants_logprobs)).collect()
}

/// What a sequence has to tell since the last time, if anything.
fn delta(sequence: &mut Sequence, request: &Request, wants_logprobs: bool) -> Option<Completion> {
    let history = &sequence.history;
    let (text_from, tokens_from) = sequence.delivered;
    if tokens_from == history.output.len() {
        return None;
    }
    let text = history.visible_text(request);
    sequence.delivered = (text.len(), history.output.len());
    Some(Completion {
        index: sequence.index as usize,
        text: text[text_from..].to_owned(),
        token_ids: history.output[tokens_from..].to_vec(),
        cumulative_logprob: wants_logprobs.then_some(history.cumulative_logprob),
        logprobs: history.logprobs.as_ref().map(|table| table.range(tokens_from, table.len())),
        finish_reason: history.finish.as_ref().map(|(reason, _)| *reason),
        stop_reason: history.finish.as_ref().and_then(|(_, stop)| stop.clone()),
    })
}
