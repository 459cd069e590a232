//! Beam search: cases from the field, and transformers' algorithm written down naively.

use std::collections::HashSet;

use pyvllm_core::request::{EarlyStopping, OutputKind, SamplingParams};

use crate::common::model::Asked;
use crate::common::{Engine, Rng, beam, config, greedy, prompt, solo};

fn width(best_of: i64, max_tokens: i64) -> SamplingParams {
    SamplingParams {
        n: best_of,
        best_of: Some(best_of),
        use_beam_search: true,
        ignore_eos: false,
        ..greedy(max_tokens)
    }
}

#[test]
fn b037_scores_count_generated_tokens_only() {
    for prompt_len in [1, 100] {
        let mut engine = Engine::new(config(64, 4));
        engine.add("x", prompt(1, prompt_len), width(2, 16));
        // One beam loses 1.0 a token and ends with its fourth; the other loses 0.75 and ends with its sixth.
        let far = -90.0;
        engine.step_with_candidates(&[&[(5, -0.75), (6, -1.0), (7, far), (8, far)]]);
        for _ in 2..4 {
            engine.step_with_candidates(&[&[(5, -0.75), (9, far)], &[(6, -1.0), (9, far)]]);
        }
        engine.step_with_candidates(&[&[(5, -0.75), (9, far)], &[(0, -1.0), (9, far)]]);
        engine.step_with_candidates(&[&[(5, -0.75), (9, far)], &[(6, -1.0), (9, far)]]);
        engine.step_with_candidates(&[&[(0, -0.75), (9, far)], &[(6, far), (9, far)]]);
        let best = engine.output("x").completions.iter();
        let found: Vec<_> = best.map(|beam| (beam.token_ids.len(), beam.cumulative_logprob.unwrap())).collect();
        assert_eq!(found, [(6, -4.5), (4, -4.0)], "prompt of {prompt_len}");
        engine.check_idle();
    }
}

#[test]
fn b039_beam_requests_do_not_mix() {
    for widths in [[3, 3], [2, 4]] {
        let mut engine = Engine::new(config(64, 4));
        engine.add("a", prompt(1, 5), width(widths[0], 8));
        engine.add("b", prompt(2, 6), width(widths[1], 8));
        engine.add("plain", prompt(3, 7), greedy(8));
        engine.drain(30);
        assert_eq!(engine.tokens("a"), solo(&prompt(1, 5), &width(widths[0], 8)));
        assert_eq!(engine.tokens("b"), solo(&prompt(2, 6), &width(widths[1], 8)));
        assert_eq!(engine.tokens("plain"), solo(&prompt(3, 7), &greedy(8)));
    }
}

#[test]
fn b040_length_penalties_give_finite_scores_even_to_an_immediate_end() {
    assert_eq!(SamplingParams::default().length_penalty, 1.0);
    // An immediate end at -1.0, and four tokens at -0.5 each: which is better depends on the penalty alone.
    for (length_penalty, first) in [(0.0, 1), (-1.0, 1), (1.0, 4), (2.0, 4)] {
        let mut engine = Engine::new(config(16, 4));
        let params = SamplingParams { length_penalty, early_stopping: EarlyStopping::Never, ..width(2, 8) };
        engine.add("x", prompt(1, 5), params);
        let far = -90.0;
        engine.step_with_candidates(&[&[(5, -0.5), (0, -1.0), (6, far), (7, far)]]);
        engine.step_with_candidates(&[&[(5, -0.5), (8, far)], &[(6, far), (8, far)]]);
        engine.step_with_candidates(&[&[(5, -0.5), (8, far)], &[(6, far), (8, far)]]);
        engine.step_with_candidates(&[&[(0, -0.5), (8, far)], &[(6, far), (8, far)]]);
        while engine.scheduler.has_unfinished() {
            engine.step_with_candidates(&[&[(5, far), (8, far)], &[(6, far), (8, far)]]);
        }
        let output = engine.output("x");
        assert_eq!(output.completions[0].token_ids.len(), first, "length_penalty {length_penalty}");
        assert_eq!(output.completions.len(), 2);
        assert!(output.completions.iter().all(|beam| beam.cumulative_logprob.unwrap().is_finite()));
    }
}

#[test]
fn early_stopping_ends_with_as_many_beams_as_the_width() {
    let mut engine = Engine::new(config(16, 4));
    let params = SamplingParams { early_stopping: EarlyStopping::Always, ..width(2, 8) };
    engine.add("x", prompt(1, 5), params);
    engine.step_with_candidates(&[&[(5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4)]]);
    engine.step_with_candidates(&[&[(0, -5.0), (9, -9.0)], &[(0, -5.0), (9, -9.0)]]);
    let found: Vec<_> = engine.output("x").completions.iter().map(|beam| beam.token_ids.clone()).collect();
    assert_eq!(found, [[5, 0], [6, 0]]);
    engine.check_idle();
}

