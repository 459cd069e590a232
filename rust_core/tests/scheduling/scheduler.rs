//! Admission, budgets, abort: cases from the field.

use pyvllm_core::error::Error;
use pyvllm_core::output::{FinishReason, StopReason};
use pyvllm_core::plan::Header;
use pyvllm_core::request::SamplingParams;
use pyvllm_core::scheduler::{Policy, RequestOptions};
use pyvllm_core::{Config, Scheduler};

use crate::common::{Engine, config, greedy, prompt, solo};

fn refusal(engine: &mut Engine, prompt: Vec<u32>, params: SamplingParams) -> (String, String) {
    let free = engine.num_free();
    let refused = engine.scheduler.add_request("refused", prompt, params, RequestOptions::default());
    assert_eq!(engine.num_free(), free);
    match refused {
        Err(Error::Parameter { parameter, message }) => (parameter, message),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn b003_the_limit_counts_usable_blocks() {
    // No block is reserved: all four are usable, so 16 tokens.
    let mut engine = Engine::new(config(4, 4));
    let (parameter, message) = refusal(&mut engine, prompt(1, 16), greedy(1));
    assert_eq!(parameter, "prompt_token_ids");
    assert!(message.contains("16") && message.contains("15"), "{message}");
    for len in [12, 13, 15] {
        let id = len.to_string();
        engine.add(&id, prompt(1, len), greedy(16));
        engine.drain(10);
        assert_eq!(engine.tokens(&id)[0].len(), 16 - len);
        assert_eq!(engine.output(&id).completions[0].finish_reason, Some(FinishReason::Length));
    }
}

#[test]
fn b022_a_request_larger_than_the_pool_is_refused_with_the_numbers() {
    let mut engine = Engine::new(config(50, 16));
    engine.add("before", prompt(1, 10), greedy(5));
    for _ in 0..5 {
        let (parameter, message) = refusal(&mut engine, prompt(2, 1_002), greedy(5));
        assert_eq!(parameter, "prompt_token_ids");
        assert!(message.contains("1002") && message.contains("800"), "{message}");
    }
    // Each of the 8 sequences could reach 400 tokens: 8 * (25 - 12) + 12 blocks.
    let wide = SamplingParams { n: 8, ..greedy(201) };
    let (parameter, message) = refusal(&mut engine, prompt(2, 200), wide);
    assert_eq!(parameter, "n");
    assert!(message.contains("116") && message.contains("50"), "{message}");
    engine.add("after", prompt(3, 10), greedy(5));
    engine.drain(20);
    assert_eq!(engine.tokens("before"), solo(&prompt(1, 10), &greedy(5)));
    assert_eq!(engine.tokens("after"), solo(&prompt(3, 10), &greedy(5)));
}

#[test]
fn b022_output_ends_with_length_at_the_models_length() {
    let mut engine = Engine::new(config(4, 4));
    engine.add("x", prompt(1, 10), SamplingParams { max_tokens: None, ..greedy(1) });
    engine.drain(10);
    let completion = &engine.output("x").completions[0];
    assert_eq!((completion.token_ids.len(), completion.finish_reason), (6, Some(FinishReason::Length)));
}

fn bad_config(change: impl Fn(&mut Config)) -> String {
    let mut config = config(8, 16);
    change(&mut config);
    match Scheduler::new(config, None) {
        Err(Error::Parameter { parameter, message }) => {
            assert!(message.contains(&parameter), "{message}");
            message
        }
        other => panic!("not refused: {:?}", other.map(|_| ())),
    }
}

#[test]
fn b023_a_pool_smaller_than_one_sequence_is_refused_at_start() {
    let message = bad_config(|config| config.max_model_len = 4_096);
    for number in ["8", "4096", "256", "128"] {
        assert!(message.contains(number), "{message}");
    }
}

#[test]
fn b024_a_prompt_longer_than_the_budget_is_computed_in_chunks() {
    let mut wide = config(20, 4);
    wide.max_num_batched_tokens = 16;
    let mut engine = Engine::new(wide);
    engine.add("x", prompt(1, 40), greedy(5));
    let lens: Vec<i32> = (0..3).map(|_| engine.step().unwrap().header(Header::NumTokens)).collect();
    assert_eq!(lens, [16, 16, 8]);
    engine.drain(10);
    assert_eq!(engine.tokens("x"), solo(&prompt(1, 40), &greedy(5)));

    let message = bad_config(|config| {
        config.max_num_batched_tokens = 16;
        config.enable_chunked_prefill = false;
    });
    assert!(message.contains("16") && message.contains("128"), "{message}");
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    bad_config(|config| config.max_num_seqs = 0);
    bad_config(|config| config.max_num_batched_tokens = 0);
    bad_config(|config| config.max_model_len = 0);
    bad_config(|config| config.vocab_size = 0);
    bad_config(|config| config.block_size = 0);
    bad_config(|config| config.block_size = 129);
    bad_config(|config| config.num_gpu_blocks = 0);
    bad_config(|config| config.num_gpu_blocks = 1 << 27); // slots are counted in 32 bits
}

#[test]
fn b026_abort_between_schedule_and_commit() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("a", prompt(1, 5), greedy(4));
    engine.add("b", prompt(2, 5), greedy(4));
    engine.launch().unwrap();
    assert!(engine.scheduler.abort("a"));
    assert_eq!(engine.num_free(), 14);
    engine.commit();
    assert_eq!(engine.group("b").sequences[0].history.output.len(), 1);
    assert_eq!(engine.num_free(), 14);
    engine.drain(10);
    assert_eq!(engine.tokens("b"), solo(&prompt(2, 5), &greedy(4)));
    assert_eq!(engine.outputs.len(), 1);
    assert!(!engine.scheduler.abort("a"));
}

#[test]
fn b026_a_new_request_in_the_slot_of_an_aborted_one_takes_no_foreign_tokens() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("a", prompt(1, 5), greedy(4));
    engine.launch().unwrap();
    engine.scheduler.abort("a");
    engine.add("a", prompt(2, 5), greedy(4));
    engine.launch().unwrap();
    engine.commit();
    assert!(engine.group("a").sequences[0].history.output.is_empty());
    engine.commit();
    engine.drain(10);
    assert_eq!(engine.tokens("a"), solo(&prompt(2, 5), &greedy(4)));
}

