//! Messages between an engine's process and its front end, as bytes: a version, then postcard's compact form, which
//! checks every length against what is there.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::admission::RequestOptions;
use crate::error::{Error, Result};
use crate::output::Output;
use crate::request::SamplingParams;
use crate::stats::Stats;

/// First byte of each message. To be raised with every change of what follows.
pub const VERSION: u8 = 3;

/// A request on its way to the engine, checked already.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestMessage {
    /// Its name on the wire. Numbers rise by one a request, so that "all up to this one" has a meaning.
    pub number: u64,
    /// Ids of the prompt.
    pub prompt: Vec<u32>,
    /// See [`SamplingParams`].
    pub params: SamplingParams,
    /// See [`RequestOptions`]; the prompt's text stays behind.
    pub options: RequestOptions,
}

/// What a step tells, all requests in one. `O` is an output or a reference to one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMessage<O = Output> {
    /// The engine has taken in all requests up to this one.
    pub last_number: u64,
    /// After the step.
    pub stats: Stats,
    /// Their `request_id` is the number; they have no prompt.
    pub outputs: Vec<O>,
}

/// A message as bytes.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    postcard::to_extend(message, vec![VERSION])
        .map_err(|error| Error::Internal(format!("message not encoded: {error}")))
}

/// A message from bytes. Fails, whatever the bytes are, if they are not exactly one message of this version.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let damaged = |why: String| Error::Internal(format!("damaged message of {} bytes: {why}", bytes.len()));
    let Some((&version, body)) = bytes.split_first() else { return Err(damaged("it is empty".to_owned())) };
    if version != VERSION {
        return Err(damaged(format!("version {version}, not {VERSION}")));
    }
    match postcard::take_from_bytes(body).map_err(|error| damaged(error.to_string()))? {
        (message, []) => Ok(message),
        (_, rest) => Err(damaged(format!("{} bytes too many", rest.len()))),
    }
}
