//! The layout of a plan, section by section.

use pyvllm_core::plan::{
    HEADER_LEN, Header, MAGIC, NUM_SCALARS, NUM_SECTIONS, ROW_PARAMS, RowParam, SECTION_ALIGNMENT, Section, StepPlan,
    flags,
};
use pyvllm_core::request::SamplingParams;

use crate::common::model::{VOCAB, noise};
use crate::common::{Engine, config, greedy, prompt};

fn float(value: f32) -> i32 {
    value.to_bits() as i32
}

fn row_params(plan: &StepPlan) -> Vec<[i32; ROW_PARAMS]> {
    plan.section(Section::RowParams).as_chunks().0.to_vec()
}

/// The first step of one request with a prompt of 5 tokens.
fn first_plan(params: SamplingParams) -> StepPlan {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 5), params);
    engine.launch().unwrap()
}

#[test]
fn sections_follow_the_header_each_at_the_next_aligned_word() {
    let plan = first_plan(greedy(2));
    assert_eq!(plan.buffer[0], MAGIC);
    let mut end = HEADER_LEN;
    for section in 0..NUM_SECTIONS {
        let start = end.next_multiple_of(SECTION_ALIGNMENT);
        assert_eq!(plan.buffer[NUM_SCALARS + 2 * section] as usize, start, "section {section}");
        end = start + plan.buffer[NUM_SCALARS + 2 * section + 1] as usize;
    }
    assert_eq!(end, plan.buffer.len());
}

#[test]
fn a_prompt_and_a_decode() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("decode", prompt(1, 3), greedy(4));
    engine.step_with(|_| 17);
    engine.add("prompt", prompt(2, 6), greedy(4));
    let plan = engine.launch().unwrap();
    let scalars = [Header::NumTokens, Header::NumSeqs, Header::NumDecodes, Header::NumRows, Header::GraphSize];
    assert_eq!(scalars.map(|scalar| plan.header(scalar)), [7, 2, 1, 2, 0]);
    assert_eq!([Header::MaxQueryLen, Header::MaxSeqLen].map(|scalar| plan.header(scalar)), [6, 6]);
    assert_eq!([Header::NumCandidates, Header::MaxLogprobs, Header::Flags].map(|s| plan.header(s)), [1, -1, 0]);
    let prompt: Vec<i32> = prompt(2, 6).iter().map(|&id| id as i32).collect();
    assert_eq!(plan.section(Section::TokenIds), [&[17][..], &prompt].concat());
    assert_eq!(plan.section(Section::Positions), [3, 0, 1, 2, 3, 4, 5]);
    assert_eq!(plan.section(Section::QueryStartLoc), [0, 1, 7]);
    assert_eq!(plan.section(Section::SeqLens), [4, 6]);
    assert_eq!(plan.section(Section::RowToken), [0, 6]);
    assert_eq!(plan.section(Section::BlockTableOffsets), [0, 1, 3]);
    let [decode, new] = ["decode", "prompt"].map(|id| engine.tables(id)[0].clone());
    let ids: Vec<i32> = decode.iter().chain(&new).map(|&block| block as i32).collect();
    assert_eq!(plan.section(Section::BlockTableIds), ids);
    let slots: Vec<i32> = (0..6).map(|position| ids[1 + position / 4] * 4 + position as i32 % 4).collect();
    assert_eq!(plan.section(Section::SlotMapping), [&[ids[0] * 4 + 3][..], &slots].concat());
    for section in [Section::SwapOut, Section::SwapIn, Section::Copies, Section::PenaltyRows, Section::PenaltyTokens] {
        assert!(plan.section(section).is_empty());
    }
}

#[test]
fn decodes_come_first_whatever_the_order_of_arrival() {
    let mut wide = config(64, 4);
    wide.max_num_batched_tokens = 20;
    let mut engine = Engine::new(wide);
    engine.add("long", prompt(1, 50), greedy(4));
    engine.add("short", prompt(2, 1), greedy(4));
    engine.add("shorter", prompt(3, 1), greedy(4));
    engine.step();
    engine.step();
    let plan = engine.step().unwrap();
    assert_eq!((plan.header(Header::NumSeqs), plan.header(Header::NumDecodes)), (3, 2));
    assert_eq!(plan.section(Section::QueryStartLoc), [0, 1, 2, 12]);
}

