//! Parameters out of range: each is refused with its name, its value and the allowed range.

use pyvllm_core::error::Error;
use pyvllm_core::request::{EarlyStopping, Limits, MAX_N, OutputKind, SamplingParams};

const LIMITS: Limits = Limits { vocab_size: 64, max_logprobs: 20, has_vocabulary: true };

fn check_with(limits: &Limits, change: impl FnOnce(&mut SamplingParams)) -> Result<(), (String, String)> {
    let mut params = SamplingParams::default();
    change(&mut params);
    match params.validate_for(limits) {
        Ok(()) => Ok(()),
        Err(Error::Parameter { parameter, message }) => Err((parameter, message)),
        Err(error) => panic!("{error}"),
    }
}

fn check(change: impl FnOnce(&mut SamplingParams)) -> Result<(), (String, String)> {
    check_with(&LIMITS, change)
}

/// The change is refused; the message names the field and holds `value`.
fn refused(field: &str, value: impl ToString, change: impl FnOnce(&mut SamplingParams)) {
    let Err((parameter, message)) = check(change) else { panic!("{field} = {} accepted", value.to_string()) };
    assert_eq!(parameter, field, "{message}");
    assert!(message.contains(field) && message.contains(&value.to_string()), "{message}");
}

const NOT_FINITE: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

#[test]
fn defaults_are_valid() {
    check(|_| {}).unwrap();
}

