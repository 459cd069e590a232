//! Beam search: cases from the field, and transformers' algorithm written down naively.

use std::collections::{HashMap, HashSet};

use pyvllm_core::block_manager::BlockManager;
use pyvllm_core::error::Error;
use pyvllm_core::guided::{Constraint, StructuredOutputs};
use pyvllm_core::output::{FinishReason, LogprobTable};
use pyvllm_core::plan::Section;
use pyvllm_core::request::{EarlyStopping, OutputKind, SamplingParams};
use pyvllm_core::sequence::{Group, Sequence, State};

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
    let copies = plan.section(Section::Copies).as_chunks::<2>().0;
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

/// Tokens of each block of a group's sequences, and all before them, as far as they are computed: what must have a
/// block of its own.
fn beginnings(group: &Group, block_size: usize) -> HashSet<Vec<u32>> {
    let mut found = HashSet::new();
    for sequence in &group.sequences {
        let tokens = computed(group, sequence);
        let ends = (1..=tokens.len().div_ceil(block_size)).map(|i| tokens.len().min(i * block_size));
        found.extend(ends.map(|end| tokens[..end].to_vec()));
    }
    found
}

fn computed(group: &Group, sequence: &Sequence) -> Vec<u32> {
    let tokens = [&group.request.prompt[..], &sequence.history.output].concat();
    tokens[..sequence.num_computed_tokens].to_vec()
}

/// Copies that the next step of a beam group must make: of the beams that go on from the same tail, all but one.
fn copies_due(group: &Group, block_size: usize) -> usize {
    let mut tails: HashMap<Vec<u32>, usize> = HashMap::new();
    for sequence in &group.sequences {
        let tokens = computed(group, sequence);
        if !tokens.len().is_multiple_of(block_size) {
            *tails.entry(tokens).or_default() += 1;
        }
    }
    tails.values().map(|holders| holders - 1).sum()
}

#[test]
fn beams_hold_a_block_for_each_distinct_beginning_and_copy_only_shared_tails() {
    let mut rng = Rng(7);
    let mut num_copies = 0;
    for i in 0..60 {
        let (block_size, beam_width) = (rng.range(1, 5), rng.range(2, 8) as i64);
        let mut engine = Engine::new(config(256, block_size));
        let params = SamplingParams { ignore_eos: rng.percent(50), ..width(beam_width, rng.range(2, 24) as i64) };
        engine.add("x", prompt(i, rng.range(1, 12)), params);
        loop {
            let due = engine.scheduler.groups().map(|group| copies_due(group, block_size)).sum::<usize>();
            let Some(plan) = engine.launch() else { break };
            assert_eq!(plan.section(Section::Copies).len(), 2 * due);
            num_copies += due;
            check_blocks(&engine, block_size, 256);
            engine.commit();
            check_blocks(&engine, block_size, 256);
        }
        engine.check_idle();
    }
    assert!(num_copies > 500, "{num_copies} copies");
}

/// Whether each group has a block for each distinct beginning, and none besides.
fn check_blocks(engine: &Engine, block_size: usize, num_blocks: usize) {
    let mut num_used = [0, 0];
    for group in engine.scheduler.groups().filter(|group| group.state != State::Waiting) {
        let tables = group.sequences.iter().map(|sequence| &sequence.table);
        let distinct = BlockManager::distinct(tables);
        assert_eq!(distinct, beginnings(group, block_size).len());
        num_used[usize::from(group.state == State::Swapped)] += distinct;
    }
    let stats = engine.scheduler.stats();
    let free = [stats.num_free_gpu_blocks, stats.num_free_cpu_blocks];
    assert_eq!(free, [num_blocks - num_used[0], stats.num_cpu_blocks - num_used[1]]);
}

/// Three searches, too large together for a small pool, under the names of their widths.
fn searches() -> impl Iterator<Item = (String, Vec<u32>, SamplingParams)> {
    let long = |beams: u32| SamplingParams { ignore_eos: true, ..width(i64::from(beams), 16) };
    (2..5).map(move |beams| (beams.to_string(), prompt(beams, 5), long(beams)))
}

fn add_searches(engine: &mut Engine) {
    searches().for_each(|(name, prompt, params)| engine.add(&name, prompt, params));
}

fn check_searches(engine: &Engine) {
    searches().for_each(|(name, prompt, params)| assert_eq!(engine.tokens(&name), solo(&prompt, &params)));
}

#[test]
fn groups_that_are_swapped_keep_what_they_share() {
    let mut config = config(34, 2);
    config.num_cpu_blocks = 64;
    config.enable_prefix_caching = false;
    let mut engine = Engine::new(config);
    add_searches(&mut engine);
    while engine.launch().is_some() {
        check_blocks(&engine, 2, 34);
        engine.commit();
        check_blocks(&engine, 2, 34);
    }
    engine.check_idle();
    let counters = engine.scheduler.stats().counters;
    assert_eq!((counters.num_swap_outs > 0, counters.num_recomputations), (true, 0));
    check_searches(&engine);
}