#[test]
fn decode_steps_are_padded_to_a_graph_size() {
    let mut config = config(64, 4);
    config.graph_sizes = vec![8, 2, 4];
    let mut engine = Engine::new(config);
    for i in 0..3 {
        engine.add(&i.to_string(), prompt(i, 5), SamplingParams { temperature: 0.5, seed: Some(1), ..greedy(4) });
    }
    let first = engine.step().unwrap();
    assert_eq!(first.header(Header::GraphSize), 0, "prompts have no graph");
    let plan = engine.launch().unwrap();
    let scalars = [Header::NumTokens, Header::NumSeqs, Header::NumDecodes, Header::NumRows, Header::GraphSize];
    assert_eq!(scalars.map(|scalar| plan.header(scalar)), [3, 3, 3, 3, 4]);
    assert_eq!(plan.section(Section::TokenIds)[3], 0);
    assert_eq!(plan.section(Section::SlotMapping)[3], -1);
    assert!(plan.section(Section::SlotMapping)[..3].iter().all(|&slot| slot >= 0));
    assert_eq!(plan.section(Section::QueryStartLoc), [0, 1, 2, 3, 4]);
    assert_eq!(plan.section(Section::SeqLens), [6, 6, 6, 0]);
    assert_eq!(plan.section(Section::RowToken), [0, 1, 2, 3]);
    let offsets = plan.section(Section::BlockTableOffsets);
    assert_eq!((offsets.len(), offsets[3]), (5, offsets[4]));
    let padding = row_params(&plan)[3];
    assert_eq!(padding[RowParam::Temperature as usize], 0);
    assert_eq!(padding[RowParam::TopP as usize], float(1.0));
    assert_eq!(padding[RowParam::RepetitionPenalty as usize], float(1.0));
    assert_eq!(padding[RowParam::NumLogprobs as usize], -1);
    assert_eq!(padding[RowParam::NumCandidates as usize], 1);
}

#[test]
fn steps_without_a_fitting_graph_are_not_padded() {
    let mut config = config(64, 4);
    config.graph_sizes = vec![1, 2];
    let mut engine = Engine::new(config);
    for i in 0..3 {
        engine.add(&i.to_string(), prompt(i, 1), SamplingParams { n: if i == 0 { 2 } else { 1 }, ..greedy(4) });
    }
    assert_eq!(engine.step().unwrap().header(Header::GraphSize), 0, "two rows of one token");
    let plan = engine.step().unwrap();
    assert_eq!((plan.header(Header::NumSeqs), plan.header(Header::GraphSize)), (4, 0));
    assert_eq!(plan.section(Section::TokenIds).len(), 4);
}

#[test]
fn fields_of_row_params() {
    let params = SamplingParams {
        temperature: 0.7,
        top_k: 5,
        top_p: 0.9,
        min_p: 0.05,
        presence_penalty: 0.25,
        frequency_penalty: -0.5,
        repetition_penalty: 1.5,
        logprobs: Some(3),
        seed: Some(11),
        ..greedy(4)
    };
    let plan = first_plan(params);
    let [row] = row_params(&plan)[..] else { panic!("one row") };
    let expected = [0.7, 5.0, 0.9, 0.05, 0.25, -0.5, 1.5].map(float);
    assert_eq!(row[RowParam::Temperature as usize], expected[0]);
    assert_eq!(row[RowParam::TopK as usize], 5);
    assert_eq!(row[RowParam::TopP as usize..=RowParam::RepetitionPenalty as usize], expected[2..]);
    let key = noise(11, 0);
    assert_eq!(row[RowParam::NoiseKey0 as usize] as u32, key as u32);
    assert_eq!(row[RowParam::NoiseKey1 as usize] as u32, (key >> 32) as u32);
    assert_eq!(row[RowParam::NumLogprobs as usize], 3);
    assert_eq!(row[RowParam::NumCandidates as usize], 1);
    assert_eq!(plan.header(Header::MaxLogprobs), 3);
    assert_eq!(plan.header(Header::Flags), flags::RANDOM | flags::TOP_K | flags::TOP_P | flags::MIN_P);
}

#[test]
fn greedy_rows_have_no_filters() {
    for temperature in [0.0, 9e-6] {
        let params = SamplingParams { temperature, top_k: 5, top_p: 0.5, min_p: 0.1, ..greedy(4) };
        let plan = first_plan(params);
        let row = row_params(&plan)[0];
        assert_eq!(row[..4], [0, 0, float(1.0), 0]);
        assert_eq!(plan.header(Header::Flags), 0);
    }
}

#[test]
fn top_k_of_the_whole_vocabulary_is_off() {
    for top_k in [-1, 0, i64::from(VOCAB), 1_000_000_000] {
        let plan = first_plan(SamplingParams { temperature: 1.0, top_k, ..greedy(4) });
        assert_eq!(row_params(&plan)[0][RowParam::TopK as usize], 0);
        assert_eq!(plan.header(Header::Flags), flags::RANDOM);
    }
    let plan = first_plan(SamplingParams { temperature: 1.0, top_k: 19, ..greedy(4) });
    assert_eq!(row_params(&plan)[0][RowParam::TopK as usize], 19);
}

