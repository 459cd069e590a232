//! The front end of an engine that runs in another process: checks requests as the scheduler would, gives them numbers,
//! and puts together what comes back for each until somebody takes it.
//!
//! A reader that is slow costs at most one output for each request: news is merged into what has not been taken.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::admission::RequestOptions;
use crate::error::{Error, Result};
use crate::limits::{EngineLimits, in_use};
use crate::output::{Completion, FinishReason, Output, Timing};
use crate::request::{OutputKind, SamplingParams};
use crate::stats::{Queued, Stats};
use crate::wire::{RequestMessage, StepMessage, decode, encode};

/// How much may wait at once, and be added still. None: no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueLimits {
    /// Sequences.
    pub max_num_sequences: Option<usize>,
    /// Tokens of prompts.
    pub max_num_tokens: Option<usize>,
}

/// One request, from when it is sent until its last output is taken or it is dropped.
#[derive(Debug)]
struct Entry {
    request_id: Arc<str>,
    prompt: Option<Arc<str>>,
    prompt_token_ids: Arc<[u32]>,
    /// Outputs hold all so far: what was taken stays.
    cumulative: bool,
    /// What has come, or of it what has not been taken.
    output: Option<Output>,
    has_news: bool,
    ended: bool,
    /// For each sequence to return, whether its end has come.
    ended_sequences: Vec<bool>,
    /// Of the latest output: `num_cached_tokens`, `num_preemptions` and times.
    facts: (usize, u32, Timing),
}

/// See the module.
#[derive(Debug)]
pub struct FrontEnd {
    limits: EngineLimits,
    queue_limits: QueueLimits,
    entries: HashMap<u64, Entry>,
    /// Unfinished requests by name.
    numbers: HashMap<Arc<str>, u64>,
    next_number: u64,
    stats: Stats,
    /// What the engine has not said that it has taken in: number and size, oldest first; and its sum.
    unseen: VecDeque<(u64, Queued)>,
    num_unseen: Queued,
}

impl FrontEnd {
    /// A front end without requests.
    pub fn new(limits: EngineLimits, queue_limits: QueueLimits) -> Self {
        Self {
            limits,
            queue_limits,
            entries: HashMap::new(),
            numbers: HashMap::new(),
            next_number: 1,
            stats: Stats::default(),
            unseen: VecDeque::new(),
            num_unseen: Queued::default(),
        }
    }

    /// Most tokens of a prompt that a request uses, or None: all.
    pub fn prompt_limit(&self, params: &SamplingParams) -> Option<usize> {
        self.limits.prompt_limit(params)
    }

    /// Check a request; its number and the message to send. Fails as `Scheduler::add_request` does, and if the queue
    /// is full; nothing is left behind then.
    pub fn add(
        &mut self,
        request_id: &str,
        prompt: Vec<u32>,
        mut params: SamplingParams,
        options: RequestOptions,
    ) -> Result<(u64, Vec<u8>)> {
        if self.numbers.contains_key(request_id) {
            return Err(in_use(request_id));
        }
        let prompt = self.limits.truncate(prompt, &params);
        self.limits.check(&prompt, &params)?;
        let size = Queued { num_sequences: params.width(), num_tokens: prompt.len() };
        self.check_queue(size)?;
        // All so far is put together here: what travels each step is only what is new.
        let cumulative =
            params.output_kind == OutputKind::Cumulative && (params.use_beam_search || !params.ranks_outputs());
        if cumulative {
            params.output_kind = OutputKind::Delta;
        }
        let entry = Entry {
            request_id: request_id.into(),
            prompt: options.prompt.as_deref().map(Into::into),
            prompt_token_ids: prompt.as_slice().into(),
            cumulative,
            output: None,
            has_news: false,
            ended: false,
            ended_sequences: vec![false; params.n as usize],
            facts: <_>::default(),
        };
        let number = self.next_number;
        let message = encode(&RequestMessage { number, prompt, params, options })?;
        self.next_number += 1;
        self.numbers.insert(Arc::clone(&entry.request_id), number);
        self.entries.insert(number, entry);
        self.unseen.push_back((number, size));
        self.num_unseen.num_sequences += size.num_sequences;
        self.num_unseen.num_tokens += size.num_tokens;
        Ok((number, message))
    }

    /// Whether one more request may wait. Requests that can run at once do not wait, as far as is known here.
    fn check_queue(&self, size: Queued) -> Result<()> {
        let QueueLimits { max_num_sequences, max_num_tokens } = self.queue_limits;
        let stats = &self.stats;
        let num_taken = stats.num_running + stats.queued.num_sequences + stats.num_swapped;
        let num_free = self.limits.max_num_seqs.saturating_sub(num_taken);
        let num_sequences = self.num_unseen.num_sequences + size.num_sequences;
        if num_sequences <= num_free {
            return Ok(());
        }
        let refuse = |what: &str, name: &str, waiting: usize, most: usize| {
            let message =
                format!("the queue is full: {waiting} {what} wait, of {most} ({name}) that may; try again later");
            Err(Error::QueueFull(message))
        };
        let waiting = stats.queued.num_sequences + num_sequences - num_free;
        if let Some(most) = max_num_sequences.filter(|&most| waiting > most) {
            return refuse("sequences", "max_num_queued_reqs", waiting - size.num_sequences, most);
        }
        let waiting = stats.queued.num_tokens + self.num_unseen.num_tokens + size.num_tokens;
        if let Some(most) = max_num_tokens.filter(|&most| waiting > most) {
            return refuse("prompt tokens", "max_num_queued_tokens", waiting - size.num_tokens, most);
        }
        Ok(())
    }

