//! Stops, end of sequence and streamed text, with scripted tokens: cases B077 to B100 of the field reports.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use pyvllm_core::commit::Sampled;
use pyvllm_core::detokenizer::Vocabulary;
use pyvllm_core::error::Error;
use pyvllm_core::output::{Completion, FinishReason, Output, StopReason};
use pyvllm_core::plan::{Header, Section};
use pyvllm_core::request::{OutputKind, SamplingParams};
use pyvllm_core::scheduler::{Config, Policy, PreemptionMode, RequestOptions, Scheduler};

/// Ids 0 to 255 are bytes; 256 is the tokenizer's end of sequence, 257 another end, 258 `<|im_end|>`: all special.
const EOS: u32 = 256;
const OTHER_EOS: u32 = 257;
const IM_END: u32 = 258;
const VOCAB: usize = 259;

/// `byte_fallback`: ids 0 to 255 are the byte tokens of a `SentencePiece` vocabulary.
fn scheduler(byte_fallback: bool) -> Scheduler {
    let config = Config {
        num_gpu_blocks: 64,
        num_cpu_blocks: 0,
        block_size: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 128,
        vocab_size: VOCAB,
        eos_token_ids: vec![EOS, OTHER_EOS],
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: Policy::Fcfs,
        preemption_mode: PreemptionMode::Auto,
        max_logprobs: 20,
        graph_sizes: Vec::new(),
        cascade_tokens: 0,
        seed: 0,
    };
    let mut table: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    table.extend([b"</s>".to_vec(), b"<eot>".to_vec(), b"<|im_end|>".to_vec()]);
    let byte_ids: Vec<u32> = if byte_fallback { (0..256).collect() } else { Vec::new() };
    let vocabulary = Vocabulary::new(table, &[EOS, OTHER_EOS, IM_END], &byte_ids, false);
    Scheduler::new(config, Some(Arc::new(vocabulary))).unwrap()
}