#[test]
fn logprobs_of_all_tokens_and_of_rankings() {
    let mut open = config(32, 4);
    open.max_logprobs = -1;
    let mut engine = Engine::new(open);
    engine.add("x", prompt(1, 5), SamplingParams { logprobs: Some(-1), ..greedy(4) });
    let plan = engine.launch().unwrap();
    assert_eq!(plan.header(Header::MaxLogprobs), VOCAB as i32);
    let ranked = first_plan(SamplingParams { best_of: Some(3), temperature: 1.0, ..greedy(4) });
    assert_eq!(ranked.header(Header::MaxLogprobs), 0, "ranking needs the sampled tokens' own");
}

#[test]
fn beam_rows_ask_for_candidates() {
    let params = SamplingParams { best_of: Some(3), use_beam_search: true, ..greedy(4) };
    for (ignore_eos, stop_token_ids, candidates) in
        [(true, vec![], 6), (false, vec![], 6), (false, vec![5], 9), (false, vec![5, 6, 7, 8, 9], 20)]
    {
        let plan = first_plan(SamplingParams { ignore_eos, stop_token_ids, ..params.clone() });
        assert_eq!(plan.header(Header::NumCandidates), candidates);
        assert_eq!(row_params(&plan)[0][RowParam::NumCandidates as usize], candidates);
        assert_eq!(plan.header(Header::Flags), flags::BEAM);
        assert_eq!(plan.header(Header::NumRows), 1);
    }
}

#[test]
fn rows_of_one_prompt_share_its_last_token() {
    let plan = first_plan(SamplingParams { n: 4, temperature: 1.0, seed: Some(5), ..greedy(4) });
    assert_eq!(plan.section(Section::RowToken), [4, 4, 4, 4]);
    let keys: Vec<_> = row_params(&plan).iter().map(|row| row[RowParam::NoiseKey0 as usize] as u32).collect();
    let expected: Vec<_> = (0..4).map(|child| noise(5 + child, 0) as u32).collect();
    assert_eq!(keys, expected);
    assert!((1..4).all(|child| keys[child] != keys[0]));
}

#[test]
fn noise_keys_differ_from_token_to_token() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", prompt(1, 5), SamplingParams { temperature: 1.0, seed: Some(5), ..greedy(6) });
    engine.launch();
    for position in 1..6 {
        let plan = engine.launch().unwrap();
        let row = row_params(&plan)[0];
        let key = u64::from(row[RowParam::NoiseKey0 as usize] as u32)
            | u64::from(row[RowParam::NoiseKey1 as usize] as u32) << 32;
        assert_eq!(key, noise(5, position));
        engine.commit();
    }
}

#[test]
fn penalties_count_the_token_in_flight() {
    let mut engine = Engine::new(config(32, 4));
    let plain = SamplingParams { temperature: 0.0, ..greedy(8) };
    engine.add("plain", prompt(1, 5), plain);
    engine.add("penalised", vec![9, 3, 3, 9], SamplingParams { repetition_penalty: 1.2, ..greedy(8) });
    let plan = engine.launch().unwrap();
    assert_eq!(plan.section(Section::PenaltyRows), [1]);
    assert_eq!(plan.section(Section::PenaltyOffsets), [0, 2]);
    assert_eq!(plan.section(Section::PenaltyTokens), [3, 0, 9, 0], "tokens of the prompt count 0");
    let plan = engine.launch().unwrap();
    assert_eq!(plan.section(Section::PenaltyTokens), [3, 0, 9, 0, -2, 1], "row 1 of the previous step");
    engine.commit();
    let said = engine.group("penalised").sequences[0].history.output[0] as i32;
    let plan = engine.launch().unwrap();
    assert_eq!(plan.section(Section::PenaltyTokens), [3, 0, 9, 0, said, 1, -2, 1]);
}

#[test]
fn frequency_penalties_leave_the_prompt_alone() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("x", vec![9, 3, 3, 9], SamplingParams { frequency_penalty: 1.2, ..greedy(8) });
    let plan = engine.step_with(|_| 7).unwrap();
    assert_eq!((plan.section(Section::PenaltyRows), plan.section(Section::PenaltyOffsets)), (&[0][..], &[0, 0][..]));
    engine.step_with(|_| 5);
    engine.step_with(|_| 7);
    let plan = engine.step().unwrap();
    assert_eq!(plan.section(Section::PenaltyTokens), [7, 2, 5, 1]);
}

