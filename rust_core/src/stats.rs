//! Numbers about the scheduler.

use serde::{Deserialize, Serialize};

use crate::sequence::Request;

/// What waiting requests will take once they run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Sequences they will have.
    pub num_sequences: usize,
    /// Tokens of their prompts.
    pub num_tokens: usize,
}

impl Queued {
    pub(crate) fn add(&mut self, request: &Request) {
        self.num_sequences += request.params.width();
        self.num_tokens += request.prompt.len();
    }

    pub(crate) fn remove(&mut self, request: &Request) {
        self.num_sequences -= request.params.width();
        self.num_tokens -= request.prompt.len();
    }
}

/// Greatest number of tokens of each bucket of `StepTokens` but the last, which has none.
const STEP_TOKEN_BOUNDS: [u64; 15] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536];

/// Steps by how many tokens they computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTokens {
    counts: [u64; STEP_TOKEN_BOUNDS.len() + 1],
    /// Tokens of all steps.
    pub sum: u64,
}

impl StepTokens {
    /// Count a step.
    pub fn observe(&mut self, num_tokens: u64) {
        self.counts[STEP_TOKEN_BOUNDS.partition_point(|&bound| bound < num_tokens)] += 1;
        self.sum += num_tokens;
    }

    /// Number of tokens, and the steps that had at most so many; infinity comes last.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = STEP_TOKEN_BOUNDS.iter().map(|&bound| bound as f64).chain([f64::INFINITY]);
        let totals = self.counts.iter().scan(0, |total, count| {
            *total += count;
            Some(*total)
        });
        bounds.zip(totals).collect()
    }
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Preemptions that dropped blocks.
    pub num_recomputations: u64,
    /// Preemptions that moved blocks to the host.
    pub num_swap_outs: u64,
    /// Prompt tokens looked up in the prefix cache; recomputations do not count.
    pub prefix_queries: u64,
    /// Of those, found.
    pub prefix_hits: u64,
    /// Prompt tokens of requests that were scheduled.
    pub prompt_tokens: u64,
    /// Tokens committed.
    pub generation_tokens: u64,
    /// Tokens of prompts and outputs that steps computed.
    pub step_tokens: StepTokens,
}

/// A snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Sequences running.
    pub num_running: usize,
    /// Requests waiting.
    pub num_waiting: usize,
    /// Of those, the ones whose grammar is being compiled.
    pub num_compiling: usize,
    /// What those will take.
    pub queued: Queued,
    /// Sequences on the host.
    pub num_swapped: usize,
    /// Device blocks.
    pub num_gpu_blocks: usize,
    /// Device blocks that no sequence holds, cached ones included.
    pub num_free_gpu_blocks: usize,
    /// Of those, the ones the prefix cache can still serve.
    pub num_cached_gpu_blocks: usize,
    /// Host blocks.
    pub num_cpu_blocks: usize,
    /// Host blocks that no sequence holds.
    pub num_free_cpu_blocks: usize,
    /// Blocks copied on write, since the start.
    pub num_copies: u64,
    /// Counts since the start.
    pub counters: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_up_to_each_bound() {
        let mut steps = StepTokens::default();
        for num_tokens in [1, 2, 8, 9, 65_536, 65_537] {
            steps.observe(num_tokens);
        }
        let buckets = steps.buckets();
        assert_eq!(buckets[..4], [(1.0, 1), (8.0, 3), (16.0, 4), (32.0, 4)]);
        assert_eq!(buckets[14..], [(65_536.0, 5), (f64::INFINITY, 6)]);
        assert_eq!(steps.sum, 131_093);
    }
}
