//! What a commit tells of a request.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End of sequence, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the model's length.
    Length,
    /// Dropped before its end.
    Abort,
    /// The request failed, see [`Output::error`].
    Error,
}

impl FinishReason {
    /// The `OpenAI` name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// What ended a sequence with [`FinishReason::Stop`]; nothing is said of the tokenizer's own end of sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// One of `stop_token_ids`, or another end of sequence of the model.
    Token(u32),
    /// One of `stop`.
    Text(String),
}

/// Log-probabilities of N positions: column 0 is the token in question, then the best ones in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogprobTable {
    /// Columns of a row: 1 + the top ones asked for.
    pub width: usize,
    /// N × width token ids.
    pub token_ids: Vec<i32>,
    /// N × width log-probabilities.
    pub logprobs: Vec<f32>,
    /// N ranks of column 0, from 1.
    pub ranks: Vec<i32>,
}

impl LogprobTable {
    /// An empty table of rows `width` wide.
    pub fn new(width: usize) -> Self {
        Self { width, ..Self::default() }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Append the first `self.width` columns of a row that may be wider.
    pub fn push(&mut self, token_ids: &[i32], logprobs: &[f32], rank: i32) {
        self.token_ids.extend_from_slice(&token_ids[..self.width]);
        self.logprobs.extend_from_slice(&logprobs[..self.width]);
        self.ranks.push(rank);
    }

    /// Append all rows of a table that is as wide.
    pub fn append(&mut self, mut other: Self) {
        self.token_ids.append(&mut other.token_ids);
        self.logprobs.append(&mut other.logprobs);
        self.ranks.append(&mut other.ranks);
    }

    /// The rows from `start` to before `end`.
    #[must_use]
    pub fn range(&self, start: usize, end: usize) -> Self {
        let words = start * self.width..end * self.width;
        Self {
            width: self.width,
            token_ids: self.token_ids[words.clone()].to_vec(),
            logprobs: self.logprobs[words].to_vec(),
            ranks: self.ranks[start..end].to_vec(),
        }
    }
}

/// One sequence of an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Place among the request's sequences; with beams and `best_of`, 0 is the best.
    pub index: usize,
    /// All text, or what is new for delta outputs.
    pub text: String,
    /// All generated ids, or the new ones for delta outputs.
    pub token_ids: Vec<u32>,
    /// Sum of the log-probabilities of all generated tokens; beams: the score the sequence was ranked by is
    /// this over its length to the power of the length penalty.
    pub cumulative_logprob: Option<f32>,
    /// One row for each of `token_ids`.
    pub logprobs: Option<LogprobTable>,
    /// None while running.
    pub finish_reason: Option<FinishReason>,
    /// See [`StopReason`].
    pub stop_reason: Option<StopReason>,
}

/// When things happened to a request: seconds on the scheduler's clock, 0 until they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds since the epoch.
    pub arrival_time: f64,
    /// Added.
    pub queued: f64,
    /// First scheduled.
    pub scheduled: f64,
    /// First token committed.
    pub first_token: f64,
    /// Latest token committed.
    pub last_token: f64,
}

/// What a commit has to tell of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// The caller's name of the request.
    pub request_id: Arc<str>,
    /// Text of the prompt, if it was given as text. The prompt does not travel: who asked knows it.
    #[serde(skip)]
    pub prompt: Option<Arc<str>>,
    /// Ids of the prompt.
    #[serde(skip)]
    pub prompt_token_ids: Arc<[u32]>,
    /// One row for each prompt token but the first; delta outputs bring them once, with the first token.
    pub prompt_logprobs: Option<LogprobTable>,
    /// Sequences that advanced; all of them at the end.
    pub completions: Vec<Completion>,
    /// Why the request failed, if it did.
    pub error: Option<Error>,
    /// Whether the request has ended.
    pub finished: bool,
    /// Prompt tokens found in the prefix cache when the request was first scheduled.
    pub num_cached_tokens: usize,
    /// Times it lost its device blocks.
    pub num_preemptions: u32,
    /// See [`Timing`].
    pub timing: Timing,
}
