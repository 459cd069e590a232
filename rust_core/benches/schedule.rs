//! One engine step, `schedule()` and `commit()`, of sequences of 2,048 tokens and more.
//!
//! - *decode*: every sequence computes one token.
//! - *mixed*: besides, a new prompt of 512 tokens is computed, whose request ends with its first token.
//! - *preempting*: memory is short, so that sequences are swapped out and back in as others end.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pyvllm_core::commit::Sampled;
use pyvllm_core::plan::{Header, StepPlan};
use pyvllm_core::request::{OutputKind, SamplingParams};
use pyvllm_core::scheduler::{Policy, PreemptionMode, RequestOptions};
use pyvllm_core::{Config, Scheduler};

const BLOCK_SIZE: usize = 16;
const NUM_TOKENS: usize = 2_048;
const NEW_PROMPT: usize = 512;
/// Tokens that each sequence generates before all start anew.
const NUM_STEPS: usize = 256;
const NUM_SEQUENCES: [usize; 4] = [1, 64, 256, 1_024];

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Decode,
    Mixed,
    Preempting,
}

struct Engine {
    scheduler: Scheduler,
    kind: Kind,
    num_sequences: usize,
    num_requests: usize,
    steps_left: usize,
    /// What the sampler returns, one for each row.
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
}

fn params(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens as i64),
        ignore_eos: true,
        output_kind: OutputKind::FinalOnly,
        ..SamplingParams::default()
    }
}

impl Engine {
    /// All sequences have their prompts computed.
    fn new(kind: Kind, num_sequences: usize) -> Self {
        let blocks = (NUM_TOKENS + NUM_STEPS).div_ceil(BLOCK_SIZE) + 1;
        let prompts = num_sequences * NUM_TOKENS / BLOCK_SIZE;
        // Room for an eighth of the blocks that come next, or for all there will ever be.
        let spare = if kind == Kind::Preempting { num_sequences / 8 } else { (num_sequences + 2) * blocks };
        let config = Config {
            num_gpu_blocks: prompts + spare,
            num_cpu_blocks: num_sequences * blocks,
            block_size: BLOCK_SIZE,
            max_num_seqs: num_sequences + 1,
            max_num_batched_tokens: num_sequences * NUM_TOKENS + NEW_PROMPT,
            max_model_len: NUM_TOKENS + NUM_STEPS + 1,
            vocab_size: 32_000,
            eos_token_ids: vec![2],
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            policy: Policy::Fcfs,
            preemption_mode: PreemptionMode::Swap,
            max_logprobs: 20,
            graph_sizes: Vec::new(),
            cascade_tokens: 8192,
            seed: 0,
        };
        let scheduler = Scheduler::new(config, None).expect("the configuration is valid");
        let mut engine = Self {
            scheduler,
            kind,
            num_sequences,
            num_requests: 0,
            steps_left: NUM_STEPS - 1,
            tokens: vec![7; num_sequences + 1],
            logprobs: vec![0.0; num_sequences + 1],
        };
        for i in 0..num_sequences {
            // Where memory is short, one sequence of eight ends early and lets others come back.
            let early = kind == Kind::Preempting && i % 8 == 1;
            let output = if early { NUM_STEPS / 4 + i % (NUM_STEPS / 2) } else { NUM_STEPS };
            engine.add(NUM_TOKENS - 1, output);
        }
        engine.step();
        engine
    }

    fn add(&mut self, len: usize, max_tokens: usize) {
        let first = self.num_requests;
        self.num_requests += 1;
        let prompt = (0..len).map(|i| (3 + (first * 1_009 + i * 7) % 31_000) as u32).collect();
        let (id, options) = (first.to_string(), RequestOptions::default());
        self.scheduler.add_request(&id, prompt, params(max_tokens), options).expect("the request is valid");
    }

    fn commit(&mut self, plan: &StepPlan) {
        let rows = plan.header(Header::NumRows) as usize;
        let (token_ids, logprobs) = (&self.tokens[..rows], &self.logprobs[..rows]);
        let sampled = Sampled { token_ids, logprobs, ..Sampled::default() };
        black_box(self.scheduler.commit(plan.step, sampled).expect("the step is the oldest one"));
    }

    /// Time of one step, in `schedule` and in `commit`.
    fn step(&mut self) -> [Duration; 2] {
        let start = Instant::now();
        let plan = black_box(self.scheduler.schedule().expect("there is work to do"));
        let scheduled = Instant::now();
        self.commit(&plan);
        [scheduled - start, scheduled.elapsed()]
    }

    /// Time of `count` steps.
    fn time(&mut self, count: u64) -> [Duration; 2] {
        let mut times = [Duration::ZERO; 2];
        for _ in 0..count {
            self.steps_left -= 1;
            let few = self.scheduler.num_unfinished() < self.num_sequences.div_ceil(2);
            if self.steps_left == 0 || few {
                *self = Self::new(self.kind, self.num_sequences);
            }
            if self.kind == Kind::Mixed {
                self.add(NEW_PROMPT, 1);
            }
            let step = self.step();
            times = [times[0] + step[0], times[1] + step[1]];
        }
        times
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for num_sequences in NUM_SEQUENCES {
        group.throughput(Throughput::Elements(num_sequences as u64));
        for (kind, name) in [(Kind::Decode, "decode"), (Kind::Mixed, "mixed"), (Kind::Preempting, "preempting")] {
            if kind == Kind::Preempting && num_sequences == 1 {
                continue;
            }
            let mut engine = Engine::new(kind, num_sequences);
            group.bench_function(BenchmarkId::new(name, num_sequences), |bencher| {
                bencher.iter_custom(|count| engine.time(count).iter().sum());
            });
        }
        let mut engine = Engine::new(Kind::Decode, num_sequences);
        for (part, name) in ["decode, schedule alone", "decode, commit alone"].into_iter().enumerate() {
            group.bench_function(BenchmarkId::new(name, num_sequences), |bencher| {
                bencher.iter_custom(|count| engine.time(count)[part]);
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