#[test]
fn beams_that_share_a_parent_share_its_blocks() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 9), width(3, 8));
    engine.step_with_candidates(&[&[(5, -0.1), (6, -0.2), (7, -0.3)]]);
    let tables = engine.tables("x");
    assert_eq!(tables, [tables[0].clone(), tables[0].clone(), tables[0].clone()]);
    assert_eq!(engine.num_free(), 32 - 3);
    // All three write their tails: two of them copy, the last one keeps what is there.
    let plan = engine.launch().unwrap();
    let copies = plan.section(pyvllm_core::plan::Section::Copies).as_chunks::<2>().0;
    assert_eq!(copies.len(), 2);
    assert!(copies.iter().all(|[source, _]| *source == tables[0][2] as i32));
    engine.commit();
    engine.scheduler.abort("x");
    engine.check_idle();
}

#[test]
fn a_stream_tells_what_all_results_begin_with() {
    for kind in [OutputKind::Delta, OutputKind::Cumulative] {
        let mut engine = Engine::new(config(32, 4));
        engine.add("x", prompt(1, 5), SamplingParams { output_kind: kind, ..width(2, 8) });
        let far = -90.0;
        let mut told = Vec::new();
        for offers in [
            &[&[(5, -0.1), (6, -5.0), (7, far), (8, far)][..]][..],
            &[&[(7, -0.1), (8, -0.2)], &[(9, far), (10, far)]], // 5 7 and 5 8
            &[&[(9, -0.1), (10, far)], &[(9, -0.1), (10, far)]], // 5 7 9 and 5 8 9
            &[&[(0, -0.1), (11, -0.2)], &[(12, -9.0), (13, far)]], // 5 7 9 0 ends; 5 7 9 11 and 5 8 9 12 go on
            &[&[(14, -0.1), (15, -0.2)], &[(9, far), (10, far)]], // all begin with 5 7 9
        ] {
            engine.outputs.clear();
            engine.step_with_candidates(offers);
            let output = engine.outputs.first();
            told.push(output.map(|output| {
                assert!(output.completions.iter().all(|completion| completion.finish_reason.is_none()));
                output.completions.iter().map(|completion| completion.token_ids.clone()).collect::<Vec<_>>()
            }));
        }
        let fifth = if kind == OutputKind::Delta { vec![7, 9] } else { vec![5, 7, 9] };
        assert_eq!(told, [None, Some(vec![vec![5]; 2]), None, None, Some(vec![fifth; 2])]);
        engine.scheduler.abort("x");
        engine.check_idle();
    }
}

#[test]
fn beams_hold_no_more_blocks_than_they_have_distinct_beginnings() {
    let mut engine = Engine::new(config(64, 4));
    engine.add("x", prompt(1, 9), SamplingParams { ignore_eos: true, ..width(6, 20) });
    while engine.step().is_some() {
        let Some(group) = engine.scheduler.groups().next() else { break };
        let mut blocks = HashSet::new();
        let mut beginnings = HashSet::new();
        for sequence in &group.sequences {
            let tokens = [&group.request.prompt[..], &sequence.history.output].concat();
            for (i, block) in sequence.table.blocks().iter().enumerate() {
                blocks.insert(*block);
                beginnings.insert(tokens[..tokens.len().min(4 * (i + 1))].to_vec());
            }
        }
        assert!(blocks.len() <= beginnings.len(), "{} blocks for {} beginnings", blocks.len(), beginnings.len());
        assert_eq!(engine.num_free(), 64 - blocks.len());
    }
    engine.check_idle();
}

#[test]
fn searches_equal_the_naive_ones() {
    let mut rng = Rng(40);
    for i in 0..400 {
        let params = SamplingParams {
            n: rng.range(1, 3) as i64,
            length_penalty: rng.pick(&[1.0, 0.0, -0.7, 1.8]),
            early_stopping: rng.pick(&[EarlyStopping::Heuristic, EarlyStopping::Always, EarlyStopping::Never]),
            stop_token_ids: rng.pick(&[vec![], vec![1], vec![1, 6]]),
            min_tokens: rng.range(0, 3) as i64,
            ..width(rng.range(3, 4) as i64, rng.range(3, 20) as i64)
        };
        let mut engine = Engine::new(config(128, 2));
        engine.add("x", prompt(i, 1 + i as usize % 7), params.clone());
        engine.drain(30);
        let asked = Asked {
            prompt: prompt(i, 1 + i as usize % 7),
            params,
            salt: None,
            priority: 0,
            eos: vec![0],
            max_model_len: 256,
            has_text: false,
        };
        let expected: Vec<_> =
            beam::search(&asked).into_iter().map(|found| (found.tokens, Some(found.cumulative))).collect();
        let found = engine.output("x").completions.iter();
        let found: Vec<_> = found.map(|beam| (beam.token_ids.clone(), beam.cumulative_logprob)).collect();
        assert_eq!(found, expected, "search {i}");
    }
}

#[test]
fn a_beam_group_never_runs_ahead() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 9), width(3, 8));
    engine.add("plain", prompt(2, 9), greedy(8));
    engine.launch();
    let plan = engine.launch().unwrap();
    assert_eq!(plan.header(pyvllm_core::plan::Header::NumSeqs), 1);
    engine.commit();
    let plan = engine.launch().unwrap();
    assert_eq!(plan.header(pyvllm_core::plan::Header::NumSeqs), 4);
    engine.commit();
    engine.commit();
    engine.drain(30);
    assert_eq!(engine.tokens("x"), solo(&prompt(1, 9), &width(3, 8)));
    assert_eq!(engine.tokens("plain"), solo(&prompt(2, 9), &greedy(8)));
}
