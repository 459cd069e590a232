//! Random scenarios: a configuration, requests that come and go, and every step checked against the oracle.

use std::collections::VecDeque;

use pyvllm_core::error::Error;
use pyvllm_core::output::{Completion, FinishReason, LogprobTable, Output};
use pyvllm_core::plan::{Header, StepPlan};
use pyvllm_core::request::OutputKind;
use pyvllm_core::scheduler::RequestOptions;
use pyvllm_core::{Config, Scheduler};

use super::Rng;
use super::beam;
use super::device::{Device, Results};
use super::generate::{Arrival, random_arrivals, random_config};
use super::model::{Asked, vocabulary};

/// What really happened, over many scenarios.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    pub scenarios: usize,
    pub steps: usize,
    pub ahead: usize,
    pub finished: usize,
    pub refused: usize,
    pub aborted: usize,
    pub aborted_in_flight: usize,
    pub recomputations: usize,
    pub swap_outs: usize,
    pub swap_ins: usize,
    pub cascades: usize,
    pub copies: usize,
    pub prefix_hits: usize,
    pub forks: usize,
    pub beams: usize,
    pub ranked: usize,
    pub preempted_outputs: usize,
    pub preempted_beams: usize,
    pub resets: usize,
}

impl Coverage {
    pub fn add(&mut self, other: &Self) {
        self.scenarios += other.scenarios;
        self.steps += other.steps;
        self.ahead += other.ahead;
        self.finished += other.finished;
        self.refused += other.refused;
        self.aborted += other.aborted;
        self.aborted_in_flight += other.aborted_in_flight;
        self.recomputations += other.recomputations;
        self.swap_outs += other.swap_outs;
        self.swap_ins += other.swap_ins;
        self.cascades += other.cascades;
        self.copies += other.copies;
        self.prefix_hits += other.prefix_hits;
        self.forks += other.forks;
        self.beams += other.beams;
        self.ranked += other.ranked;
        self.preempted_outputs += other.preempted_outputs;
        self.preempted_beams += other.preempted_beams;
        self.resets += other.resets;
    }
}

/// How a scenario is run.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// Schedule a step before the one before it is committed.
    pub ahead: bool,
    /// Call `check_invariants` after every step.
    pub check: bool,
}

#[derive(Clone, Debug, Default)]
struct Told {
    added: bool,
    over: bool,
    tokens: Vec<Vec<u32>>,
    texts: Vec<String>,
    prompt_logprobs: Option<LogprobTable>,
}

/// Run one random scenario; says what went wrong, or what happened. `plant` may put a fault into the scheduler.
pub fn run(seed: u64, mode: Mode, plant: impl FnOnce(&mut Scheduler)) -> Result<Coverage, String> {
    let mut rng = Rng(seed);
    let config = random_config(&mut rng);
    let has_text = rng.percent(30);
    let arrivals = random_arrivals(&mut rng, &config, has_text);
    let vocabulary = has_text.then(|| vocabulary().into());
    let device = Device::new(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size);
    let mut scheduler = Scheduler::new(config.clone(), vocabulary).map_err(|error| error.to_string())?;
    plant(&mut scheduler);
    let told = vec![Told::default(); arrivals.len()];
    let (pending, coverage) = (VecDeque::new(), Coverage::default());
    let run = Run { mode, rng, config, arrivals, told, scheduler, device, pending, coverage };
    run.run()
}

struct Run {
    mode: Mode,
    rng: Rng,
    config: Config,
    arrivals: Vec<Arrival>,
    told: Vec<Told>,
    scheduler: Scheduler,
    device: Device,
    pending: VecDeque<Results>,
    coverage: Coverage,
}

const MOST_STEPS: usize = 5_000;

