//! A step being put together: what is scheduled, and writing it down as a [`StepPlan`].

use std::sync::Arc;

use crate::cascade::{CascadeFinder, CascadeSections};
use crate::grammar::write_masks;
use crate::plan::{
    HEADER_LEN, Header, MAGIC, NUM_SCALARS, NUM_SECTIONS, ROW_PARAMS, SECTION_ALIGNMENT, Section, StepPlan,
};
use crate::rows::{Extras, PADDING_ROW, write_prompt_rows, write_row};
use crate::sequence::Group;

/// Tokens of one sequence in the step.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Where the group is stored.
    pub slot: u32,
    /// The sequence whose tokens are computed.
    pub sequence: u32,
    /// Position of the first token.
    pub start: u32,
    /// Tokens.
    pub len: u32,
    /// First of the group's sequences that sample from the last token.
    pub first_row: u32,
    /// How many sample from it: none inside a prompt, all n at its end.
    pub num_rows: u32,
    /// Prompt positions, from `start + first` on, whose log-probabilities are wanted: (first, count).
    pub prompt_rows: (u32, u32),
}

impl Entry {
    /// Blocks that hold its sequence once the step has run.
    fn num_blocks(&self, block_size: usize) -> usize {
        ((self.start + self.len) as usize).div_ceil(block_size)
    }
}

/// Which sequence a logits row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRef {
    /// Where the group is stored, if it still lives.
    pub slot: u32,
    /// Place of the sequence in the group; for beams, of the row's parent.
    pub sequence: u32,
    /// `Request::arrival`: tells the group from a later one in the same slot.
    pub arrival: u64,
}

/// A scheduled step whose results are outstanding.
#[derive(Debug, Default)]
pub struct Flight {
    /// Number of the step.
    pub step: u32,
    /// One for each logits row.
    pub rows: Vec<RowRef>,
    /// One for each group with prompt rows: where, and how many.
    pub prompt_rows: Vec<(RowRef, usize)>,
    /// Columns the sampler returns.
    pub num_candidates: usize,
    /// Columns that the rows want of the table of log-probabilities; 0: there need not be one.
    pub table_width: usize,
    /// The same for prompt rows.
    pub prompt_table_width: usize,
}

/// What is scheduled so far.
#[derive(Debug, Default)]
pub struct Draft {
    /// Tokens to compute.
    pub entries: Vec<Entry>,
    /// (device, host) blocks.
    pub swap_out: Vec<[i32; 2]>,
    /// (host, device) blocks.
    pub swap_in: Vec<[i32; 2]>,
    /// (source, destination) device blocks.
    pub copies: Vec<[i32; 2]>,
    /// Requests whose grammar failed while the plan was written, and why.
    broken: Vec<(Arc<str>, String)>,
    /// Kept from step to step.
    cascade_finder: CascadeFinder,
}

