//! Preemption: cases from the field.

use pyvllm_core::Config;
use pyvllm_core::block_manager::BlockTable;
use pyvllm_core::plan::{Header, ROW_PARAMS, RowParam, Section, StepPlan};
use pyvllm_core::request::{OutputKind, SamplingParams};
use pyvllm_core::scheduler::PreemptionMode;
use pyvllm_core::sequence::State;

use crate::common::{Engine, config, greedy, prompt, solo};

/// Five blocks of 4 tokens: two sequences of 8 tokens fit, with a block to spare; two of 9 do not.
fn tight() -> Config {
    let mut config = config(5, 4);
    config.max_model_len = 14;
    config
}

/// "old" and "young" run until the young one is preempted; `params` are the young one's.
fn preempted(config: Config, params: SamplingParams) -> Engine {
    let mut engine = Engine::new(config);
    engine.add("old", prompt(1, 5), greedy(8));
    engine.add("young", prompt(2, 5), params);
    while engine.group("young").num_preemptions == 0 {
        engine.step().unwrap();
    }
    engine
}

/// The plan that brings the young one back, or a step of it.
fn resume(engine: &mut Engine) -> StepPlan {
    engine.scheduler.abort("old");
    engine.step().unwrap()
}

#[test]
fn b031_text_is_complete_after_preemption() {
    for count in 2..=4 {
        for ahead in [false, true] {
            let mut config = config(7, 16);
            config.max_model_len = 80;
            let mut engine = Engine::new(config);
            let params = SamplingParams { output_kind: OutputKind::Delta, ..greedy(35) };
            for i in 0..count {
                engine.add(&i.to_string(), prompt(i, 34), params.clone());
            }
            while engine.scheduler.has_unfinished() {
                let launched = engine.launch().is_some();
                if !engine.pending.is_empty() && (!launched || !ahead || engine.pending.len() == 2) {
                    engine.commit();
                }
            }
            let preemptions: u32 = (0..count).map(|i| engine.output(&i.to_string()).num_preemptions).sum();
            assert!(preemptions > 0);
            for i in 0..count {
                let mine = engine.outputs.iter().filter(|output| *output.request_id == i.to_string());
                let said: Vec<u32> = mine.flat_map(|output| output.completions[0].token_ids.clone()).collect();
                assert_eq!(said, solo(&prompt(i, 34), &params)[0], "request {i} of {count}");
            }
        }
    }
}

#[test]
fn b033_what_is_computed_follows_from_the_tokens_not_from_a_phase() {
    let mut config = tight();
    config.enable_prefix_caching = false;
    let mut engine = preempted(config, greedy(8));
    let said = engine.group("young").sequences[0].history.output.clone();
    assert_eq!(said.len(), 4);
    assert_eq!(engine.group("young").state, State::Waiting);
    let plan = resume(&mut engine);
    // Prompt and output are computed together, and the fifth token is drawn.
    let expected: Vec<i32> = prompt(2, 5).iter().chain(&said).map(|&token| token as i32).collect();
    assert_eq!(plan.section(Section::TokenIds), expected);
    assert_eq!((plan.header(Header::NumRows), plan.header(Header::NumDecodes)), (1, 0));
    assert_eq!(plan.section(Section::RowToken), [8]);
    assert_eq!(engine.group("young").sequences[0].history.output.len(), 5);
    engine.drain(10);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 5), &greedy(8)));
}

#[test]
fn b034_generated_tokens_stay_generated_after_recomputation() {
    let params = SamplingParams { frequency_penalty: 2.0, min_tokens: 6, ignore_eos: false, ..greedy(8) };
    let mut engine = preempted(tight(), params.clone());
    let said = engine.group("young").sequences[0].history.output.clone();
    assert_eq!(said.len(), 4);
    let plan = resume(&mut engine);
    let mut counted: Vec<u32> = Vec::new();
    for &[id, count] in plan.section(Section::PenaltyTokens).as_chunks::<2>().0 {
        counted.extend((0..count).map(|_| id as u32));
    }
    counted.sort_unstable();
    let mut generated = said;
    generated.sort_unstable();
    assert_eq!(counted, generated);
    // End of sequence is still banned for the fifth and the sixth token, then no more.
    assert_eq!(plan.section(Section::Banned), [0, 0]);
    assert_eq!(engine.step().unwrap().section(Section::Banned), [0, 0]);
    assert!(engine.step().is_none_or(|plan| plan.section(Section::Banned).is_empty()));
    engine.drain(10);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 5), &params));
    assert!(engine.tokens("young")[0].len() >= 6);
}

#[test]
fn b035_seeded_draws_do_not_restart() {
    let params = SamplingParams { temperature: 1.0, seed: Some(7), ..greedy(8) };
    let key = |plan: &StepPlan, row: usize| {
        let params = &plan.section(Section::RowParams)[row * ROW_PARAMS..];
        [params[RowParam::NoiseKey0 as usize], params[RowParam::NoiseKey1 as usize]]
    };
    let mut alone = Engine::new(config(8, 4));
    alone.add("x", prompt(2, 5), params.clone());
    let keys: Vec<_> = (0..8).map(|_| key(&alone.step().unwrap(), 0)).collect();

    let mut engine = preempted(tight(), params.clone());
    let said = engine.group("young").sequences[0].history.output.len();
    assert_eq!(key(&resume(&mut engine), 0), keys[said]);
    assert_eq!(key(&engine.step().unwrap(), 0), keys[said + 1]);
    engine.drain(10);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 5), &params));
    assert_eq!(engine.tokens("young"), alone.tokens("x"));
}

