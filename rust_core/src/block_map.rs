//! A picture of the device's KV blocks and of the requests that hold them.

use serde::{Deserialize, Serialize};

use crate::sequence::{Group, State};

/// One request in the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestState {
    /// Its name.
    pub request_id: String,
    /// `waiting`, `running` or `swapped`.
    pub state: String,
    /// Sequences that have not ended.
    pub num_sequences: usize,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// Tokens that its sequences have generated.
    pub num_output_tokens: usize,
}

impl RequestState {
    pub(crate) fn new(group: &Group) -> Self {
        let state = match group.state {
            State::Waiting => "waiting",
            State::Running => "running",
            State::Swapped => "swapped",
        };
        Self {
            request_id: group.request.request_id.to_string(),
            state: state.to_owned(),
            num_sequences: group.live().count(),
            num_prompt_tokens: group.prompt_len(),
            num_output_tokens: group.sequences.iter().map(|sequence| sequence.history.output.len()).sum(),
        }
    }
}

/// All device blocks, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockMap {
    /// Tables that hold a block; 0: it is free.
    pub ref_counts: Vec<u32>,
    /// Index into `requests` of one that holds it; -1: none.
    pub owners: Vec<i32>,
    /// Whether the prefix cache finds it.
    pub cached: Vec<bool>,
    /// Live requests.
    pub requests: Vec<RequestState>,
}