impl Draft {
    /// Forget everything, keeping memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.swap_out.clear();
        self.swap_in.clear();
        self.copies.clear();
    }

    /// Requests whose grammar failed while the plan was written, and why.
    pub fn take_broken(&mut self) -> Vec<(Arc<str>, String)> {
        std::mem::take(&mut self.broken)
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.swap_out.is_empty() && self.swap_in.is_empty() && self.copies.is_empty()
    }

    /// The captured graph that holds the step, or 0: only steps of one token and one row a sequence have graphs.
    fn graph_size(&self, graph_sizes: &[usize]) -> usize {
        let single = |entry: &Entry| entry.len == 1 && entry.num_rows == 1 && entry.prompt_rows.1 == 0;
        if self.entries.is_empty() || !self.entries.iter().all(single) {
            return 0;
        }
        graph_sizes.iter().copied().find(|&size| size >= self.entries.len()).unwrap_or(0)
    }

    /// Write the plan, and tell each sequence the row that samples its next token.
    ///
    /// `cascade_blocks`: fewest blocks that cascades must save; 0: there are none.
    pub fn write(
        &mut self,
        step: u32,
        groups: &mut [Option<Box<Group>>],
        block_size: usize,
        graph_sizes: &[usize],
        cascade_blocks: usize,
    ) -> (StepPlan, Flight) {
        let graph_size = self.graph_size(graph_sizes);
        if graph_size == 0 {
            self.entries.sort_by_key(|entry| entry.len != 1);
        }
        let sum = |count: fn(&Entry) -> u32| self.entries.iter().map(|entry| count(entry) as usize).sum::<usize>();
        let (num_tokens, num_rows, num_seqs) =
            (sum(|entry| entry.len), sum(|entry| entry.num_rows), self.entries.len());
        let sizes = [num_tokens.max(graph_size), num_seqs.max(graph_size), num_rows.max(graph_size)];
        let mut sections = SectionTable::new();
        let mut flight = Flight { step, rows: Vec::with_capacity(num_rows), ..Flight::default() };
        let mut extras = Extras::new();
        let mut buffer = self.fixed_sections(&mut sections, sizes, block_size);
        self.fill(&mut buffer, &sections, sizes, groups, block_size, &mut flight, &mut extras);
        self.masks(groups, &flight, &mut extras);
        self.block_tables(&mut buffer, &mut sections, groups, block_size);
        let num_cascades = self.cascades(&mut buffer, &sections, cascade_blocks);
        self.variable_sections(&mut buffer, &mut sections, &extras);
        let lens = |of: fn(&Entry) -> u32| self.entries.iter().map(of).max().unwrap_or(0) as i32;
        for (scalar, value) in [
            (Header::Magic, MAGIC),
            (Header::Step, (step & 0x7fff_ffff) as i32),
            (Header::NumTokens, num_tokens as i32),
            (Header::NumSeqs, num_seqs as i32),
            (Header::NumDecodes, self.entries.iter().filter(|entry| entry.len == 1).count() as i32),
            (Header::NumRows, num_rows as i32),
            (Header::GraphSize, graph_size as i32),
            (Header::MaxQueryLen, lens(|entry| entry.len)),
            (Header::MaxSeqLen, lens(|entry| entry.start + entry.len)),
            (Header::NumCandidates, extras.num_candidates),
            (Header::MaxLogprobs, extras.max_logprobs),
            (Header::Flags, extras.flags),
            (Header::NumCascades, num_cascades as i32),
            (Header::NumSections, NUM_SECTIONS as i32),
        ] {
            buffer[scalar as usize] = value;
        }
        buffer[NUM_SCALARS..HEADER_LEN].copy_from_slice(&sections.words);
        flight.num_candidates = extras.num_candidates as usize;
        flight.table_width = (extras.max_logprobs + 1) as usize;
        (StepPlan { step, buffer, processed: extras.processed }, flight)
    }

    /// The buffer with its header and all sections up to `block_table_offsets`, still zero, and room for the others.
    fn fixed_sections(
        &self,
        sections: &mut SectionTable,
        [tokens, seqs, rows]: [usize; 3],
        block_size: usize,
    ) -> Vec<i32> {
        for (section, len) in [
            (Section::TokenIds, tokens),
            (Section::Positions, tokens),
            (Section::SlotMapping, tokens),
            (Section::QueryStartLoc, seqs + 1),
            (Section::SeqLens, seqs),
            (Section::RowToken, rows),
            (Section::RowParams, rows * ROW_PARAMS),
            (Section::BlockTableOffsets, seqs + 1),
            (Section::CascadeSeqs, seqs),
            (Section::CascadeOffsets, seqs + 1),
            (Section::CascadeBlocks, seqs),
        ] {
            sections.place(section, len);
        }
        let blocks: usize = self.entries.iter().map(|entry| entry.num_blocks(block_size)).sum();
        let moves = self.swap_out.len() + self.swap_in.len() + self.copies.len();
        let mut buffer = Vec::with_capacity(sections.end + blocks + 2 * moves + 128);
        buffer.resize(sections.end, 0);
        buffer
    }

    #[allow(clippy::too_many_arguments)] // all of one step's state, once
    fn fill(
        &self,
        buffer: &mut [i32],
        sections: &SectionTable,
        [_, seqs, rows]: [usize; 3],
        groups: &mut [Option<Box<Group>>],
        block_size: usize,
        flight: &mut Flight,
        extras: &mut Extras,
    ) {
        let [ids, positions, slots, starts, lens, row_token, row_params, _] = sections.split_fixed(buffer);
        let mut token = 0;
        for (i, entry) in self.entries.iter().enumerate() {
            let Some(group) = groups[entry.slot as usize].as_deref_mut() else { continue };
            write_tokens(group, *entry, block_size, &mut ids[token..], &mut positions[token..], &mut slots[token..]);
            write_prompt_rows(group, *entry, token, flight, extras);
            token += entry.len as usize;
            starts[i + 1] = token as i32;
            lens[i] = (entry.start + entry.len) as i32;
            for sequence in entry.first_row..entry.first_row + entry.num_rows {
                let row = flight.rows.len();
                row_token[row] = token as i32 - 1;
                let params = &mut row_params[row * ROW_PARAMS..(row + 1) * ROW_PARAMS];
                write_row(group, sequence as usize, row as i32, params, extras);
                flight.rows.push(RowRef { slot: entry.slot, sequence, arrival: group.request.arrival });
            }
        }
        slots[token..].fill(-1);
        for pad in self.entries.len()..seqs {
            starts[pad + 1] = starts[pad] + 1;
        }
        for pad in flight.rows.len()..rows {
            row_token[pad] = pad as i32;
            row_params[pad * ROW_PARAMS..(pad + 1) * ROW_PARAMS].copy_from_slice(&PADDING_ROW);
        }
    }

    /// Write the masks of the rows that have a grammar, and give the grammars back.
    fn masks(&mut self, groups: &mut [Option<Box<Group>>], flight: &Flight, extras: &mut Extras) {
        let failures = write_masks(&mut extras.grammars, &mut extras.mask_words);
        for (&row, grammar) in extras.mask_rows.iter().zip(extras.grammars.drain(..)) {
            let RowRef { slot, sequence, .. } = flight.rows[row as usize];
            if let Some(group) = &mut groups[slot as usize] {
                group.sequences[sequence as usize].history.grammar = Some(grammar);
            }
        }
        for (i, why) in failures {
            let slot = flight.rows[extras.mask_rows[i] as usize].slot;
            if let Some(group) = &groups[slot as usize] {
                self.broken.push((Arc::clone(&group.request.request_id), why));
            }
        }
    }

    fn block_tables(
        &self,
        buffer: &mut Vec<i32>,
        sections: &mut SectionTable,
        groups: &[Option<Box<Group>>],
        block_size: usize,
    ) {
        let (offsets, num_offsets) = sections.get(Section::BlockTableOffsets);
        let begin = buffer.len().next_multiple_of(SECTION_ALIGNMENT);
        buffer.resize(begin, 0);
        for (i, entry) in self.entries.iter().enumerate() {
            let Some(group) = &groups[entry.slot as usize] else { continue };
            let blocks = group.sequences[entry.sequence as usize].table.blocks();
            let blocks = &blocks[..entry.num_blocks(block_size)];
            buffer.extend(blocks.iter().map(|&block| block as i32));
            buffer[offsets + i + 1] = (buffer.len() - begin) as i32;
        }
        for pad in self.entries.len() + 1..num_offsets {
            buffer[offsets + pad] = (buffer.len() - begin) as i32;
        }
        sections.place(Section::BlockTableIds, buffer.len() - begin);
    }

    /// Write the cascades among sequences with one query token, and return how many there are.
    fn cascades(&mut self, buffer: &mut [i32], sections: &SectionTable, min_saved: usize) -> usize {
        let num_decodes = self.entries.iter().take_while(|entry| entry.len == 1).count();
        if min_saved == 0 || num_decodes == 0 {
            return 0;
        }
        let [_, _, _, _, _, _, _, offsets, seqs, starts, blocks, ids] = sections.split_fixed(buffer);
        let sections = CascadeSections { seqs, offsets: starts, blocks };
        self.cascade_finder.find(offsets, ids, num_decodes, min_saved, sections)
    }

    fn variable_sections(&self, buffer: &mut Vec<i32>, sections: &mut SectionTable, extras: &Extras) {
        let mut append = |section: Section, words: &[i32]| {
            buffer.resize(sections.place(section, words.len()), 0);
            buffer.extend_from_slice(words);
        };
        append(Section::SwapOut, self.swap_out.as_flattened());
        append(Section::SwapIn, self.swap_in.as_flattened());
        append(Section::Copies, self.copies.as_flattened());
        append(Section::PenaltyRows, &extras.penalty_rows);
        append(Section::PenaltyOffsets, &with_end(&extras.penalty_offsets, extras.penalty_tokens.len()));
        append(Section::PenaltyTokens, extras.penalty_tokens.as_flattened());
        append(Section::Bias, extras.bias.as_flattened());
        append(Section::AllowedRows, &extras.allowed_rows);
        append(Section::AllowedOffsets, &with_end(&extras.allowed_offsets, extras.allowed_ids.len()));
        append(Section::AllowedIds, &extras.allowed_ids);
        append(Section::Banned, extras.banned.as_flattened());
        append(Section::PromptRows, extras.prompt_rows.as_flattened());
        append(Section::MaskRows, &extras.mask_rows);
        append(Section::MaskWords, &extras.mask_words);
    }
}