#[test]
fn b036_all_finish_in_order_with_few_preemptions() {
    for mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let mut config = config(6, 4);
        config.max_model_len = 16;
        config.num_cpu_blocks = 12;
        config.preemption_mode = mode;
        let mut engine = Engine::new(config);
        for i in 0..5 {
            engine.add(&i.to_string(), prompt(i, 5), greedy(11));
        }
        engine.drain(200);
        let finished: Vec<_> = engine.outputs.iter().map(|output| output.request_id.to_string()).collect();
        assert_eq!(finished, ["0", "1", "2", "3", "4"]);
        let preemptions: Vec<u32> = engine.outputs.iter().map(|output| output.num_preemptions).collect();
        assert_eq!(preemptions[0], 0, "the oldest is never preempted");
        assert!(preemptions.iter().sum::<u32>() > 0 && preemptions.iter().all(|&count| count <= 3), "{preemptions:?}");
    }
}

#[test]
fn b036_a_preempted_request_resumes_before_newer_ones() {
    let mut engine = preempted(tight(), greedy(8));
    engine.add("newer", prompt(3, 1), greedy(1));
    engine.step();
    assert_eq!(engine.group("newer").state, State::Waiting);
    engine.drain(30);
    let finished: Vec<_> = engine.outputs.iter().map(|output| output.request_id.to_string()).collect();
    assert_eq!(finished[..1], ["old"]);
    assert!(engine.output("newer").timing.scheduled > engine.output("young").timing.scheduled);
}

#[test]
fn a_lone_sequence_is_recomputed_and_a_group_is_swapped() {
    let mut swapping = tight();
    swapping.num_cpu_blocks = 8;
    let engine = preempted(swapping.clone(), greedy(8));
    assert_eq!(engine.group("young").state, State::Waiting);

    // Two children share the first block: three blocks are moved, each once.
    swapping.num_gpu_blocks = 7;
    let mut engine = Engine::new(swapping);
    let params = SamplingParams { n: 2, temperature: 1.0, seed: Some(3), ..greedy(7) };
    engine.add("old", prompt(1, 5), greedy(9));
    engine.add("young", prompt(2, 7), params.clone());
    let mut moved = 0;
    while engine.group("young").num_preemptions == 0 {
        let plan = engine.step().unwrap();
        moved = plan.section(Section::SwapOut).len() / 2;
    }
    assert_eq!(engine.group("young").state, State::Swapped);
    assert_eq!(engine.scheduler.stats().num_swapped, 2);
    assert_eq!(moved, 8 - engine.scheduler.stats().num_free_cpu_blocks);
    let tables = engine.tables("young");
    assert_eq!(tables[0][0], tables[1][0]);
    engine.drain(50);
    assert_eq!(engine.scheduler.stats().counters.num_swap_outs, 1);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 7), &params));
}

#[test]
fn a_group_is_recomputed_when_the_host_is_full() {
    let mut config = tight();
    config.num_gpu_blocks = 7;
    let mut engine = Engine::new(config);
    let params = SamplingParams { n: 2, temperature: 1.0, seed: Some(3), ..greedy(7) };
    engine.add("old", prompt(1, 5), greedy(9));
    engine.add("young", prompt(2, 7), params.clone());
    engine.drain(50);
    assert!(engine.output("young").num_preemptions > 0);
    assert_eq!(engine.scheduler.stats().counters.num_swap_outs, 0);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 7), &params));
}

#[test]
fn swapped_requests_resume_before_waiting_ones() {
    let mut config = tight();
    config.num_cpu_blocks = 8;
    config.preemption_mode = PreemptionMode::Swap;
    let mut engine = preempted(config, greedy(8));
    engine.add("newer", prompt(3, 1), greedy(1));
    while engine.group("young").state == State::Swapped {
        assert_eq!(engine.group("newer").state, State::Waiting);
        engine.step().unwrap();
    }
    engine.drain(30);
    assert_eq!(engine.tokens("young"), solo(&prompt(2, 5), &greedy(8)));
}

#[test]
fn what_comes_back_from_the_host_can_be_found_again() {
    let mut config = tight();
    config.num_cpu_blocks = 8;
    config.preemption_mode = PreemptionMode::Swap;
    let mut engine = preempted(config, greedy(8));
    // The old one takes all device blocks, so that what the young one left there is forgotten.
    engine.scheduler.abort("old");
    let mut taken = BlockTable::default();
    engine.scheduler.block_manager().grow(&mut taken, 5);
    engine.scheduler.block_manager().release(taken);
    assert_eq!(engine.scheduler.stats().num_cached_gpu_blocks, 0);
    engine.drain(30);
    engine.add("again", prompt(2, 5), greedy(1));
    engine.drain(5);
    assert_eq!(engine.output("again").num_cached_tokens, 4);
}

#[test]
fn an_aborted_request_on_the_host_gives_its_blocks_back() {
    let mut config = tight();
    config.num_cpu_blocks = 8;
    config.preemption_mode = PreemptionMode::Swap;
    let mut engine = preempted(config, greedy(8));
    assert_eq!(engine.group("young").state, State::Swapped);
    assert!(engine.scheduler.abort("young"));
    assert_eq!(engine.scheduler.stats().num_free_cpu_blocks, 8);
    engine.drain(20);
}
