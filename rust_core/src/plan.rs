//! `StepPlan`: everything one forward pass needs, in one contiguous `i32` buffer.
//!
//! This is the one description of the layout on the Rust side; `pyvllm/step.py` is the one on the Python side, and
//! `tests/test_step.py` holds the two together. Floats travel by bit pattern. Counts marked "padded" include the rows
//! that fill a captured graph size; they are equal to the real counts when `graph_size` is 0.
//!
//! Symbols: T tokens (padded), S sequences (padded), R logits rows (padded).
//!
//! | section | shape | content |
//! | --- | --- | --- |
//! | header | `HEADER_LEN` | scalars of [`Header`], then (offset, length) of each section below, in this order |
//! | `token_ids` | T | token id, or `-1 - row`: what that row of the previous step samples |
//! | `positions` | T | position of the token in its sequence |
//! | `slot_mapping` | T | `block_id * block_size + offset`, where the token's KV goes; -1 in padding |
//! | `query_start_loc` | S + 1 | exclusive prefix sum of query lengths |
//! | `seq_lens` | S | KV length after this step; 0 in padding |
//! | `row_token` | R | token whose hidden state gives the row's logits; rows may share one (n > 1) |
//! | `row_params` | R × `ROW_PARAMS` | sampling parameters of the row, fields as in [`RowParam`] |
//! | `block_table_offsets` | S + 1 | CSR offsets into `block_table_ids` |
//! | `cascade_seqs` | S | sequences whose block tables begin alike, cascade after cascade, then zeros |
//! | `cascade_offsets` | S + 1 | CSR offsets into `cascade_seqs`; of `num_cascades` + 1 the rest repeats the last |
//! | `cascade_blocks` | S | blocks that all of a cascade share; 0 beyond the last cascade |
//! | `block_table_ids` | any | device blocks of each sequence, in order |
//! | `swap_out` | n × 2 | (device block, host block) |
//! | `swap_in` | n × 2 | (host block, device block) |
//! | `copies` | n × 2 | (source, destination) device blocks |
//! | `penalty_rows` | P | rows with a repetition, presence or frequency penalty |
//! | `penalty_offsets` | P + 1 | CSR offsets into `penalty_tokens` |
//! | `penalty_tokens` | n × 2 | (token id or `-1 - row` as above, times generated; 0 = only in the prompt) |
//! | `bias` | n × 3 | (row, token id, f32 bits added to the logit) |
//! | `allowed_rows` | A | rows that may sample only listed tokens |
//! | `allowed_offsets` | A + 1 | CSR offsets into `allowed_ids` |
//! | `allowed_ids` | any | allowed token ids |
//! | `banned` | n × 2 | (row, token id that may not be sampled) |
//! | `prompt_rows` | n × 3 | (token, id of the next prompt token, logprobs wanted): prompt log-probabilities |
//! | `mask_rows` | M | rows that may sample only tokens of a mask |
//! | `mask_words` | any | M masks, one after the other, 32 tokens a word from the lowest bit on |
//!
//! Sections start at multiples of [`SECTION_ALIGNMENT`] words; the words between them mean nothing.
//!
//! Sequences with one query token come first (`num_decodes` of them), longer queries after them. Inside a step the
//! order is: swap out, swap in, copies, then KV writes, then attention.

use crate::processor::ProcessedRow;

/// First word of every plan: "PLAN" in ASCII.
pub const MAGIC: i32 = 0x504c_414e;

