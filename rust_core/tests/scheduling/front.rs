//! The front end of another process: what it puts together equals what the scheduler alone would have told.

use std::collections::HashMap;

use proptest::prelude::*;
use pyvllm_core::error::{Error, Result};
use pyvllm_core::front::{FrontEnd, QueueLimits};
use pyvllm_core::output::{Completion, FinishReason, Output, Timing};
use pyvllm_core::request::{OutputKind, SamplingParams};
use pyvllm_core::scheduler::RequestOptions;
use pyvllm_core::wire::{RequestMessage, StepMessage, VERSION, decode, encode};

use crate::common::generate::{random_arrivals, random_config};
use crate::common::{Engine, Rng, config, greedy, prompt};

/// An engine and its front end, with nothing but bytes between them.
struct Pair {
    engine: Engine,
    front: FrontEnd,
    last_number: u64,
}

impl Pair {
    fn new(engine: Engine, queue_limits: QueueLimits) -> Self {
        let limits = decode(&encode(engine.scheduler.limits()).unwrap()).unwrap();
        Self { engine, front: FrontEnd::new(limits, queue_limits), last_number: 0 }
    }

    fn small() -> Self {
        Self::new(Engine::with_text(config(32, 4)), QueueLimits::default())
    }

    /// Send a request; the engine takes it in at once.
    fn add(&mut self, id: &str, prompt: Vec<u32>, params: SamplingParams, options: RequestOptions) -> Result<u64> {
        let (number, message) = self.front.add(id, prompt, params, options)?;
        self.deliver(&message);
        Ok(number)
    }

    fn deliver(&mut self, message: &[u8]) {
        let RequestMessage { number, prompt, params, options } = decode(message).unwrap();
        self.engine.scheduler.add_request(&number.to_string(), prompt, params, options).unwrap();
        self.last_number = number;
    }

    fn send(&mut self, params: SamplingParams) -> u64 {
        let id = format!("request {}", self.last_number);
        let text = Some("the prompt".to_owned());
        self.add(&id, prompt(1, 5), params, RequestOptions { prompt: text, ..RequestOptions::default() }).unwrap()
    }

    /// One step; the numbers that have news, or None if there was nothing to do.
    fn step(&mut self) -> Option<Vec<u64>> {
        self.engine.step()?;
        Some(self.report())
    }

    fn report(&mut self) -> Vec<u64> {
        let outputs = std::mem::take(&mut self.engine.outputs);
        let stats = self.engine.scheduler.stats();
        let message = encode(&StepMessage { last_number: self.last_number, stats, outputs }).unwrap();
        self.front.receive(&message).unwrap()
    }
}

/// All that was told of a request, put together; times left out.
fn total(outputs: &[Output], kind: OutputKind) -> Output {
    let mut last = outputs.last().unwrap().clone();
    last.timing = Timing::default();
    if kind == OutputKind::Delta {
        let mut completions: Vec<Completion> = Vec::new();
        for news in outputs.iter().flat_map(|output| &output.completions) {
            match completions.iter_mut().find(|completion| completion.index == news.index) {
                None => completions.push(news.clone()),
                Some(known) => {
                    let (mut text, mut ids) = (known.text.clone(), known.token_ids.clone());
                    text.push_str(&news.text);
                    ids.extend(&news.token_ids);
                    let mut table = known.logprobs.take();
                    if let (Some(table), Some(rows)) = (&mut table, &news.logprobs) {
                        for row in 0..rows.len() {
                            let at = row * rows.width..(row + 1) * rows.width;
                            table.push(&rows.token_ids[at.clone()], &rows.logprobs[at], rows.ranks[row]);
                        }
                    }
                    *known = Completion { text, token_ids: ids, logprobs: table, ..news.clone() };
                }
            }
        }
        completions.sort_by_key(|completion| completion.index);
        last.completions = completions;
        last.prompt_logprobs = outputs.iter().find_map(|output| output.prompt_logprobs.clone());
    }
    last
}

