//! Logits rows: their sampling parameters, noise, and what only some of them need.

use std::sync::Arc;

use crate::draft::{Entry, Flight, RowRef};
use crate::grammar::Grammar;
use crate::plan::{ROW_PARAMS, RowParam, flags};
use crate::processor::ProcessedRow;
use crate::sequence::{Group, Request, Sequence};

/// Sections that only some rows need, and the scalars that rows add up to.
#[derive(Default)]
pub(crate) struct Extras {
    pub penalty_rows: Vec<i32>,
    pub penalty_offsets: Vec<i32>,
    pub penalty_tokens: Vec<[i32; 2]>,
    pub bias: Vec<[i32; 3]>,
    pub allowed_rows: Vec<i32>,
    pub allowed_offsets: Vec<i32>,
    pub allowed_ids: Vec<i32>,
    pub banned: Vec<[i32; 2]>,
    pub prompt_rows: Vec<[i32; 3]>,
    pub processed: Vec<ProcessedRow>,
    pub mask_rows: Vec<i32>,
    /// Of the rows of masks, taken from their sequences until the masks are written.
    #[allow(clippy::vec_box)] // they go back in their boxes
    pub grammars: Vec<Box<Grammar>>,
    pub mask_words: Vec<i32>,
    pub flags: i32,
    pub num_candidates: i32,
    pub max_logprobs: i32,
}

impl Extras {
    pub fn new() -> Self {
        Self { num_candidates: 1, max_logprobs: -1, ..Self::default() }
    }
}

const ONE: i32 = 0x3f80_0000;
/// A padding row: greedy, nothing wanted.
pub(crate) const PADDING_ROW: [i32; ROW_PARAMS] = {
    let mut row = [0; ROW_PARAMS];
    row[RowParam::TopP as usize] = ONE;
    row[RowParam::RepetitionPenalty as usize] = ONE;
    row[RowParam::NumLogprobs as usize] = -1;
    row[RowParam::NumCandidates as usize] = 1;
    row
};

/// Ask for the log-probabilities of the prompt that an entry computes.
pub(crate) fn write_prompt_rows(
    group: &Group,
    entry: Entry,
    first_token: usize,
    flight: &mut Flight,
    extras: &mut Extras,
) {
    let (first, count) = (entry.prompt_rows.0 as usize, entry.prompt_rows.1 as usize);
    let Some(table) = group.prompt_logprobs.as_ref().filter(|_| count > 0) else { return };
    for i in first..first + count {
        let next = group.request.prompt[entry.start as usize + i + 1];
        extras.prompt_rows.push([(first_token + i) as i32, next as i32, table.width as i32 - 1]);
    }
    let reference = RowRef { slot: entry.slot, sequence: entry.sequence, arrival: group.request.arrival };
    flight.prompt_rows.push((reference, count));
    flight.prompt_table_width = flight.prompt_table_width.max(table.width);
}

/// splitmix64's finalizer: numbers that differ little become numbers that have nothing in common.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Two words that make the noise of a draw: a hash of the seed and the output position.
fn noise_key(seed: u64, position: usize) -> [i32; 2] {
    let step = (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let key = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_add(step));
    [key as u32 as i32, (key >> 32) as u32 as i32]
}

/// Write down a row that samples a sequence's next token, and tell the sequence which row that is.
pub(crate) fn write_row(group: &mut Group, index: usize, row: i32, params: &mut [i32], extras: &mut Extras) {
    let Group { request, sequences, .. } = group;
    let sequence = &mut sequences[index];
    // The row counts as in flight already; the token before it may be as well.
    let pending = usize::from(sequence.in_flight) - 1;
    let position = sequence.history.output.len() + pending;
    params.copy_from_slice(&request.row_params);
    if request.flags & flags::RANDOM != 0 {
        [params[RowParam::NoiseKey0 as usize], params[RowParam::NoiseKey1 as usize]] =
            noise_key(request.seed.wrapping_add(u64::from(sequence.index)), position);
    }
    extras.flags |= request.flags;
    extras.num_candidates = extras.num_candidates.max(params[RowParam::NumCandidates as usize]);
    extras.max_logprobs = extras.max_logprobs.max(params[RowParam::NumLogprobs as usize]);
    for processor in &request.processors {
        extras.processed.push(ProcessedRow {
            row: row as usize,
            processor: processor.clone(),
            request_id: Arc::clone(&request.request_id),
            prompt: Arc::clone(&request.prompt),
            output: sequence.history.output.clone(),
        });
    }
    if request.has_extras {
        write_extras(request, sequence, pending > 0, position, row, extras);
    }
    if let Some(grammar) = sequence.history.grammar.take() {
        extras.mask_rows.push(row);
        extras.grammars.push(grammar);
    }
    sequence.last_row = row;
}

fn write_extras(request: &Request, sequence: &Sequence, pending: bool, position: usize, row: i32, extras: &mut Extras) {
    let params = &request.params;
    if let Some(counts) = &sequence.history.counts {
        extras.penalty_rows.push(row);
        extras.penalty_offsets.push(extras.penalty_tokens.len() as i32);
        extras.penalty_tokens.extend_from_slice(&request.prompt_counts);
        extras.penalty_tokens.extend_from_slice(&counts.entries);
        if pending {
            extras.penalty_tokens.push([-1 - sequence.last_row, 1]);
        }
    }
    let bias = params.logit_bias.iter().map(|&(id, bias)| [row, id as i32, (bias as f32).to_bits() as i32]);
    extras.bias.extend(bias);
    if let Some(allowed) = &params.allowed_token_ids {
        extras.allowed_rows.push(row);
        extras.allowed_offsets.push(extras.allowed_ids.len() as i32);
        extras.allowed_ids.extend(allowed.iter().map(|&id| id as i32));
    }
    for word in &params.bad_word_ids {
        if let Some((last, before)) = word.split_last()
            && sequence.history.output.ends_with(before)
        {
            extras.banned.push([row, *last as i32]);
        }
    }
    if position < params.min_tokens as usize {
        extras.banned.extend(request.stop_tokens.iter().map(|&(id, _)| [row, id as i32]));
    }
}
