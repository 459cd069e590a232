//! What changes a request's logits on the host. The core keeps it for the request's life and hands it out with each
//! step that has a row of the request; what it is, only its maker knows.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Somebody's object.
#[derive(Clone)]
pub struct Processor(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Processor {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("Processor")
    }
}

impl PartialEq for Processor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A logits row that a processor is to change before it is sampled from.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessedRow {
    /// Which row.
    pub row: usize,
    /// By what.
    pub processor: Processor,
    /// The request it belongs to.
    pub request_id: Arc<str>,
    /// Ids of its prompt.
    pub prompt: Arc<[u32]>,
    /// Ids generated so far.
    pub output: Vec<u32>,
}