#[test]
fn b026_prompt_logprobs_of_an_aborted_request_go_to_nobody_else() {
    let mut engine = Engine::new(config(16, 4));
    let params = SamplingParams { prompt_logprobs: Some(0), ..greedy(2) };
    engine.add("a", prompt(1, 5), params.clone());
    engine.add("b", prompt(2, 6), params);
    engine.launch().unwrap();
    engine.scheduler.abort("a");
    engine.commit();
    engine.drain(5);
    let table = engine.output("b").prompt_logprobs.as_ref().unwrap();
    let ids: Vec<u32> = table.token_ids.iter().map(|&id| id as u32).collect();
    assert_eq!(ids, prompt(2, 6)[1..]);
}

#[test]
fn b027_a_request_that_fits_is_scheduled_in_the_next_step() {
    for finish in [true, false] {
        for num_cpu_blocks in [0, 8] {
            let mut config = config(8, 4);
            config.num_cpu_blocks = num_cpu_blocks;
            let mut engine = Engine::new(config);
            for round in 0..50 {
                let id = |name: &str| format!("{name}{round}");
                engine.add(&id("big"), prompt(1, 28), greedy(if finish { 2 } else { 4 }));
                engine.add(&id("waits"), prompt(round, 26), greedy(1));
                engine.step();
                engine.step();
                assert_eq!(engine.scheduler.stats().num_waiting, 1);
                if !finish {
                    engine.scheduler.abort(&id("big"));
                }
                assert!(engine.step().is_some());
                assert_eq!(engine.tokens(&id("waits")), solo(&prompt(round, 26), &greedy(1)));
                engine.check_idle();
            }
        }
    }
}

#[test]
fn b029_abort_by_exact_id_only() {
    for (ids, aborted) in [(["a", "ab", "b"], "a"), (["0_1", "1_1", "1"], "1"), (["cmpl-1", "cmpl-10", "x"], "cmpl-1")]
    {
        let mut engine = Engine::new(config(32, 4));
        ids.iter().for_each(|id| engine.add(id, prompt(1, 5), greedy(4)));
        engine.step();
        assert!(engine.scheduler.abort(aborted));
        assert!(!engine.scheduler.abort(aborted));
        assert!(!engine.scheduler.abort(""));
        engine.drain(10);
        assert_eq!(engine.outputs.len(), 2);
        ids.iter().filter(|id| **id != aborted).for_each(|id| assert_eq!(engine.tokens(id)[0].len(), 4));
    }
}

#[test]
fn s023_a_short_id_does_not_abort_longer_ones() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("a", prompt(1, 5), greedy(4));
    engine.add("ab...", prompt(2, 5), greedy(4));
    engine.step();
    engine.scheduler.abort("a");
    engine.drain(10);
    assert_eq!(engine.tokens("ab..."), solo(&prompt(2, 5), &greedy(4)));
}

#[test]
fn an_id_in_use_is_refused_and_free_again_afterwards() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("refused", prompt(1, 5), greedy(2));
    let (parameter, message) = refusal(&mut engine, prompt(1, 5), greedy(2));
    assert_eq!(parameter, "request_id");
    assert!(message.contains("refused"), "{message}");
    engine.drain(10);
    engine.add("refused", prompt(1, 5), greedy(2));
    engine.scheduler.abort("refused");
    engine.check_idle();
}