impl Run {
    fn run(mut self) -> Result<Coverage, String> {
        for now in 0..MOST_STEPS {
            self.admit_and_abort(now)?;
            let mut plan = self.scheduler.schedule();
            if plan.is_none() && self.rng.percent(30) {
                plan = self.scheduler.schedule();
            }
            self.check()?;
            // Aborts between schedule and commit.
            if self.rng.percent(50) {
                self.abort_due(now + 1);
            }
            let launched = plan.is_some();
            if let Some(plan) = plan {
                self.launch(&plan)?;
            }
            if !launched && self.pending.is_empty() {
                if self.told.iter().all(|told| told.over) {
                    return self.finish();
                }
                let waits = self.arrivals.iter().any(|arrival| arrival.at > now);
                if self.scheduler.has_unfinished() || !waits {
                    return Err("nothing is scheduled although a request is unfinished".to_owned());
                }
            }
            let most = if self.mode.ahead { 1 } else { 0 };
            while self.pending.len() > most || (!launched && !self.pending.is_empty()) || self.commits_early() {
                self.commit()?;
            }
        }
        Err(format!("unfinished after {MOST_STEPS} steps"))
    }

    fn commits_early(&mut self) -> bool {
        !self.pending.is_empty() && self.rng.percent(15)
    }

    fn check(&self) -> Result<(), String> {
        if self.mode.check { self.scheduler.check_invariants().map_err(|error| error.to_string()) } else { Ok(()) }
    }