/// Run random requests through a scheduler alone and through a pair; readers of the pair come when they like.
fn compare(seed: u64) {
    let mut rng = Rng(seed);
    let config = random_config(&mut rng);
    let has_text = rng.percent(50);
    let arrivals = random_arrivals(&mut rng, &config, has_text);
    let new = || if has_text { Engine::with_text(config.clone()) } else { Engine::new(config.clone()) };
    let (mut alone, mut pair) = (new(), Pair::new(new(), QueueLimits::default()));
    let mut asked = HashMap::new();
    for (index, arrival) in arrivals.iter().enumerate() {
        let (id, asks) = (format!("request {index}"), &arrival.asked);
        let mut params = asks.params.clone();
        let ranks = params.best_of.is_some_and(|best_of| best_of > params.n);
        let kinds = [OutputKind::Cumulative, OutputKind::Delta, OutputKind::FinalOnly];
        params.output_kind = if ranks { OutputKind::FinalOnly } else { rng.pick(&kinds) };
        let options = RequestOptions { cache_salt: asks.salt.clone(), ..RequestOptions::default() };
        let refused = alone.scheduler.add_request(&id, asks.prompt.clone(), params.clone(), options.clone()).err();
        match pair.add(&id, asks.prompt.clone(), params.clone(), options) {
            Ok(number) => drop(asked.insert(id, (number, params))),
            Err(error) => assert_eq!(Some(error), refused),
        }
    }
    let mut told: HashMap<u64, Vec<Output>> = HashMap::new();
    let mut slow = rng.range(5, 100) as u64;
    loop {
        assert_eq!(alone.step().is_none(), pair.step().is_none());
        let over = !pair.engine.scheduler.has_unfinished();
        slow = if over { 100 } else { slow };
        for (number, _) in asked.values().filter(|_| rng.percent(slow)) {
            told.entry(*number).or_default().extend(pair.front.take(*number));
            assert_eq!(pair.front.take(*number), None, "nothing is told twice");
        }
        if over {
            break;
        }
    }
    assert_eq!(pair.front.num_unfinished(), 0);
    for (id, (number, params)) in asked {
        let expected: Vec<Output> = alone.outputs.iter().filter(|output| *output.request_id == *id).cloned().collect();
        let kind = params.output_kind;
        assert_eq!(total(&told[&number], kind), total(&expected, kind), "seed {seed}, {id}: {params:?}");
    }
}

#[test]
fn what_arrives_equals_what_the_scheduler_tells() {
    (0..400).for_each(compare);
}