    /// Take in what a step tells; the numbers of the requests that have news.
    pub fn receive(&mut self, message: &[u8]) -> Result<Vec<u64>> {
        let StepMessage { last_number, stats, outputs }: StepMessage = decode(message)?;
        self.stats = stats;
        while let Some(&(_, size)) = self.unseen.front().filter(|(number, _)| *number <= last_number) {
            self.num_unseen.num_sequences -= size.num_sequences;
            self.num_unseen.num_tokens -= size.num_tokens;
            self.unseen.pop_front();
        }
        let mut numbers = Vec::with_capacity(outputs.len());
        for output in outputs {
            let number = output.request_id.parse();
            let number: u64 = number.map_err(|_| Error::Internal(format!("output of {:?}", output.request_id)))?;
            // What was dropped here may still have had outputs on the way.
            let Some(entry) = self.entries.get_mut(&number).filter(|entry| !entry.ended) else { continue };
            entry.receive(output);
            if entry.ended {
                self.numbers.remove(&entry.request_id);
            }
            numbers.push(number);
        }
        Ok(numbers)
    }

    /// What has come for a request since the last time, if anything. After its last output it is forgotten.
    pub fn take(&mut self, number: u64) -> Option<Output> {
        let entry = self.entries.get_mut(&number).filter(|entry| entry.has_news)?;
        entry.has_news = false;
        if entry.ended {
            return self.entries.remove(&number)?.output;
        }
        if entry.cumulative { entry.output.clone() } else { entry.output.take() }
    }

    /// End a request with what it has so far, reason `abort`. Nothing that still comes for it is taken in. False if it
    /// has ended.
    pub fn abort(&mut self, number: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&number).filter(|entry| !entry.ended) else { return false };
        entry.abort();
        self.numbers.remove(&entry.request_id);
        true
    }

    /// Forget a request. False if it was unknown or had ended: then the engine does not have it either.
    pub fn drop_request(&mut self, number: u64) -> bool {
        let Some(entry) = self.entries.remove(&number) else { return false };
        if !entry.ended {
            self.numbers.remove(&entry.request_id);
        }
        !entry.ended
    }

    /// Forget the unfinished requests up to a number, which the engine has lost; their numbers.
    pub fn drop_through(&mut self, last_number: u64) -> Vec<u64> {
        let lost = self.entries.iter().filter(|(number, entry)| **number <= last_number && !entry.ended);
        let numbers: Vec<u64> = lost.map(|(number, _)| *number).collect();
        for &number in &numbers {
            self.drop_request(number);
        }
        numbers
    }

    /// The number of an unfinished request.
    pub fn number(&self, request_id: &str) -> Option<u64> {
        self.numbers.get(request_id).copied()
    }

    /// Unfinished requests by number.
    pub fn names(&self) -> impl Iterator<Item = (u64, &str)> {
        self.numbers.iter().map(|(name, &number)| (number, &**name))
    }

    /// The newest snapshot that has come.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Requests that have not finished.
    pub fn num_unfinished(&self) -> usize {
        self.numbers.len()
    }
}

impl Entry {
    fn receive(&mut self, news: Output) {
        for completion in news.completions.iter().filter(|completion| completion.finish_reason.is_some()) {
            if let Some(ended) = self.ended_sequences.get_mut(completion.index) {
                *ended = true;
            }
        }
        self.has_news = true;
        self.ended = news.finished;
        self.facts = (news.num_cached_tokens, news.num_preemptions, news.timing);
        match &mut self.output {
            Some(output) => merge(output, news),
            None => {
                self.output = Some(Output {
                    request_id: Arc::clone(&self.request_id),
                    prompt: self.prompt.clone(),
                    prompt_token_ids: Arc::clone(&self.prompt_token_ids),
                    ..news
                });
            }
        }
    }

    fn abort(&mut self) {
        let open = self.ended_sequences.iter().enumerate().filter(|(_, ended)| !**ended).map(|(index, _)| Completion {
            index,
            text: String::new(),
            token_ids: Vec::new(),
            cumulative_logprob: None,
            logprobs: None,
            finish_reason: Some(FinishReason::Abort),
            stop_reason: None,
        });
        let completions = open.collect();
        let (num_cached_tokens, num_preemptions, timing) = self.facts;
        self.receive(Output {
            request_id: Arc::clone(&self.request_id),
            prompt: None,
            prompt_token_ids: Arc::default(),
            prompt_logprobs: None,
            completions,
            error: None,
            finished: true,
            num_cached_tokens,
            num_preemptions,
            timing,
        });
    }
}

/// Put what is new behind what is there.
fn merge(output: &mut Output, news: Output) {
    output.finished = news.finished;
    output.error = news.error;
    output.num_cached_tokens = news.num_cached_tokens;
    output.num_preemptions = news.num_preemptions;
    output.timing = news.timing;
    if news.prompt_logprobs.is_some() {
        output.prompt_logprobs = news.prompt_logprobs;
    }
    for completion in news.completions {
        match output.completions.binary_search_by_key(&completion.index, |known| known.index) {
            Ok(at) => extend(&mut output.completions[at], completion),
            Err(at) => output.completions.insert(at, completion),
        }
    }
}

fn extend(completion: &mut Completion, mut news: Completion) {
    completion.text.push_str(&news.text);
    completion.token_ids.append(&mut news.token_ids);
    completion.cumulative_logprob = news.cumulative_logprob.or(completion.cumulative_logprob);
    match (&mut completion.logprobs, news.logprobs) {
        (Some(table), Some(rows)) => table.append(rows),
        (table, rows) => *table = table.take().or(rows),
    }
    completion.finish_reason = news.finish_reason;
    completion.stop_reason = news.stop_reason;
}