#[test]
fn groups_that_are_recomputed_share_what_they_have_in_common() {
    let mut config = config(34, 2);
    config.enable_prefix_caching = false;
    let mut engine = Engine::new(config);
    add_searches(&mut engine);
    let mut num_saved = 0;
    while engine.step().is_some() {
        let preempted = |group: &&Group| group.num_preemptions > 0 && group.forked && group.state == State::Running;
        for group in engine.scheduler.groups().filter(preempted) {
            let (shared, prompt) = (group.shared_len() / 2, group.prompt_len() / 2);
            let own = |sequence: &Sequence| sequence.num_computed_tokens.div_ceil(2) - shared;
            let distinct = BlockManager::distinct(group.sequences.iter().map(|sequence| &sequence.table));
            assert!(distinct <= shared + group.sequences.iter().map(own).sum::<usize>());
            num_saved += (shared - prompt) * (group.sequences.len() - 1);
        }
    }
    engine.check_idle();
    assert!(num_saved > 0);
    assert!(engine.scheduler.stats().counters.num_recomputations > 0);
    check_searches(&engine);
}

#[test]
fn what_is_told_of_a_candidate_may_differ_from_what_ranks_it() {
    for is_given in [false, true] {
        let mut engine = Engine::new(config(32, 4));
        engine.add("x", prompt(1, 5), SamplingParams { logprobs: Some(0), ..width(2, 1) });
        engine.launch().unwrap();
        let results = engine.pending.back_mut().unwrap();
        assert_eq!(results.num_candidates, 4);
        (results.token_ids, results.logprobs) = (vec![5, 6, 7, 8], vec![-0.5, -0.5, -1.0, -2.0]);
        results.candidate_table = is_given.then(|| LogprobTable {
            width: 1,
            token_ids: vec![5, 6, 7, 8],
            logprobs: vec![-3.5, -2.5, -1.5, -0.5],
            ranks: vec![14, 13, 12, 11],
        });
        engine.commit();
        let found = engine.output("x").completions.iter().map(|completion| {
            let table = completion.logprobs.as_ref().unwrap();
            (completion.cumulative_logprob, table.logprobs.clone(), table.ranks.clone())
        });
        // Without a table, candidates that are as likely have the same rank.
        let told = if is_given { [(-3.5, 14), (-2.5, 13)] } else { [(-0.5, 1), (-0.5, 1)] };
        let told = told.map(|(logprob, rank)| (Some(-0.5), vec![logprob], vec![rank]));
        assert_eq!(found.collect::<Vec<_>>(), told);
    }
}

#[test]
fn a_search_without_any_token_that_may_follow_is_an_error() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 5), SamplingParams { output_kind: OutputKind::Delta, ..width(2, 8) });
    engine.step_with_candidates(&[&[(5, -0.1), (6, -9.0)]]);
    engine.step_with_candidates(&[&[(7, -0.1), (8, -9.0)], &[]]);
    engine.step_with_candidates(&[&[], &[]]);
    let failed = engine.scheduler.take_failed();
    assert_eq!(failed.len(), 1);
    let Some(Error::Parameter { parameter, message }) = &failed[0].error else { panic!("{failed:?}") };
    assert_eq!(parameter, "use_beam_search");
    assert!(message.contains("must leave a token for a beam to go on with"), "{message}");
    // What was told stays as it is.
    let ends: Vec<_> =
        failed[0].completions.iter().map(|beam| (beam.index, beam.token_ids.len(), beam.finish_reason)).collect();
    assert_eq!(ends, [(0, 0, Some(FinishReason::Error)), (1, 0, Some(FinishReason::Error))]);
    engine.check_idle();
}

#[test]
fn a_token_that_no_grammar_takes_ends_the_search() {
    let mut engine = Engine::with_text(config(32, 4));
    let form = StructuredOutputs {
        constraint: Constraint::Choice(vec!["hi".to_owned()]),
        disable_any_whitespace: false,
        disable_additional_properties: false,
        whitespace_pattern: None,
    };
    engine.add("x", prompt(1, 5), SamplingParams { structured_outputs: Some(form), ..width(2, 8) });
    // None while the grammar is compiled; then two letters that "hi" does not begin with.
    while engine.step_with_candidates(&[&[(9, -0.1), (10, -0.2)]]).is_none() {}
    let failed = engine.scheduler.take_failed();
    let Some(Error::Parameter { parameter, .. }) = &failed[0].error else { panic!("{failed:?}") };
    assert_eq!(parameter, "structured_outputs");
    engine.check_idle();
}

#[test]
fn results_that_were_told_of_and_cannot_go_on_end_as_aborted() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 5), SamplingParams { output_kind: OutputKind::Cumulative, ..width(2, 8) });
    let far = -90.0;
    engine.step_with_candidates(&[&[(5, -0.1), (6, far)]]);
    engine.step_with_candidates(&[&[(7, -0.1), (8, -0.2)], &[]]);
    assert_eq!(engine.outputs.pop().unwrap().completions.len(), 2); // both results begin with 5
    engine.step_with_candidates(&[&[(0, -0.1)], &[]]);
    let ends =
        engine.output("x").completions.iter().map(|beam| (beam.index, beam.token_ids.clone(), beam.finish_reason));
    let expected = [(0, vec![5, 7, 0], Some(FinishReason::Stop)), (1, vec![5], Some(FinishReason::Abort))];
    assert_eq!(ends.collect::<Vec<_>>(), expected);
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