#[test]
fn a_slow_reader_gets_one_output_with_all_that_is_new() {
    let mut pair = Pair::small();
    let delta = SamplingParams { output_kind: OutputKind::Delta, n: 2, ..greedy(6) };
    let number = pair.send(delta);
    (0..3).for_each(|_| assert_eq!(pair.step(), Some(vec![number])));
    let output = pair.front.take(number).unwrap();
    assert_eq!(output.prompt.as_deref(), Some("the prompt"));
    assert_eq!((&*output.request_id, &*output.prompt_token_ids), ("request 0", &prompt(1, 5)[..]));
    assert_eq!(output.completions.iter().map(|completion| completion.token_ids.len()).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(pair.front.take(number), None);
}

#[test]
fn an_aborted_request_ends_with_what_it_has() {
    let mut pair = Pair::small();
    let number = pair.send(SamplingParams { output_kind: OutputKind::Cumulative, ..greedy(6) });
    (0..2).for_each(|_| drop(pair.step()));
    assert!(pair.front.abort(number));
    assert!(!pair.front.abort(number), "it has ended");
    assert!(pair.front.number("request 0").is_none(), "its name is free");
    pair.step();
    let output = pair.front.take(number).unwrap();
    let completion = &output.completions[0];
    assert!(output.finished);
    assert_eq!((completion.token_ids.len(), completion.finish_reason), (2, Some(FinishReason::Abort)));
    assert_eq!(pair.front.take(number), None);
    assert!(!pair.front.drop_request(number), "nothing is left of it");
}

#[test]
fn only_sequences_that_run_are_aborted() {
    let mut pair = Pair::small();
    let number = pair.send(SamplingParams { n: 3, output_kind: OutputKind::Delta, ..greedy(9) });
    // Sequence 1 ends, the others go on.
    pair.engine.step_with(|_| 7);
    pair.report();
    let mut ended = pair.front.take(number).unwrap();
    ended.completions.truncate(2);
    ended.completions.remove(0);
    ended.completions[0].finish_reason = Some(FinishReason::Stop);
    let message = StepMessage {
        last_number: 1,
        stats: pair.engine.scheduler.stats(),
        outputs: vec![Output { request_id: number.to_string().into(), ..ended }],
    };
    pair.front.receive(&encode(&message).unwrap()).unwrap();
    pair.front.abort(number);
    let output = pair.front.take(number).unwrap();
    assert!(output.timing.first_token > 0.0);
    let reasons: Vec<_> =
        output.completions.iter().map(|completion| (completion.index, completion.finish_reason)).collect();
    let [abort, stop] = [FinishReason::Abort, FinishReason::Stop].map(Some);
    assert_eq!(reasons, [(0, abort), (1, stop), (2, abort)]);
}

#[test]
fn requests_that_the_engine_lost_are_dropped_and_later_ones_kept() {
    let mut pair = Pair::small();
    let numbers: Vec<u64> = (0..3).map(|_| pair.send(greedy(4))).collect();
    let mut lost = pair.front.drop_through(numbers[1]);
    lost.sort_unstable();
    assert_eq!(lost, numbers[..2]);
    assert_eq!(pair.front.num_unfinished(), 1);
    while pair.step().is_some() {}
    assert_eq!(pair.front.take(numbers[0]), None, "what was on the way is ignored");
    assert!(pair.front.take(numbers[2]).unwrap().finished);
}

#[test]
fn an_id_is_free_once_its_request_has_ended() {
    let mut pair = Pair::small();
    let add = |pair: &mut Pair| pair.add("x", prompt(1, 3), greedy(1), RequestOptions::default());
    let first = add(&mut pair).unwrap();
    let refused = add(&mut pair).unwrap_err();
    let alone = pair.engine.scheduler.add_request("1", prompt(1, 3), greedy(1), RequestOptions::default());
    assert_eq!(refused.to_string().replace("\"x\"", "\"1\""), alone.unwrap_err().to_string());
    while pair.step().is_some() {}
    let second = add(&mut pair).unwrap();
    assert!(pair.front.take(first).unwrap().finished, "its end can still be read");
    assert!(pair.front.drop_request(second));
    add(&mut pair).unwrap(); // Under another number: the engine may still have the one that was dropped.
}

/// How many of 20 requests are taken, the engine seeing none of them.
fn num_accepted(pair: &mut Pair, params: &SamplingParams) -> usize {
    (0..20)
        .filter(|i| {
            match pair.front.add(&format!("queued {i}"), prompt(1, 5), params.clone(), RequestOptions::default()) {
                Ok(_) => true,
                Err(Error::QueueFull(_)) => false,
                Err(error) => panic!("{error}"),
            }
        })
        .count()
}

fn limited(max_num_seqs: usize, limits: QueueLimits) -> Pair {
    Pair::new(Engine::new(pyvllm_core::Config { max_num_seqs, ..config(64, 4) }), limits)
}

#[test]
fn r020_no_more_wait_than_may() {
    let four = QueueLimits { max_num_sequences: Some(4), ..QueueLimits::default() };
    assert_eq!(num_accepted(&mut limited(3, four), &greedy(4)), 3 + 4);
    let three = SamplingParams { n: 3, ..greedy(4) };
    assert_eq!(num_accepted(&mut limited(3, four), &three), 2, "sequences are counted");
    let tokens = QueueLimits { max_num_tokens: Some(22), ..QueueLimits::default() };
    assert_eq!(num_accepted(&mut limited(3, tokens), &greedy(4)), 4, "its own 5 tokens, and those of three unseen");
    assert_eq!(num_accepted(&mut limited(3, QueueLimits::default()), &greedy(4)), 20);
}

#[test]
fn r020_places_become_free_as_requests_end() {
    let mut pair = limited(2, QueueLimits { max_num_sequences: Some(1), ..QueueLimits::default() });
    for _ in 0..3 {
        pair.send(greedy(8));
    }
    pair.step();
    let stats = pair.front.stats();
    assert_eq!((stats.num_running, stats.queued.num_sequences, stats.queued.num_tokens), (2, 1, 5));
    assert_eq!(num_accepted(&mut pair, &greedy(8)), 0);
    assert_eq!(pair.front.num_unfinished(), 3, "r022: nothing is left of what was refused");
    while pair.step().is_some() {}
    assert_eq!(pair.front.stats().queued.num_sequences, 0);
    assert_eq!(num_accepted(&mut pair, &greedy(8)), 3);
}

#[test]
fn the_block_map_shows_who_holds_what() {
    let mut engine = Engine::new(config(8, 4));
    engine.add("a", prompt(1, 5), SamplingParams { n: 2, ..greedy(8) });
    engine.add("b", prompt(30, 9), greedy(2));
    for _ in 0..2 {
        engine.step();
    }
    let map = engine.scheduler.block_map();
    let b_is_over = !map.requests.iter().any(|request| request.request_id == "b");
    assert!(b_is_over);
    let held: Vec<usize> = (0..8).filter(|&block| map.owners[block] >= 0).collect();
    let mut expected: Vec<usize> = engine.tables("a").concat().iter().map(|&block| block as usize).collect();
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(held, expected);
    assert!((0..8).all(|block| (map.ref_counts[block] > 0) == held.contains(&block)));
    assert_eq!(map.ref_counts[engine.tables("a")[0][0] as usize], 2, "the prompt's block is shared");
    let request = &map.requests[0];
    assert_eq!((&*request.state, request.num_sequences, request.num_output_tokens), ("running", 2, 4));
    // The prompt's full blocks: one of "a", two of "b", which are free.
    assert_eq!(map.cached.iter().filter(|&&cached| cached).count(), 3);
    assert_eq!(decode::<pyvllm_core::block_map::BlockMap>(&encode(&map).unwrap()).unwrap(), map);
}

fn messages() -> (Vec<u8>, Vec<u8>) {
    let mut pair = Pair::small();
    let params = SamplingParams {
        logprobs: Some(2),
        prompt_logprobs: Some(1),
        stop: vec!["zzz".to_owned()],
        logit_bias: vec![(3, -1.5)],
        output_kind: OutputKind::Delta,
        ..greedy(3)
    };
    let options = RequestOptions { cache_salt: Some("salt".to_owned()), ..RequestOptions::default() };
    let (_, request) = pair.front.add("x", prompt(1, 9), params, options).unwrap();
    pair.deliver(&request);
    while pair.engine.step().is_some() {}
    let outputs = std::mem::take(&mut pair.engine.outputs);
    assert_eq!(outputs.len(), 3);
    (request, encode(&StepMessage { last_number: 1, stats: pair.engine.scheduler.stats(), outputs }).unwrap())
}

#[test]
fn messages_cut_short_or_too_long_are_refused() {
    let (request, step) = messages();
    for end in 0..request.len() {
        decode::<RequestMessage>(&request[..end]).unwrap_err();
    }
    for end in 0..step.len() {
        decode::<StepMessage>(&step[..end]).unwrap_err();
    }
    decode::<StepMessage>(&[&step[..], &[0]].concat()).unwrap_err();
    let other = decode::<StepMessage>(&[&[VERSION + 1], &step[1..]].concat()).unwrap_err().to_string();
    assert!(other.contains(&format!("version {}, not {VERSION}", VERSION + 1)), "{other}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// Neither panics nor takes more memory than the message has bytes, give or take a factor.
    #[test]
    fn bytes_of_any_kind_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [&[VERSION], &bytes[..]].concat();
        let _ = decode::<RequestMessage>(&bytes);
        let _ = decode::<StepMessage>(&bytes);
        let _ = decode::<pyvllm_core::limits::EngineLimits>(&bytes);
        let _ = decode::<pyvllm_core::block_map::BlockMap>(&bytes);
    }

    #[test]
    fn a_damaged_step_is_read_or_refused(at in 1_usize..400, value in any::<u8>(), more in any::<u8>()) {
        let (_, mut step) = messages();
        let (at, len) = (at % step.len(), step.len());
        step[at] = value;
        step[(at * 7 + 1) % len] ^= more;
        let mut pair = Pair::small();
        let number = pair.send(greedy(4));
        if pair.front.receive(&step).is_ok() {
            let _ = pair.front.take(number);
        }
    }
}
