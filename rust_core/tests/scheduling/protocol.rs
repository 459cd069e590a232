//! The step protocol: two steps outstanding, commits in order, results of the right shape, what comes out.

use pyvllm_core::commit::Sampled;
use pyvllm_core::error::Error;
use pyvllm_core::output::LogprobTable;
use pyvllm_core::plan::Section;
use pyvllm_core::request::{OutputKind, SamplingParams};

use crate::common::{Engine, config, greedy, prompt, solo};

#[test]
fn at_most_two_steps_are_outstanding_and_commits_come_in_order() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("x", prompt(1, 5), greedy(6));
    let first = engine.launch().unwrap();
    let second = engine.launch().unwrap();
    assert_eq!((first.step, second.step), (0, 1));
    assert_eq!(second.section(Section::TokenIds), [-1]);
    assert!(engine.scheduler.schedule().is_none());
    let empty = Sampled { token_ids: &[7], logprobs: &[0.0], ..Sampled::default() };
    assert!(matches!(engine.scheduler.commit(1, empty), Err(Error::Internal(_))));
    engine.commit();
    engine.commit();
    assert!(matches!(engine.scheduler.commit(2, empty), Err(Error::Internal(_))));
    engine.drain(10);
    assert_eq!(engine.tokens("x"), solo(&prompt(1, 5), &greedy(6)));
}

#[test]
fn results_of_a_wrong_shape_are_an_error_and_change_nothing() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("x", prompt(1, 5), SamplingParams { logprobs: Some(1), ..greedy(2) });
    engine.launch().unwrap();
    let table = engine.pending[0].sample_table.clone();
    let table = table.as_ref();
    let (empty, ids, logprobs) = (LogprobTable::new(1), vec![1, 2], vec![0.0; 2]);
    let wide = LogprobTable { width: 2, token_ids: ids, logprobs, ranks: vec![1] };
    for (token_ids, logprobs, sample_table, candidate_table) in [
        (&[1, 2][..], &[0.0][..], table, None),
        (&[1], &[], table, None),
        (&[1], &[0.0], None, None),
        (&[1], &[0.0], table, Some(&empty)),
        (&[1], &[0.0], table, Some(&wide)),
        (&[-1], &[0.0], table, None),
        (&[20], &[0.0], table, None),
    ] {
        let sampled = Sampled { token_ids, logprobs, sample_table, prompt_table: None, candidate_table };
        assert!(matches!(engine.scheduler.commit(0, sampled), Err(Error::Internal(_))), "{sampled:?}");
    }
    engine.commit();
    engine.drain(5);
    assert_eq!(engine.tokens("x"), solo(&prompt(1, 5), &greedy(2)));
}

#[test]
fn outputs_come_as_they_are_asked_for() {
    let told = |output_kind| {
        let mut engine = Engine::new(config(16, 4));
        engine.add("x", prompt(1, 5), SamplingParams { output_kind, ..greedy(4) });
        engine.drain(10);
        let lens: Vec<usize> = engine.outputs.iter().map(|output| output.completions[0].token_ids.len()).collect();
        let finished: Vec<bool> = engine.outputs.iter().map(|output| output.finished).collect();
        assert_eq!(finished.iter().position(|&finished| finished), Some(finished.len() - 1));
        lens
    };
    assert_eq!(told(OutputKind::FinalOnly), [4]);
    assert_eq!(told(OutputKind::Cumulative), [1, 2, 3, 4]);
    assert_eq!(told(OutputKind::Delta), [1, 1, 1, 1]);
}

#[test]
fn stats_count_what_happens() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("a", prompt(1, 5), SamplingParams { n: 2, ..greedy(3) });
    engine.add("b", prompt(2, 5), greedy(3));
    assert_eq!(engine.scheduler.stats().num_waiting, 2);
    engine.step();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_free_gpu_blocks), (3, 0, 12));
    engine.drain(10);
    let counters = engine.scheduler.stats().counters;
    assert_eq!((counters.prompt_tokens, counters.generation_tokens), (10, 9));
}

#[test]
fn timing_is_in_order() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("x", prompt(1, 5), greedy(3));
    engine.drain(10);
    let timing = engine.output("x").timing;
    assert!(timing.arrival_time > 1.6e9);
    assert!(timing.queued <= timing.scheduled && timing.scheduled <= timing.first_token);
    assert!(timing.first_token < timing.last_token);
}