fn params(stop: &[&str]) -> SamplingParams {
    SamplingParams {
        stop: stop.iter().map(|&text| text.to_owned()).collect(),
        max_tokens: Some(100),
        ..SamplingParams::default()
    }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Commit `script` token by token until the request ends. Returns the outputs, and the banned ids of each step.
fn play(params: &SamplingParams, prompt: &[u32], script: &[u32]) -> (Vec<Output>, Vec<Vec<i32>>) {
    play_on(scheduler(false), params, prompt, script)
}

fn play_on(
    mut scheduler: Scheduler,
    params: &SamplingParams,
    prompt: &[u32],
    script: &[u32],
) -> (Vec<Output>, Vec<Vec<i32>>) {
    scheduler.add_request("r", prompt.to_vec(), params.clone(), RequestOptions::default()).unwrap();
    let (mut outputs, mut banned) = (Vec::new(), Vec::new());
    for &token in script {
        let Some(plan) = scheduler.schedule() else { break };
        assert_eq!(plan.header(Header::NumRows), 1);
        banned.push(plan.section(Section::Banned).chunks(2).map(|entry| entry[1]).collect());
        let sampled = Sampled { token_ids: &[token as i32], logprobs: &[0.0], ..Sampled::default() };
        outputs.extend(scheduler.commit(plan.step, sampled).unwrap());
    }
    scheduler.check_invariants().unwrap();
    assert!(!scheduler.has_unfinished(), "the script ends before the request");
    (outputs, banned)
}

/// The end as `FinalOnly` tells it; checks that the deltas of a stream add up to the same.
fn finish(params: &SamplingParams, script: &[u32]) -> Completion {
    finish_on(false, params, script)
}

fn finish_on(byte_fallback: bool, params: &SamplingParams, script: &[u32]) -> Completion {
    let last = |kind| {
        let params = SamplingParams { output_kind: kind, ..params.clone() };
        play_on(scheduler(byte_fallback), &params, &bytes("p"), script).0
    };
    let whole = last(OutputKind::FinalOnly).pop().unwrap().completions.pop().unwrap();
    let deltas = last(OutputKind::Delta);
    let text: String = deltas.iter().map(|output| output.completions[0].text.as_str()).collect();
    let ids: Vec<u32> = deltas.iter().flat_map(|output| output.completions[0].token_ids.clone()).collect();
    assert_eq!((text, ids), (whole.text.clone(), whole.token_ids.clone()));
    let cumulative = last(OutputKind::Cumulative);
    assert!(
        cumulative.windows(2).all(|pair| { pair[1].completions[0].text.starts_with(&pair[0].completions[0].text) })
    );
    assert_eq!(cumulative.last().unwrap().completions[0], whole);
    whole
}

#[test]
fn b077_no_part_of_a_stop_string_is_shown() {
    let script = bytes("ABCDEFGHIJKLM");
    let end = finish(&params(&["DEFGHIJ"]), &script);
    assert_eq!(end.text, "ABC");
    assert_eq!(end.finish_reason, Some(FinishReason::Stop));
    assert_eq!(end.stop_reason, Some(StopReason::Text("DEFGHIJ".to_owned())));
    assert_eq!(end.token_ids, bytes("ABCDEFGHIJ"), "the ids end with the token that completes the stop string");
    let with_stop = SamplingParams { include_stop_str_in_output: true, ..params(&["DEFGHIJ"]) };
    assert_eq!(finish(&with_stop, &script).text, "ABCDEFGHIJ");
}

#[test]
fn b079_held_back_text_is_delivered_at_the_end() {
    let by_length = SamplingParams { max_tokens: Some(5), ..params(&["oZZZZZ"]) };
    let end = finish(&by_length, &bytes("hello"));
    assert_eq!((end.text.as_str(), end.finish_reason), ("hello", Some(FinishReason::Length)));
    let mut script = bytes("hello");
    script.push(EOS);
    let end = finish(&params(&["oZZZZZ"]), &script);
    assert_eq!((end.text.as_str(), end.finish_reason, end.stop_reason), ("hello", Some(FinishReason::Stop), None));
}

#[test]
fn a_stop_string_completed_by_the_last_allowed_token_wins_over_length() {
    let end = finish(&SamplingParams { max_tokens: Some(4), ..params(&["cd"]) }, &bytes("abcd"));
    assert_eq!((end.text.as_str(), end.finish_reason), ("ab", Some(FinishReason::Stop)));
}

#[test]
fn b082_stop_strings_need_detokenization() {
    let no_text = SamplingParams { detokenize: false, ..params(&["x"]) };
    let error = scheduler(false).add_request("r", bytes("p"), no_text, RequestOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Parameter { parameter, message }
        if parameter == "stop" && message.contains("detokenize")));
    let by_id = SamplingParams { detokenize: false, stop_token_ids: vec![i64::from(b'x')], ..params(&[]) };
    let end = finish(&by_id, &bytes("abx"));
    assert_eq!((end.text.as_str(), end.token_ids), ("", bytes("abx")));
    assert_eq!(end.stop_reason, Some(StopReason::Token(u32::from(b'x'))));
}

#[test]
fn b083_a_special_stop_token_cuts_no_visible_text() {
    let mut script = bytes("hi");
    script.push(IM_END);
    for (skip, include, text) in
        [(true, true, "hi"), (true, false, "hi"), (false, false, "hi"), (false, true, "hi<|im_end|>")]
    {
        let stop = SamplingParams {
            stop_token_ids: vec![i64::from(IM_END)],
            skip_special_tokens: skip,
            include_stop_str_in_output: include,
            ..params(&[])
        };
        let end = finish(&stop, &script);
        assert_eq!(end.text, text, "skip_special_tokens {skip}, include_stop_str_in_output {include}");
        assert_eq!(end.stop_reason, Some(StopReason::Token(IM_END)));
    }
}

#[test]
fn b084_stops_count_only_behind_min_tokens() {
    let strings = SamplingParams { min_tokens: 5, ..params(&["a"]) };
    let end = finish(&strings, &bytes("aaaaaaaa"));
    assert_eq!((end.text.as_str(), end.token_ids.len()), ("aaaaa", 6));
    let ids = SamplingParams { min_tokens: 5, stop_token_ids: vec![i64::from(b'a')], ..params(&[]) };
    let (_, banned) = play(&ids, &bytes("p"), &bytes("bbbbba"));
    let all = vec![EOS as i32, OTHER_EOS as i32, i32::from(b'a')];
    assert_eq!(banned[..5], [(); 5].map(|()| all.clone()), "masked in the first 5 samples");
    assert!(banned[5].is_empty());
}

