//! n > 1 and best_of: cases from the field.

use pyvllm_core::error::Error;
use pyvllm_core::output::FinishReason;
use pyvllm_core::request::{OutputKind, SamplingParams};
use pyvllm_core::scheduler::RequestOptions;

use crate::common::model::Asked;
use crate::common::{Engine, config, greedy, prompt, solo};

fn children(n: i64, max_tokens: i64) -> SamplingParams {
    SamplingParams { n, temperature: 1.0, seed: Some(42), ..greedy(max_tokens) }
}

#[test]
fn b041_one_seed_gives_different_children_that_repeat() {
    let mut engine = Engine::new(config(64, 4));
    for id in ["first", "second"] {
        engine.add(id, prompt(1, 5), children(4, 16));
        engine.drain(20);
    }
    let said = engine.tokens("first");
    assert!((1..4).all(|child| said[child] != said[0]));
    assert_eq!(said, engine.tokens("second"));
    assert_eq!(said, solo(&prompt(1, 5), &children(4, 16)));
}

#[test]
fn b041_unseeded_requests_differ() {
    let mut engine = Engine::new(config(64, 4));
    for id in ["first", "second"] {
        engine.add(id, prompt(1, 5), SamplingParams { seed: None, ..children(1, 16) });
    }
    engine.drain(20);
    assert_ne!(engine.tokens("first"), engine.tokens("second"));
}

#[test]
fn b042_the_first_child_to_end_does_not_end_the_others() {
    let mut engine = Engine::new(config(64, 4));
    engine.add("x", prompt(1, 5), SamplingParams { ignore_eos: false, ..children(2, 16) });
    engine.step_with(|child| if child == 0 { 0 } else { 5 });
    assert!(engine.outputs.is_empty());
    for _ in 2..9 {
        engine.step_with(|_| 5);
    }
    engine.step_with(|_| 0);
    let completions = &engine.output("x").completions;
    assert_eq!(completions.iter().map(|completion| completion.token_ids.len()).collect::<Vec<_>>(), [1, 9]);
    assert!(completions.iter().all(|completion| completion.finish_reason == Some(FinishReason::Stop)));
    engine.check_idle();
}

#[test]
fn b042_an_ended_child_frees_its_place() {
    let mut config = config(64, 4);
    config.max_num_seqs = 2;
    let mut engine = Engine::new(config);
    engine.add("x", prompt(1, 5), SamplingParams { ignore_eos: false, ..children(2, 16) });
    engine.add("next", prompt(2, 5), greedy(1));
    engine.step_with(|child| if child == 0 { 0 } else { 5 });
    engine.step_with(|_| 5);
    assert_eq!(engine.tokens("next").len(), 1);
    engine.scheduler.abort("x");
    engine.check_idle();
}

#[test]
fn b046_an_abort_takes_all_children_along() {
    let mut engine = Engine::new(config(64, 4));
    for _ in 0..100 {
        engine.add("x", prompt(1, 5), children(4, 16));
        engine.step();
        engine.step();
        engine.launch();
        assert!(engine.scheduler.abort("x"));
        engine.check_idle();
        engine.commit();
        engine.check_idle();
        assert!(engine.step().is_none());
    }
    assert!(engine.outputs.is_empty());
}

#[test]
fn b047_counts_out_of_range_never_enter_the_scheduler() {
    let mut engine = Engine::new(config(64, 4));
    let cases = [(0, None, "n"), (-1, None, "n"), (1_000_000, None, "n"), (2, Some(1), "best_of")];
    for (n, best_of, field) in cases {
        let params = SamplingParams { n, best_of, ..greedy(1) };
        let refused = engine.scheduler.add_request("x", prompt(1, 5), params, RequestOptions::default());
        let Err(Error::Parameter { parameter, message }) = refused else { panic!("n {n} best_of {best_of:?}") };
        assert_eq!(parameter, field);
        assert!(message.contains(&best_of.unwrap_or(n).to_string()), "{message}");
        engine.check_idle();
    }
}

#[test]
fn best_of_returns_the_likeliest_sequences() {
    let params = SamplingParams { best_of: Some(6), ..children(2, 5) };
    let mut engine = Engine::new(config(64, 4));
    engine.add("x", prompt(1, 5), params.clone());
    engine.drain(20);
    let asked = Asked {
        prompt: prompt(1, 5),
        params,
        salt: None,
        priority: 0,
        eos: vec![0],
        max_model_len: 64,
        has_text: false,
    };
    let mut all: Vec<_> = (0..6).map(|child| asked.solo(child)).collect();
    all.sort_by(|a, b| b.cumulative.total_cmp(&a.cumulative));
    let completions = &engine.output("x").completions;
    assert_eq!(completions.len(), 2);
    for (index, (completion, expected)) in completions.iter().zip(&all).enumerate() {
        assert_eq!((completion.index, &completion.token_ids), (index, &expected.tokens));
        assert_eq!(completion.cumulative_logprob, Some(expected.cumulative));
    }
}

#[test]
fn b045_deltas_of_children_carry_their_own_log_probabilities() {
    let mut engine = Engine::new(config(64, 4));
    let params = SamplingParams { output_kind: OutputKind::Delta, logprobs: Some(0), ..children(2, 2) };
    engine.add("x", prompt(1, 5), params);
    engine.drain(5);
    assert_eq!(engine.outputs.len(), 2);
    for output in &engine.outputs {
        assert_eq!(output.completions.iter().map(|completion| completion.index).collect::<Vec<_>>(), [0, 1]);
        for completion in &output.completions {
            let table = completion.logprobs.as_ref().unwrap();
            let ids: Vec<u32> = table.token_ids.iter().map(|&id| id as u32).collect();
            assert_eq!((ids, table.width), (completion.token_ids.clone(), 1));
            assert_eq!(completion.finish_reason.is_some(), output.finished);
        }
    }
}