/// Scalars at the start of the buffer, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Header {
    /// [`MAGIC`].
    Magic,
    /// Number of the step, counted from 0 (wraps at 2^31).
    Step,
    /// Real tokens.
    NumTokens,
    /// Real sequences.
    NumSeqs,
    /// Real sequences with one query token; they come first.
    NumDecodes,
    /// Real logits rows.
    NumRows,
    /// Sequences after padding to a captured graph, or 0 for a step that is not padded.
    GraphSize,
    /// Longest query, tokens.
    MaxQueryLen,
    /// Longest KV length after the step, tokens.
    MaxSeqLen,
    /// Columns the sampler returns: 1, or the candidates of the widest beam group.
    NumCandidates,
    /// Most top log-probabilities any row wants; -1: no row wants any log-probability.
    MaxLogprobs,
    /// Bits of [`flags`].
    Flags,
    /// Cascades, see `cascade.rs`; all their sequences have one query token.
    NumCascades,
    /// Number of sections that follow.
    NumSections,
}

/// Words: 16 bytes, which kernels load at once.
pub const SECTION_ALIGNMENT: usize = 4;

/// Scalars before the section table.
pub const NUM_SCALARS: usize = 14;

/// Bits of `Header::Flags`: what at least one row of the step needs.
pub mod flags {
    /// A row draws at random (temperature above 0).
    pub const RANDOM: i32 = 1;
    /// A row has `top_k`.
    pub const TOP_K: i32 = 2;
    /// A row has `top_p` below 1.
    pub const TOP_P: i32 = 4;
    /// A row has `min_p` above 0.
    pub const MIN_P: i32 = 8;
    /// A row belongs to a beam group.
    pub const BEAM: i32 = 16;
}

/// Sections in buffer order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)] // the module's table describes each
pub enum Section {
    TokenIds,
    Positions,
    SlotMapping,
    QueryStartLoc,
    SeqLens,
    RowToken,
    RowParams,
    BlockTableOffsets,
    CascadeSeqs,
    CascadeOffsets,
    CascadeBlocks,
    BlockTableIds,
    SwapOut,
    SwapIn,
    Copies,
    PenaltyRows,
    PenaltyOffsets,
    PenaltyTokens,
    Bias,
    AllowedRows,
    AllowedOffsets,
    AllowedIds,
    Banned,
    PromptRows,
    MaskRows,
    MaskWords,
}

/// Sections of a plan.
pub const NUM_SECTIONS: usize = 26;
/// Words before the first section.
pub const HEADER_LEN: usize = NUM_SCALARS + 2 * NUM_SECTIONS;

/// Words of one row of `row_params`, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum RowParam {
    /// f32; 0 is greedy.
    Temperature,
    /// Tokens kept; 0 is off.
    TopK,
    /// f32 in \[0, 1\]; 1 is off, 0 keeps only the most probable.
    TopP,
    /// f32 in \[0, 1\]; 0 is off.
    MinP,
    /// f32, subtracted once for each token already generated.
    PresencePenalty,
    /// f32, subtracted once for each time a token was generated.
    FrequencyPenalty,
    /// f32 > 0; divides positive and multiplies negative logits of tokens in prompt or output.
    RepetitionPenalty,
    /// First half of the key of this draw's noise, a hash of (seed, output position); 0 in greedy rows.
    NoiseKey0,
    /// Second half.
    NoiseKey1,
    /// Top log-probabilities wanted; 0: the sampled token's only; -1: none.
    NumLogprobs,
    /// Candidates wanted: 1, or those of a beam (at least 2 × width).
    NumCandidates,
}

/// Words in a row of `row_params`.
pub const ROW_PARAMS: usize = 11;

/// What one forward pass computes.
#[derive(Debug)]
pub struct StepPlan {
    /// Number of the step.
    pub step: u32,
    /// The words described at the head of this module.
    pub buffer: Vec<i32>,
    /// Rows whose logits go through the host.
    pub processed: Vec<ProcessedRow>,
}

impl StepPlan {
    /// A scalar of the header.
    pub fn header(&self, scalar: Header) -> i32 {
        self.buffer[scalar as usize]
    }

    /// The words of a section.
    pub fn section(&self, section: Section) -> &[i32] {
        let at = NUM_SCALARS + 2 * section as usize;
        let (offset, len) = (self.buffer[at] as usize, self.buffer[at + 1] as usize);
        &self.buffer[offset..offset + len]
    }
}