#[test]
fn b086_several_ends_of_sequence_and_ignore_eos() {
    let mut script = bytes("abc");
    script.push(OTHER_EOS);
    let three = SamplingParams { min_tokens: 3, ..params(&[]) };
    let end = finish(&three, &script);
    assert_eq!((end.text.as_str(), end.stop_reason), ("abc", Some(StopReason::Token(OTHER_EOS))));
    let ignore = SamplingParams { ignore_eos: true, max_tokens: Some(6), ..params(&[]) };
    let end = finish(&ignore, &[97, EOS, OTHER_EOS, 98, EOS, EOS]);
    assert_eq!((end.text.as_str(), end.finish_reason), ("ab", Some(FinishReason::Length)));
    assert_eq!(end.token_ids, [97, EOS, OTHER_EOS, 98, EOS, EOS]);
}

#[test]
fn b100_end_of_sequence_as_the_last_allowed_token_is_a_stop() {
    let three = SamplingParams { max_tokens: Some(3), ..params(&[]) };
    let end = finish(&three, &[97, 98, EOS]);
    assert_eq!((end.text.as_str(), end.finish_reason, end.stop_reason), ("ab", Some(FinishReason::Stop), None));
    assert_eq!(end.token_ids.len(), 3);
    assert_eq!(finish(&three, &bytes("abc")).finish_reason, Some(FinishReason::Length));
}

#[test]
fn b088_characters_appear_when_they_are_whole() {
    let script = bytes("hi😀");
    let stream = SamplingParams { output_kind: OutputKind::Delta, max_tokens: Some(6), ..params(&[]) };
    let (outputs, _) = play(&stream, &bytes("p"), &script);
    let deltas: Vec<&str> = outputs.iter().map(|output| output.completions[0].text.as_str()).collect();
    assert_eq!(deltas, ["h", "i", "", "", "", "😀"]);
}

#[test]
fn b090_a_prompt_that_ends_inside_a_character_is_not_repeated() {
    let grin = bytes("😀");
    let stream = SamplingParams { output_kind: OutputKind::Delta, max_tokens: Some(3), ..params(&[]) };
    let prompt = [bytes("earlier "), grin[..2].to_vec()].concat();
    let (outputs, _) = play(&stream, &prompt, &[grin[2], grin[3], 120]);
    let deltas: Vec<&str> = outputs.iter().map(|output| output.completions[0].text.as_str()).collect();
    assert_eq!(deltas, ["", "😀", "x"]);
}

#[test]
fn text_that_is_cut_at_any_token_is_the_same_streamed_and_whole() {
    let text = "né 你好 👨‍👩‍👧 ก็ é…";
    for count in 1..=text.len() {
        let cut = SamplingParams { max_tokens: Some(count as i64), ..params(&["好x", "👧!", "zz"]) };
        let end = finish(&cut, &bytes(text));
        assert_eq!(end.text, String::from_utf8_lossy(&text.as_bytes()[..count]));
        // With byte fallback each byte of an unfinished character has a U+FFFD of its own.
        let whole = (0..=count).rev().find(|&end| text.is_char_boundary(end)).unwrap();
        let end = finish_on(true, &cut, &bytes(text));
        assert_eq!(end.text, format!("{}{}", &text[..whole], "\u{fffd}".repeat(count - whole)));
    }
}

#[test]
fn text_that_is_cut_by_an_expression_is_the_same_streamed_and_whole() {
    let text = "né 你好 👨‍👩‍👧 ก็ é… 42";
    for (stop, expected) in
        [("好 👨", "né 你"), ("👩.👧", "né 你好 👨\u{200d}"), ("[0-9]{2}", "né 你好 👨‍👩‍👧 ก็ é… "), ("你.{2}", "né ")]
    {
        for byte_fallback in [false, true] {
            let stopped = SamplingParams { stop_regex: vec![stop.to_owned()], ..params(&["zz"]) };
            let end = finish_on(byte_fallback, &stopped, &bytes(text));
            assert_eq!((end.text.as_str(), end.finish_reason), (expected, Some(FinishReason::Stop)));
            assert_eq!(end.stop_reason, Some(StopReason::Text(stop.to_owned())));
        }
    }
}
