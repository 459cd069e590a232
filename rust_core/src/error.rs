//! The crate's one error type.

use serde::{Deserialize, Serialize};

/// What can go wrong at the crate's surface.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum Error {
    /// A field of a request or of the configuration is out of its range.
    #[error("{message}")]
    Parameter {
        /// Name of the field.
        parameter: String,
        /// Names the field, its value and the allowed range.
        message: String,
    },
    /// More waits than the queue may hold.
    #[error("{0}")]
    QueueFull(String),
    /// The caller broke the step protocol, or an invariant does not hold: a fault of the engine, not of a request.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::Parameter`] with the message "`parameter` must be `expected`, got `value`".
    pub fn range(parameter: &str, expected: &str, value: impl std::fmt::Display) -> Self {
        let value = shortened(value.to_string());
        Self::parameter(parameter, format!("{parameter} must be {expected}, got {value}"))
    }

    /// An [`Error::Parameter`] with a message of its own.
    pub fn parameter(parameter: &str, message: impl Into<String>) -> Self {
        Self::Parameter { parameter: parameter.to_owned(), message: message.into() }
    }
}

/// A value as messages show it: its beginning, if it is long.
pub(crate) fn shortened(value: String) -> String {
    const MOST: usize = 200;
    match value.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value,
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
