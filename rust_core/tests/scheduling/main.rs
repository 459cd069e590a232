//! Tests of the scheduler, the block manager and beam search, with a fake device and without Python.
#![allow(missing_docs, clippy::pedantic, clippy::unwrap_used, clippy::float_cmp)]

mod beams;
mod block_manager;
mod common;
#[cfg(feature = "planted-faults")]
mod faults;
mod front;
mod oracle;
mod parallel_sampling;
mod plan;
mod preemption;
mod prefix_cache;
mod properties;
mod protocol;
mod scheduler;
mod validation;