/// CSR offsets: the starts, then the end.
fn with_end(starts: &[i32], end: usize) -> Vec<i32> {
    let mut offsets = Vec::with_capacity(starts.len() + 1);
    offsets.extend_from_slice(starts);
    offsets.push(end as i32);
    offsets
}

fn write_tokens(
    group: &Group,
    entry: Entry,
    block_size: usize,
    ids: &mut [i32],
    positions: &mut [i32],
    slots: &mut [i32],
) {
    let sequence = &group.sequences[entry.sequence as usize];
    let (prompt, output) = (&group.request.prompt, &sequence.history.output);
    let blocks = sequence.table.blocks();
    for i in 0..entry.len as usize {
        let position = entry.start as usize + i;
        ids[i] = if let Some(&token) = prompt.get(position) {
            token as i32
        } else {
            output.get(position - prompt.len()).map_or(-1 - sequence.last_row, |&token| token as i32)
        };
        positions[i] = position as i32;
        slots[i] = (blocks[position / block_size] as usize * block_size + position % block_size) as i32;
    }
}

/// Offsets and lengths of the sections placed so far.
struct SectionTable {
    words: [i32; 2 * NUM_SECTIONS],
    end: usize,
}

impl SectionTable {
    fn new() -> Self {
        Self { words: [0; 2 * NUM_SECTIONS], end: HEADER_LEN }
    }

    /// Put a section after those placed so far, and return where it starts.
    fn place(&mut self, section: Section, len: usize) -> usize {
        let start = self.end.next_multiple_of(SECTION_ALIGNMENT);
        self.words[2 * section as usize] = start as i32;
        self.words[2 * section as usize + 1] = len as i32;
        self.end = start + len;
        start
    }

    fn get(&self, section: Section) -> (usize, usize) {
        (self.words[2 * section as usize] as usize, self.words[2 * section as usize + 1] as usize)
    }

    /// The first sections as slices.
    fn split_fixed<'a, const N: usize>(&self, buffer: &'a mut [i32]) -> [&'a mut [i32]; N] {
        let (mut rest, mut at) = (buffer, 0);
        std::array::from_fn(|section| {
            let (start, len) = (self.words[2 * section] as usize, self.words[2 * section + 1] as usize);
            let (part, tail) = std::mem::take(&mut rest)[start - at..].split_at_mut(len);
            (rest, at) = (tail, start + len);
            part
        })
    }
}