#[test]
fn bias_allowed_and_banned() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("plain", prompt(1, 2), greedy(8));
    let params = SamplingParams {
        logit_bias: vec![(4, 1.5), (6, -100.0)],
        allowed_token_ids: Some(vec![4, 6, 7]),
        min_tokens: 2,
        stop_token_ids: vec![6],
        ignore_eos: false,
        ..greedy(8)
    };
    engine.add("x", prompt(2, 2), params);
    let plan = engine.launch().unwrap();
    assert_eq!(plan.section(Section::Bias), [1, 4, float(1.5), 1, 6, float(-100.0)]);
    assert_eq!(plan.section(Section::AllowedRows), [1]);
    assert_eq!(plan.section(Section::AllowedOffsets), [0, 3]);
    assert_eq!(plan.section(Section::AllowedIds), [4, 6, 7]);
    assert_eq!(plan.section(Section::Banned), [1, 0, 1, 6]);
    // One step ahead: the token in flight counts.
    assert_eq!(engine.launch().unwrap().section(Section::Banned), [1, 0, 1, 6]);
    engine.commit();
    assert!(engine.launch().unwrap().section(Section::Banned).is_empty());
}

#[test]
fn an_end_of_sequence_that_is_ignored_is_not_banned() {
    let plan = first_plan(SamplingParams { min_tokens: 2, ..greedy(8) });
    assert!(plan.section(Section::Banned).is_empty());
}

#[test]
fn an_end_of_sequence_outside_the_vocabulary_is_not_banned() {
    let mut strange = config(32, 4);
    strange.eos_token_ids = vec![VOCAB, 1];
    let mut engine = Engine::new(strange);
    engine.add("x", prompt(1, 5), SamplingParams { min_tokens: 2, ignore_eos: false, ..greedy(8) });
    assert_eq!(engine.launch().unwrap().section(Section::Banned), [0, 1]);
}

#[test]
fn prompt_rows_cover_a_chunked_prompt_once() {
    let mut small = config(32, 4);
    small.max_num_batched_tokens = 4;
    let mut engine = Engine::new(small);
    engine.add("x", vec![5, 6, 7, 8, 9, 10, 11], SamplingParams { prompt_logprobs: Some(2), ..greedy(4) });
    let plan = engine.step().unwrap();
    assert_eq!(plan.section(Section::PromptRows), [0, 6, 2, 1, 7, 2, 2, 8, 2, 3, 9, 2]);
    assert_eq!(plan.header(Header::NumRows), 0);
    let plan = engine.step().unwrap();
    assert_eq!(plan.section(Section::PromptRows), [0, 10, 2, 1, 11, 2]);
    assert!(engine.step().unwrap().section(Section::PromptRows).is_empty());
}

#[test]
fn tokens_in_flight_are_named_by_their_row() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("a", prompt(1, 5), greedy(8));
    engine.add("b", prompt(2, 5), SamplingParams { n: 2, ..greedy(8) });
    engine.launch();
    assert_eq!(engine.launch().unwrap().section(Section::TokenIds), [-1, -2, -3]);
    engine.commit();
    engine.scheduler.abort("a");
    // Rows of the step before this one: b's children were the second and the third there.
    assert_eq!(engine.launch().unwrap().section(Section::TokenIds), [-2, -3]);
    engine.commit();
    assert_eq!(engine.launch().unwrap().section(Section::TokenIds), [-1, -2]);
}

#[test]
fn swaps_and_copies_are_pairs() {
    let mut tight = config(7, 4);
    tight.max_model_len = 16;
    tight.num_cpu_blocks = 8;
    let mut engine = Engine::new(tight);
    engine.add("old", prompt(1, 5), greedy(9));
    engine.add("young", prompt(2, 7), SamplingParams { n: 2, temperature: 1.0, seed: Some(3), ..greedy(8) });
    let (mut out, mut back, mut copies) = (Vec::new(), Vec::new(), 0);
    while let Some(plan) = engine.step() {
        out.extend_from_slice(plan.section(Section::SwapOut).as_chunks::<2>().0);
        back.extend_from_slice(plan.section(Section::SwapIn).as_chunks::<2>().0);
        copies += plan.section(Section::Copies).len();
    }
    assert!(!out.is_empty() && copies == 2);
    let mut hosts: Vec<_> = out.iter().map(|[_, host]| *host).collect();
    let mut from: Vec<_> = back.iter().map(|[host, _]| *host).collect();
    hosts.sort_unstable();
    from.sort_unstable();
    assert_eq!(hosts, from);
}