#[test]
fn b056_nan_and_infinity_are_refused_everywhere() {
    type Field = (&'static str, fn(&mut SamplingParams, f64));
    let fields: [Field; 8] = [
        ("temperature", |params, value| params.temperature = value),
        ("top_p", |params, value| params.top_p = value),
        ("min_p", |params, value| params.min_p = value),
        ("presence_penalty", |params, value| params.presence_penalty = value),
        ("frequency_penalty", |params, value| params.frequency_penalty = value),
        ("repetition_penalty", |params, value| params.repetition_penalty = value),
        ("length_penalty", |params, value| params.length_penalty = value),
        ("logit_bias", |params, value| params.logit_bias = vec![(3, value)]),
    ];
    for (field, set) in fields {
        for value in NOT_FINITE {
            refused(field, value, |params| set(params, value));
        }
    }
}

#[test]
fn b057_values_out_of_range() {
    for value in [-0.1, -1.0, 1e300] {
        refused("temperature", format!("{value:?}"), |params| params.temperature = value);
    }
    for value in [0.0, 2.1, 999_999.0] {
        check(|params| params.temperature = value).unwrap();
    }
    for value in [-1.0, -0.001, 1.01] {
        refused("top_p", value, |params| params.top_p = value);
        refused("min_p", value, |params| params.min_p = value);
    }
    for value in [0.0, 1.0] {
        check(|params| params.top_p = value).unwrap();
        check(|params| params.min_p = value).unwrap();
    }
    for value in [0.0, -1.0, 1e300, 1e-300] {
        refused("repetition_penalty", format!("{value:?}"), |params| params.repetition_penalty = value);
    }
    check(|params| params.repetition_penalty = 0.01).unwrap();
    for value in [2.01, -2.01] {
        refused("presence_penalty", value, |params| params.presence_penalty = value);
        refused("frequency_penalty", value, |params| params.frequency_penalty = value);
    }
    for value in [0, -1, i64::MIN] {
        refused("max_tokens", value, |params| params.max_tokens = Some(value));
    }
    check(|params| params.max_tokens = Some(i64::MAX)).unwrap();
    check(|params| params.max_tokens = None).unwrap();
}

#[test]
fn b052_top_k() {
    for value in [-2, i64::MIN] {
        refused("top_k", value, |params| params.top_k = value);
    }
    for value in [-1, 0, 1, 64, 65, 1_000_000_000, i64::MAX] {
        check(|params| params.top_k = value).unwrap();
    }
}

#[test]
fn b047_n_and_best_of() {
    for value in [0, -1, 1_000_000, i64::MAX] {
        refused("n", value, |params| params.n = value);
        refused("best_of", value, |params| params.best_of = Some(value));
    }
    refused("best_of", 1, |params| (params.n, params.best_of) = (2, Some(1)));
    let (_, message) = check(|params| params.n = MAX_N + 1).unwrap_err();
    assert_eq!(message, format!("n must be an integer from 1 to {MAX_N}, got {}", MAX_N + 1));
    check(|params| params.n = MAX_N).unwrap();
    check(|params| (params.n, params.best_of) = (2, Some(2))).unwrap();
}

#[test]
fn min_tokens() {
    for value in [-1, 17] {
        refused("min_tokens", value, |params| params.min_tokens = value);
    }
    check(|params| params.min_tokens = 16).unwrap();
    check(|params| (params.min_tokens, params.max_tokens) = (1_000, None)).unwrap();
}

#[test]
fn b058_logit_bias() {
    for id in [64, -1, i64::MAX] {
        refused("logit_bias", id, |params| params.logit_bias = vec![(id, 5.0)]);
    }
    for value in [100.5, -101.0] {
        refused("logit_bias", value, |params| params.logit_bias = vec![(3, value)]);
    }
    check(|params| params.logit_bias = vec![(0, -100.0), (63, 100.0)]).unwrap();
}

#[test]
fn b060_token_ids() {
    for id in [64, -1, 1 << 31, i64::MIN] {
        refused("stop_token_ids", id, |params| params.stop_token_ids = vec![1, id]);
        refused("allowed_token_ids", id, |params| params.allowed_token_ids = Some(vec![1, id]));
    }
    refused("allowed_token_ids", "not empty, got []", |params| params.allowed_token_ids = Some(Vec::new()));
    check(|params| params.allowed_token_ids = Some(vec![63])).unwrap();
    check(|params| params.stop_token_ids = vec![0, 63]).unwrap();
}

#[test]
fn logprobs_and_prompt_logprobs() {
    for value in [-2, 21, i64::MAX] {
        refused("logprobs", value, |params| params.logprobs = Some(value));
        refused("prompt_logprobs", value, |params| params.prompt_logprobs = Some(value));
    }
    // All of them are 64, more than the 20 allowed.
    refused("logprobs", 64, |params| params.logprobs = Some(-1));
    check(|params| (params.logprobs, params.prompt_logprobs) = (Some(0), Some(20))).unwrap();
    for max_logprobs in [-1, 64] {
        let limits = Limits { max_logprobs, ..LIMITS };
        check_with(&limits, |params| params.logprobs = Some(-1)).unwrap();
        let above = check_with(&limits, |params| params.logprobs = Some(65));
        assert_eq!(above.unwrap_err().0, "logprobs");
    }
}

#[test]
fn b081_stop_strings() {
    refused("stop", r#"[""]"#, |params| params.stop = vec![String::new()]);
    refused("stop", r#"["a", ""]"#, |params| params.stop = vec!["a".to_owned(), String::new()]);
    check(|params| params.stop = vec!["a".to_owned(); 5]).unwrap();
    check(|params| params.stop = Vec::new()).unwrap();
}

#[test]
fn b082_stop_strings_need_text() {
    refused("stop", "detokenize", |params| (params.stop, params.detokenize) = (vec!["x".to_owned()], false));
    check(|params| (params.stop_token_ids, params.detokenize) = (vec![1], false)).unwrap();
    let no_text = Limits { has_vocabulary: false, ..LIMITS };
    let (parameter, message) = check_with(&no_text, |params| params.stop = vec!["x".to_owned()]).unwrap_err();
    assert!(parameter == "stop" && message.contains("tokenizer"), "{message}");
}

fn beam(params: &mut SamplingParams) {
    params.use_beam_search = true;
    params.temperature = 0.0;
    params.best_of = Some(4);
}

#[test]
fn beam_search_excludes_what_contradicts_it() {
    check(beam).unwrap();
    let case = |field: &str, value: &str, change: fn(&mut SamplingParams)| {
        refused(field, value, |params| {
            beam(params);
            change(params);
        });
    };
    case("best_of", "1", |params| params.best_of = Some(1));
    case("best_of", "1", |params| params.best_of = None);
    case("temperature", "1", |params| params.temperature = 1.0);
    case("top_p", "0.5", |params| params.top_p = 0.5);
    case("top_k", "3", |params| params.top_k = 3);
    case("min_p", "0.5", |params| params.min_p = 0.5);
    refused("length_penalty", 2.0, |params| params.length_penalty = 2.0);
    refused("early_stopping", "True", |params| params.early_stopping = EarlyStopping::Always);
    refused("early_stopping", "never", |params| params.early_stopping = EarlyStopping::Never);
    check(|params| {
        beam(params);
        (params.length_penalty, params.early_stopping) = (-1.5, EarlyStopping::Never);
    })
    .unwrap();
}

#[test]
fn best_of_cannot_stream() {
    let ranked = |params: &mut SamplingParams| (params.n, params.best_of) = (2, Some(3));
    refused("best_of", 3, |params| {
        ranked(params);
        params.output_kind = OutputKind::Delta;
    });
    check(ranked).unwrap();
}