#[test]
fn prompts_that_cannot_be_computed_are_refused() {
    let mut engine = Engine::new(config(8, 4));
    let (parameter, _) = refusal(&mut engine, Vec::new(), greedy(1));
    assert_eq!(parameter, "prompt_token_ids");
    let (parameter, message) = refusal(&mut engine, vec![1, 2, 20], greedy(1));
    assert_eq!(parameter, "prompt_token_ids");
    assert!(message.contains("prompt_token_ids[2]") && message.contains("19") && message.contains("20"), "{message}");
    let (parameter, _) = refusal(&mut engine, prompt(1, 30), SamplingParams { min_tokens: 3, ..greedy(5) });
    assert_eq!(parameter, "min_tokens");
    let wide = SamplingParams { n: 65, ..greedy(1) };
    assert_eq!(refusal(&mut engine, prompt(1, 3), wide).0, "n");
}

#[test]
fn b065_min_tokens_must_leave_a_token_to_generate() {
    let mut engine = Engine::new(config(8, 4));
    let only_eos = SamplingParams {
        min_tokens: 1,
        ignore_eos: false,
        allowed_token_ids: Some(vec![0, 7]),
        stop_token_ids: vec![7],
        ..greedy(5)
    };
    let (parameter, message) = refusal(&mut engine, prompt(1, 3), only_eos.clone());
    assert!(parameter == "min_tokens" && message.contains("got 1"), "{message}");
    let all = (1..20).collect();
    let nothing_left = SamplingParams { stop_token_ids: all, allowed_token_ids: None, ..only_eos.clone() };
    assert_eq!(refusal(&mut engine, prompt(1, 3), nothing_left).0, "min_tokens");
    let one_left = SamplingParams { stop_token_ids: Vec::new(), ..only_eos };
    engine.add("x", prompt(1, 3), one_left);
    engine.drain(10);
    assert_eq!(engine.tokens("x")[0][0], 7);
}

#[test]
fn budget_and_sequence_limits_hold_in_every_step() {
    let mut config = config(64, 4);
    config.max_num_seqs = 3;
    config.max_num_batched_tokens = 7;
    let mut engine = Engine::new(config);
    for i in 0..8 {
        engine.add(&i.to_string(), prompt(i, 9), greedy(6));
    }
    while let Some(plan) = engine.step() {
        assert!(plan.header(Header::NumTokens) <= 7);
        assert!(engine.scheduler.stats().num_running <= 3);
    }
    for i in 0..8 {
        assert_eq!(engine.tokens(&i.to_string()), solo(&prompt(i, 9), &greedy(6)));
    }
}

#[test]
fn priority_goes_before_arrival() {
    for (policy, order) in [(Policy::Fcfs, ["low", "high", "mid"]), (Policy::Priority, ["high", "mid", "low"])] {
        let mut config = config(16, 4);
        config.max_num_seqs = 1;
        config.policy = policy;
        let mut engine = Engine::new(config);
        for (id, priority) in [("low", 5), ("high", -1), ("mid", 0)] {
            let options = RequestOptions { priority, ..RequestOptions::default() };
            engine.scheduler.add_request(id, prompt(1, 5), greedy(3), options).unwrap();
        }
        engine.drain(20);
        let finished: Vec<_> = engine.outputs.iter().map(|output| output.request_id.to_string()).collect();
        assert_eq!(finished, order);
    }
}

#[test]
fn min_tokens_holds_back_every_kind_of_stop() {
    let mut engine = Engine::new(config(16, 4));
    let params = SamplingParams { min_tokens: 3, ignore_eos: false, stop_token_ids: vec![7], ..greedy(8) };
    engine.add("eos", prompt(1, 5), params.clone());
    engine.add("stop id", prompt(2, 5), params);
    for _ in 0..3 {
        engine.step_with(|row| if row == 0 { 0 } else { 7 });
        assert!(engine.outputs.is_empty());
    }
    engine.step_with(|row| if row == 0 { 0 } else { 7 });
    assert_eq!((engine.tokens("eos"), engine.tokens("stop id")), (vec![vec![0; 4]], vec![vec![7; 4]]));
}

#[test]
fn b084_stop_strings_are_found_in_text_behind_min_tokens_only() {
    let mut engine = Engine::with_text(config(16, 4));
    let params = SamplingParams { min_tokens: 3, stop: vec!["ef".to_owned()], ..greedy(8) };
    engine.add("x", prompt(1, 5), params);
    // "efe" is made before, and its last letter is no beginning of a stop string behind it.
    for token in [4, 5, 4, 5, 4] {
        engine.step_with(|_| token);
        assert!(engine.outputs.is_empty());
    }
    engine.step_with(|_| 5);
    let completion = &engine.output("x").completions[0];
    assert_eq!((&*completion.text, completion.token_ids.len()), ("efef", 6));
    assert_eq!(completion.stop_reason, Some(StopReason::Text("ef".to_owned())));
}
