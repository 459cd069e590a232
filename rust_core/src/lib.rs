//! The core of pyvllm: scheduler, paged KV block manager, detokenizer. It knows time and text; tensors are Python's.
//!
//! One request lives in one [`sequence::Group`]. A step makes two calls: [`Scheduler::schedule`] gives a
//! [`plan::StepPlan`], [`Scheduler::commit`] takes the sampled tokens and gives [`output::Output`]s.

mod admission;
pub mod beam;
pub mod block_manager;
pub mod block_map;
pub mod cascade;
pub mod commit;
mod config;
mod constrain;
pub mod detokenizer;
pub mod draft;
pub mod error;
pub mod fault;
pub mod front;
mod gbnf;
pub mod grammar;
pub mod guided;
pub mod limits;
pub mod output;
pub mod plan;
mod pool;
pub mod processor;
#[cfg(feature = "python")]
mod py;
pub mod request;
mod rows;
pub mod schedule;
pub mod scheduler;
pub mod sequence;
pub mod stats;
pub mod stop_regex;
pub mod wire;

pub use scheduler::{Config, Scheduler};
