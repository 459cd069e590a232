//! What the tests share: a fake model with its solo runs, a fake device, random scenarios.

pub mod beam;
pub mod device;
pub mod generate;
pub mod model;
pub mod scenario;

use std::sync::Arc;

use pyvllm_core::detokenizer::Vocabulary;
use pyvllm_core::output::Output;
use pyvllm_core::plan::StepPlan;
use pyvllm_core::request::SamplingParams;
use pyvllm_core::scheduler::RequestOptions;
use pyvllm_core::sequence::Group;
use pyvllm_core::{Config, Scheduler};

use device::{Device, Results};
use model::{Asked, VOCAB};

/// A small, fast generator of random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        model::mix(self.0)
    }

    /// From `low` to `high`, both included.
    pub fn range(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.range(0, items.len() - 1)].clone()
    }
}

/// A scheduler of `blocks` blocks of `block_size` tokens with everything else wide open.
pub fn config(blocks: usize, block_size: usize) -> Config {
    Config {
        num_gpu_blocks: blocks,
        num_cpu_blocks: 0,
        block_size,
        max_num_seqs: 64,
        max_num_batched_tokens: 256,
        max_model_len: blocks * block_size,
        vocab_size: VOCAB as usize,
        eos_token_ids: vec![0],
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: pyvllm_core::scheduler::Policy::Fcfs,
        preemption_mode: pyvllm_core::scheduler::PreemptionMode::Auto,
        max_logprobs: 20,
        graph_sizes: Vec::new(),
        cascade_tokens: 0,
        seed: 0,
    }
}

/// Greedy parameters that nothing but `max_tokens` ends.
pub fn greedy(max_tokens: i64) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        output_kind: pyvllm_core::request::OutputKind::FinalOnly,
        ..SamplingParams::default()
    }
}

/// Distinct ids that are no end of sequence, different for each `start`.
pub fn prompt(start: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 2 + (start * 7 + i * 5 + i * i * start) % (VOCAB - 2)).collect()
}

/// What the fake model says to a prompt, one sequence after the other.
pub fn solo(prompt: &[u32], params: &SamplingParams) -> Vec<Vec<u32>> {
    let asked = Asked {
        prompt: prompt.to_vec(),
        params: params.clone(),
        salt: None,
        priority: 0,
        eos: vec![0],
        max_model_len: usize::MAX,
        has_text: false,
    };
    if params.use_beam_search {
        return beam::search(&asked).into_iter().map(|found| found.tokens).collect();
    }
    (0..params.n as u64).map(|child| asked.solo(child).tokens).collect()
}

/// A scheduler with a device, for tests that go step by step.
pub struct Engine {
    pub scheduler: Scheduler,
    pub device: Device,
    pub pending: std::collections::VecDeque<Results>,
    pub outputs: Vec<Output>,
}

impl Engine {
    pub fn new(config: Config) -> Self {
        Self::with_vocabulary(config, None)
    }

    /// With text: ids from 2 on are letters, see [`model::letter`].
    pub fn with_text(config: Config) -> Self {
        Self::with_vocabulary(config, Some(model::vocabulary().into()))
    }

    fn with_vocabulary(config: Config, vocabulary: Option<Arc<Vocabulary>>) -> Self {
        let device = Device::new(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size);
        let scheduler = Scheduler::new(config, vocabulary).unwrap();
        Self { scheduler, device, pending: std::collections::VecDeque::new(), outputs: Vec::new() }
    }

    pub fn add(&mut self, id: &str, prompt: Vec<u32>, params: SamplingParams) {
        self.scheduler.add_request(id, prompt, params, RequestOptions::default()).unwrap();
    }

    /// Schedule and launch one step.
    pub fn launch(&mut self) -> Option<StepPlan> {
        let plan = self.scheduler.schedule();
        self.scheduler.check_invariants().unwrap();
        let plan = plan?;
        self.pending.push_back(self.device.launch(&plan).unwrap());
        Some(plan)
    }

    /// Commit the oldest step, with what the fake model sampled.
    pub fn commit(&mut self) {
        let results = self.pending.pop_front().unwrap();
        self.outputs.extend(results.commit(&mut self.scheduler).unwrap());
        self.scheduler.check_invariants().unwrap();
    }

    /// One synchronous step with tokens of the test's choice, one for each row.
    pub fn step_with(&mut self, token: impl Fn(usize) -> u32) -> Option<StepPlan> {
        let plan = self.launch()?;
        let results = self.pending.back_mut().unwrap();
        results.token_ids = (0..results.num_rows).map(|row| token(row) as i32).collect();
        self.commit();
        Some(plan)
    }

    /// One synchronous step of a beam search, each row offering the candidates of the test's choice: (token,
    /// log-probability), best first. Left out candidates are impossible ones.
    pub fn step_with_candidates(&mut self, offers: &[&[(i32, f32)]]) -> Option<StepPlan> {
        let plan = self.launch()?;
        let results = self.pending.back_mut().unwrap();
        assert_eq!(results.num_rows, offers.len(), "rows of the step");
        for (row, offer) in offers.iter().enumerate() {
            for candidate in 0..results.num_candidates {
                let at = row * results.num_candidates + candidate;
                (results.token_ids[at], results.logprobs[at]) =
                    *offer.get(candidate).unwrap_or(&(0, f32::NEG_INFINITY));
            }
        }
        self.commit();
        Some(plan)
    }

    /// One synchronous step.
    pub fn step(&mut self) -> Option<StepPlan> {
        let plan = self.launch()?;
        self.commit();
        Some(plan)
    }

    /// Step until nothing is left to do; at most `limit` steps.
    pub fn drain(&mut self, limit: usize) {
        for _ in 0..limit {
            if self.step().is_none() {
                assert!(!self.scheduler.has_unfinished(), "stuck with unfinished requests");
                self.check_idle();
                return;
            }
        }
        panic!("unfinished after {limit} steps");
    }

    /// The idle invariant: nothing is held by anyone.
    pub fn check_idle(&self) {
        let stats = self.scheduler.stats();
        assert_eq!(stats.num_free_gpu_blocks, stats.num_gpu_blocks, "device blocks leaked");
        assert_eq!(stats.num_free_cpu_blocks, stats.num_cpu_blocks, "host blocks leaked");
        assert_eq!((stats.num_running, stats.num_waiting, stats.num_swapped), (0, 0, 0));
        assert_eq!(self.scheduler.num_unfinished(), 0);
    }

    /// What the core knows of a live request.
    pub fn group(&self, id: &str) -> &Group {
        let mut groups = self.scheduler.groups();
        groups.find(|group| &*group.request.request_id == id).unwrap_or_else(|| panic!("{id} is not alive"))
    }

    /// Blocks of a live request's sequences.
    pub fn tables(&self, id: &str) -> Vec<Vec<u32>> {
        self.group(id).sequences.iter().map(|sequence| sequence.table.blocks().to_vec()).collect()
    }

    pub fn num_free(&self) -> usize {
        self.scheduler.stats().num_free_gpu_blocks
    }

    /// The final output of a request.
    pub fn output(&self, id: &str) -> &Output {
        let mut found = self.outputs.iter().filter(|output| &*output.request_id == id && output.finished);
        let output = found.next().unwrap_or_else(|| panic!("{id} has not finished"));
        assert!(found.next().is_none(), "{id} finished twice");
        output
    }

    /// Tokens of the final output of a request, sequence by sequence.
    pub fn tokens(&self, id: &str) -> Vec<Vec<u32>> {
        self.output(id).completions.iter().map(|completion| completion.token_ids.clone()).collect()
    }
}