    fn admit_and_abort(&mut self, now: usize) -> Result<(), String> {
        for i in 0..self.arrivals.len() {
            if self.arrivals[i].at != now {
                continue;
            }
            let asked = &self.arrivals[i].asked;
            let options = RequestOptions {
                priority: asked.priority,
                cache_salt: asked.salt.clone(),
                ..RequestOptions::default()
            };
            let (prompt, params) = (asked.prompt.clone(), asked.params.clone());
            self.told[i].added = true;
            match self.scheduler.add_request(&i.to_string(), prompt, params, options) {
                Ok(()) => {}
                Err(Error::Parameter { .. }) => {
                    self.told[i].over = true;
                    self.coverage.refused += 1;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        self.abort_due(now);
        if self.rng.percent(5) && self.scheduler.reset_prefix_cache() {
            self.coverage.resets += 1;
            if self.scheduler.stats().num_cached_gpu_blocks != 0 {
                return Err("blocks are cached after a reset".to_owned());
            }
        }
        self.check()
    }

    fn abort_due(&mut self, now: usize) {
        for i in 0..self.arrivals.len() {
            let due = self.arrivals[i].abort_at.is_some_and(|at| at <= now);
            if !due || !self.told[i].added || self.told[i].over {
                continue;
            }
            self.told[i].over = true;
            self.coverage.aborted += 1;
            self.coverage.aborted_in_flight += usize::from(!self.pending.is_empty());
            assert!(self.scheduler.abort(&i.to_string()), "an unfinished request could not be aborted");
        }
    }

    fn launch(&mut self, plan: &StepPlan) -> Result<(), String> {
        let tokens = plan.header(Header::NumTokens) as usize;
        let rows = plan.header(Header::NumRows) as usize;
        if tokens > self.config.max_num_batched_tokens || rows > self.config.max_num_seqs {
            return Err(format!("a step of {tokens} tokens and {rows} rows"));
        }
        // The last token of a sequence is never computed.
        let longest = self.arrivals.iter().map(|Arrival { asked, .. }| asked.prompt.len() + asked.max_output() - 1);
        if plan.header(Header::MaxSeqLen) > longest.max().unwrap_or(0) as i32 {
            return Err("a sequence is computed beyond its end".to_owned());
        }
        self.coverage.ahead += usize::from(!self.pending.is_empty());
        let results = self.device.launch(plan)?;
        self.pending.push_back(results);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), String> {
        let Some(results) = self.pending.pop_front() else { return Ok(()) };
        let outputs = results.commit(&mut self.scheduler).map_err(|error| error.to_string())?;
        self.check()?;
        outputs.iter().try_for_each(|output| self.take(output).map_err(|what| format!("{what}: {output:?}")))
    }

    /// One output: deltas add up, cumulative ones only grow, final ones are what the oracle says.
    fn take(&mut self, output: &Output) -> Result<(), String> {
        let i: usize = output.request_id.parse().map_err(|_| "a strange request id")?;
        let Asked { params, .. } = &self.arrivals[i].asked;
        let told = &mut self.told[i];
        if told.over {
            return Err("an output after the end".to_owned());
        }
        let width = params.best_of.unwrap_or(params.n) as usize;
        told.tokens.resize(width, Vec::new());
        told.texts.resize(width, String::new());
        for Completion { index, token_ids, text, .. } in &output.completions {
            let (tokens, texts) = (&mut told.tokens[*index], &mut told.texts[*index]);
            if params.output_kind == OutputKind::Delta {
                tokens.extend(token_ids);
                texts.push_str(text);
                continue;
            }
            if !token_ids.starts_with(tokens) || !text.starts_with(texts.as_str()) {
                return Err("what was told before is taken back".to_owned());
            }
            tokens.clone_from(token_ids);
            texts.clone_from(text);
        }
        if let Some(table) = &output.prompt_logprobs {
            let again = told.prompt_logprobs.replace(table.clone()).is_some();
            if again && params.output_kind == OutputKind::Delta {
                return Err("prompt_logprobs come twice".to_owned());
            }
        }
        if !output.finished {
            return if params.output_kind == OutputKind::FinalOnly { Err("news too early".to_owned()) } else { Ok(()) };
        }
        told.over = true;
        self.coverage.finished += 1;
        self.coverage.preempted_outputs += usize::from(output.num_preemptions > 0);
        self.check_cached(i, output)?;
        self.check_prompt(i, output)?;
        if self.arrivals[i].asked.params.use_beam_search {
            self.coverage.preempted_beams += usize::from(output.num_preemptions > 0);
            self.check_beams(i, output)
        } else {
            self.check_plain(i, output)
        }
    }

    fn check_plain(&mut self, i: usize, output: &Output) -> Result<(), String> {
        let asked = &self.arrivals[i].asked;
        let n = asked.params.n as usize;
        let width = asked.params.best_of.unwrap_or(asked.params.n) as usize;
        self.coverage.forks += usize::from(width > 1);
        let mut expected: Vec<_> = (0..width).map(|child| asked.solo(child as u64)).collect();
        if width > n {
            self.coverage.ranked += 1;
            expected.sort_by(|a, b| b.cumulative.total_cmp(&a.cumulative));
        }
        let delta = asked.params.output_kind == OutputKind::Delta;
        for (index, expected) in expected.iter().take(n).enumerate() {
            let (tokens, text) = (&self.told[i].tokens[index], &self.told[i].texts[index]);
            if *tokens != expected.tokens || *text != expected.text {
                return Err(format!("sequence {index} said {tokens:?} {text:?}, expected {expected:?}"));
            }
            let Some(last) = output.completions.iter().find(|completion| completion.index == index) else {
                if delta {
                    continue;
                }
                return Err(format!("sequence {index} is missing"));
            };
            if last.finish_reason != Some(expected.reason) || last.stop_reason != expected.stop {
                return Err(format!("sequence {index} should end by {:?} {:?}", expected.reason, expected.stop));
            }
            if last.cumulative_logprob.is_some_and(|sum| sum.to_bits() != expected.cumulative.to_bits()) {
                return Err(format!("cumulative log-probability should be {}", expected.cumulative));
            }
            if let Some(table) = &last.logprobs {
                let from = if delta { expected.tokens.len() - last.token_ids.len() } else { 0 };
                let rows = expected.rows[from..].iter().zip(&expected.tokens[from..]);
                let wanted = rows.map(|(row, &token)| (token as i32, row.logprob(token)));
                let found = table.token_ids.iter().zip(&table.logprobs).step_by(table.width).map(|(&id, &lp)| (id, lp));
                if !wanted.eq(found) || table.len() != last.token_ids.len() {
                    return Err("log-probabilities of other tokens".to_owned());
                }
            }
        }
        let shown = output.completions.len();
        if delta || shown == n { Ok(()) } else { Err(format!("{shown} completions of {n}")) }
    }

    fn check_beams(&mut self, i: usize, output: &Output) -> Result<(), String> {
        self.coverage.beams += 1;
        let asked = &self.arrivals[i].asked;
        let stop_ids = asked.stop_ids();
        let expected = beam::search(asked);
        if expected.len() != output.completions.len() {
            return Err(format!("{} beams expected", expected.len()));
        }
        for (index, (found, completion)) in expected.iter().zip(&output.completions).enumerate() {
            let same = completion.index == index
                && self.told[i].tokens[index] == found.tokens
                && completion.cumulative_logprob.is_none_or(|sum| sum.to_bits() == found.cumulative.to_bits());
            let last = found.tokens.last().copied().unwrap_or(u32::MAX);
            let early = found.tokens.len() <= asked.params.min_tokens as usize;
            let stopped = !early && stop_ids.iter().any(|(id, _)| *id == last);
            let reason = if stopped { FinishReason::Stop } else { FinishReason::Length };
            if !same || completion.finish_reason != Some(reason) {
                return Err(format!("beam {index} should be {found:?} ({reason:?}) of {expected:?}"));
            }
        }
        Ok(())
    }

    /// What is said to come from the cache was computed before, for the same salt.
    fn check_cached(&mut self, i: usize, output: &Output) -> Result<(), String> {
        let cached = output.num_cached_tokens;
        if cached == 0 {
            return Ok(());
        }
        self.coverage.prefix_hits += 1;
        let asked = &self.arrivals[i].asked;
        if cached >= asked.prompt.len()
            || !cached.is_multiple_of(self.config.block_size)
            || !self.config.enable_prefix_caching
        {
            return Err(format!("{cached} cached tokens of {}", asked.prompt.len()));
        }
        let known = self.arrivals.iter().enumerate().any(|(other, arrival)| {
            let earlier = other != i && self.told[other].added && arrival.asked.salt == asked.salt;
            let said = self.told[other].tokens.first().map_or(&[][..], Vec::as_slice);
            let all = arrival.asked.prompt.iter().chain(said);
            // Beams and other children may have said what this one finds: the prompt is what is sure.
            let sure = arrival.asked.prompt.len().min(cached);
            earlier && all.take(sure).eq(&asked.prompt[..sure])
        });
        if known { Ok(()) } else { Err("found in the cache what nobody has computed".to_owned()) }
    }

    fn check_prompt(&self, i: usize, output: &Output) -> Result<(), String> {
        let Asked { prompt, params, .. } = &self.arrivals[i].asked;
        if output.prompt_token_ids[..] != prompt[..] {
            return Err("another prompt".to_owned());
        }
        let Some(top) = params.prompt_logprobs else {
            return if self.told[i].prompt_logprobs.is_none() {
                Ok(())
            } else {
                Err("prompt_logprobs unasked".to_owned())
            };
        };
        let Some(table) = &self.told[i].prompt_logprobs else { return Err("no prompt_logprobs".to_owned()) };
        let mut before = super::model::EMPTY;
        for (position, pair) in prompt.windows(2).enumerate() {
            before = super::model::extend(before, pair[0], position);
            let wanted = super::model::Row::new(before).logprob(pair[1]);
            let at = position * table.width;
            if table.token_ids.get(at) != Some(&(pair[1] as i32)) || table.logprobs[at].to_bits() != wanted.to_bits() {
                return Err(format!("prompt log-probability of position {}", position + 1));
            }
        }
        let whole = table.len() + 1 == prompt.len() && table.width == 1 + top as usize;
        if whole { Ok(()) } else { Err("prompt_logprobs of another length".to_owned()) }
    }

    fn finish(mut self) -> Result<Coverage, String> {
        let stats = self.scheduler.stats();
        let idle = stats.num_free_gpu_blocks == stats.num_gpu_blocks
            && stats.num_free_cpu_blocks == stats.num_cpu_blocks
            && self.scheduler.num_unfinished() == 0;
        if !idle {
            return Err(format!("not idle at the end: {stats:?}"));
        }
        let coverage = &mut self.coverage;
        coverage.scenarios = 1;
        coverage.steps = self.device.steps;
        coverage.recomputations = stats.counters.num_recomputations as usize;
        coverage.swap_outs = stats.counters.num_swap_outs as usize;
        coverage.swap_ins = self.device.swapped_in;
        coverage.cascades = self.device.cascades;
        coverage.copies = stats.num_copies as usize;
        Ok(self.coverage)
    }
}
