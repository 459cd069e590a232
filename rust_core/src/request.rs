//! What a user asks: sampling parameters, plain data with its validation in one place.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::guided::StructuredOutputs;
use crate::plan::{ROW_PARAMS, RowParam, flags};
use crate::stop_regex::StopRegexes;

/// Temperatures below this are greedy.
pub const GREEDY_TEMPERATURE: f32 = 1e-5;
/// Most sequences one request may have.
pub const MAX_N: i64 = 16_384;

/// When a beam search ends (as in transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum EarlyStopping {
    /// `False`: when the best running beam, scored at its present length, can't beat the worst finished one.
    #[default]
    Heuristic,
    /// `True`: as soon as there are as many finished beams as the width.
    Always,
    /// `"never"`: when no running beam could beat the worst finished one even at the longest length.
    Never,
}

/// What a request's outputs hold, and when they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OutputKind {
    /// All so far, each step.
    #[default]
    Cumulative,
    /// What is new, each step.
    Delta,
    /// All, once, at the end.
    FinalOnly,
}

/// Sampling parameters of one request; names and meaning as in vLLM and transformers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // `pyvllm/sampling_params.py` documents each field for users
pub struct SamplingParams {
    pub n: i64,
    pub best_of: Option<i64>,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    pub repetition_penalty: f64,
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
    pub seed: Option<i64>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<i64>,
    pub stop_regex: Vec<String>,
    pub bad_words: Vec<String>,
    /// Token ids of `bad_words`, each as it is and with a space before it: the tokenizer's work.
    pub bad_word_ids: Vec<Vec<u32>>,
    pub include_stop_str_in_output: bool,
    pub ignore_eos: bool,
    pub max_tokens: Option<i64>,
    pub min_tokens: i64,
    pub logprobs: Option<i64>,
    pub prompt_logprobs: Option<i64>,
    pub detokenize: bool,
    pub skip_special_tokens: bool,
    pub spaces_between_special_tokens: bool,
    pub truncate_prompt_tokens: Option<i64>,
    pub logit_bias: Vec<(i64, f64)>,
    pub allowed_token_ids: Option<Vec<i64>>,
    pub structured_outputs: Option<StructuredOutputs>,
    /// Names of functions that the engine knows.
    pub logits_processors: Vec<String>,
    pub output_kind: OutputKind,
    pub use_beam_search: bool,
    pub length_penalty: f64,
    pub early_stopping: EarlyStopping,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            best_of: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            stop_regex: Vec::new(),
            bad_words: Vec::new(),
            bad_word_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            max_tokens: Some(16),
            min_tokens: 0,
            logprobs: None,
            prompt_logprobs: None,
            detokenize: true,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            truncate_prompt_tokens: None,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            structured_outputs: None,
            logits_processors: Vec::new(),
            output_kind: OutputKind::Cumulative,
            use_beam_search: false,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
        }
    }
}

/// What the model and the engine allow a request to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Logits the model has; ids from 0 to below it are valid.
    pub vocab_size: usize,
    /// Most top log-probabilities; -1: no limit.
    pub max_logprobs: i64,
    /// Whether text can be made.
    pub has_vocabulary: bool,
}

/// Top log-probabilities that a validated `logprobs` or `prompt_logprobs` asks for: -1 is all.
pub(crate) fn top_count(top: i64, vocab_size: usize) -> usize {
    if top == -1 { vocab_size } else { top as usize }
}

fn check(ok: bool, parameter: &str, expected: &str, value: impl std::fmt::Display) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::range(parameter, expected, value)) }
}

fn check_float(parameter: &str, value: f64, low: f64, high: f64) -> Result<()> {
    check((low..=high).contains(&value), parameter, &format!("a number from {low} to {high}"), value)
}

impl SamplingParams {
    /// Sequences the request runs: the beam width, `best_of`, or `n`.
    pub fn width(&self) -> usize {
        self.best_of.unwrap_or(self.n) as usize
    }

    /// Whether tokens are drawn by argmax.
    pub fn is_greedy(&self) -> bool {
        (self.temperature as f32) < GREEDY_TEMPERATURE
    }

    /// Whether an output can be made only when all sequences have ended.
    pub fn ranks_outputs(&self) -> bool {
        self.use_beam_search || self.width() > self.n as usize
    }

    /// Check all that needs no model. Fails with the first bad field, its value and the allowed range.
    pub fn validate(&self) -> Result<()> {
        check((1..=MAX_N).contains(&self.n), "n", &format!("an integer from 1 to {MAX_N}"), self.n)?;
        if let Some(best_of) = self.best_of {
            let expected = format!("an integer from n ({}) to {MAX_N}", self.n);
            check((self.n..=MAX_N).contains(&best_of), "best_of", &expected, best_of)?;
        }
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        let repetition = self.repetition_penalty;
        let fits = repetition.is_finite() && repetition as f32 > 0.0 && (repetition as f32).is_finite();
        check(fits, "repetition_penalty", "a finite number above 0", repetition)?;
        let fits = (self.temperature as f32).is_finite() && self.temperature >= 0.0;
        check(fits, "temperature", "a finite number of at least 0", self.temperature)?;
        check_float("top_p", self.top_p, 0.0, 1.0)?;
        check(self.top_k >= -1, "top_k", "-1 or 0 (off), or an integer of at least 1", self.top_k)?;
        check_float("min_p", self.min_p, 0.0, 1.0)?;
        if let Some(max) = self.max_tokens {
            check(max >= 1, "max_tokens", "None or an integer of at least 1", max)?;
        }
        let min_range = self.max_tokens.map_or("0 or more".to_owned(), |max| format!("from 0 to max_tokens ({max})"));
        let fits = self.min_tokens >= 0 && self.max_tokens.is_none_or(|max| self.min_tokens <= max);
        check(fits, "min_tokens", &min_range, self.min_tokens)?;
        for (name, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(value) = value {
                check(value >= -1, name, "None, -1 (all) or an integer of at least 0", value)?;
            }
        }
        self.validate_stops()?;
        if self.bad_words.iter().any(String::is_empty) {
            return Err(Error::parameter("bad_words", "bad_words must not hold an empty string"));
        }
        if let Some(most) = self.truncate_prompt_tokens {
            let expected = "None, -1 (what the model's length allows) or an integer of at least 1";
            check(most == -1 || most >= 1, "truncate_prompt_tokens", expected, most)?;
        }
        for &(token, bias) in &self.logit_bias {
            check_float(&format!("logit_bias[{token}]"), bias, -100.0, 100.0)
                .map_err(|error| Error::parameter("logit_bias", error.to_string()))?;
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::parameter(
                "allowed_token_ids",
                "allowed_token_ids must be None or hold at least one id",
            ));
        }
        self.structured_outputs.as_ref().map_or(Ok(()), StructuredOutputs::validate)?;
        self.validate_beam()
    }

    fn validate_stops(&self) -> Result<()> {
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::parameter("stop", "stop must not hold an empty string"));
        }
        if !self.stop.is_empty() && !self.detokenize {
            let message = "stop needs text: stop strings cannot be used with detokenize=False (use stop_token_ids)";
            return Err(Error::parameter("stop", message));
        }
        if self.stop_regex.is_empty() {
            return Ok(());
        }
        if !self.detokenize {
            let message = "stop_regex needs text: it cannot be used with detokenize=False (use stop_token_ids)";
            return Err(Error::parameter("stop_regex", message));
        }
        StopRegexes::new(&self.stop_regex).map(|_| ())
    }

    fn validate_beam(&self) -> Result<()> {
        check(self.length_penalty.is_finite(), "length_penalty", "a finite number", self.length_penalty)?;
        if self.use_beam_search {
            if self.structured_outputs.is_some() {
                let message = "structured_outputs cannot be used with use_beam_search";
                return Err(Error::parameter("structured_outputs", message));
            }
            let width = self.width();
            check(width >= 2, "best_of", "at least 2 with use_beam_search (it is the beam width)", width)?;
            check(self.is_greedy(), "temperature", "0 with use_beam_search", self.temperature)?;
            check(self.top_p >= 1.0, "top_p", "1 with use_beam_search", self.top_p)?;
            check(self.top_k <= 0, "top_k", "off (0 or -1) with use_beam_search", self.top_k)?;
            check(self.min_p <= 0.0, "min_p", "0 with use_beam_search", self.min_p)?;
            return Ok(());
        }
        let unit = (self.length_penalty - 1.0).abs() < f64::EPSILON;
        check(unit, "length_penalty", "1 without use_beam_search", self.length_penalty)?;
        let default = self.early_stopping == EarlyStopping::Heuristic;
        let given = if self.early_stopping == EarlyStopping::Always { "True" } else { "\"never\"" };
        check(default, "early_stopping", "False without use_beam_search", given)?;
        if self.width() > self.n as usize && self.output_kind == OutputKind::Delta {
            let message = format!(
                "best_of ({}) above n ({}) cannot stream: which sequences are best is known only at the end",
                self.width(),
                self.n
            );
            return Err(Error::parameter("best_of", message));
        }
        Ok(())
    }

    /// Check what depends on the model: ids against its vocabulary, counts against the engine's limits.
    pub fn validate_for(&self, limits: &Limits) -> Result<()> {
        self.validate()?;
        let vocab = limits.vocab_size as i64;
        let id_range = format!("from 0 to {} (the model's vocabulary)", vocab - 1);
        let in_vocab = |name: &str, id: i64| {
            let message = format!("{name} must hold ids {id_range}, got {id}");
            if (0..vocab).contains(&id) { Ok(()) } else { Err(Error::parameter(name, message)) }
        };
        self.stop_token_ids.iter().try_for_each(|&id| in_vocab("stop_token_ids", id))?;
        self.logit_bias.iter().try_for_each(|&(id, _)| in_vocab("logit_bias", id))?;
        self.allowed_token_ids.iter().flatten().try_for_each(|&id| in_vocab("allowed_token_ids", id))?;
        for (name, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            let Some(value) = value else { continue };
            let wanted = if value == -1 { vocab } else { value };
            check(wanted <= vocab, name, &format!("at most {vocab} (the model's vocabulary)"), wanted)?;
            let most = if limits.max_logprobs == -1 { vocab } else { limits.max_logprobs };
            check(wanted <= most, name, &format!("at most max_logprobs ({most})"), wanted)?;
        }
        if !limits.has_vocabulary && !self.stop.is_empty() {
            return Err(Error::parameter("stop", "stop needs text, but the engine runs without a tokenizer"));
        }
        if !limits.has_vocabulary && !self.stop_regex.is_empty() {
            let message = "stop_regex needs text, but the engine runs without a tokenizer";
            return Err(Error::parameter("stop_regex", message));
        }
        if !limits.has_vocabulary && self.structured_outputs.is_some() {
            let message = "structured_outputs needs text, but the engine runs without a tokenizer";
            return Err(Error::parameter("structured_outputs", message));
        }
        self.bad_word_ids.iter().flatten().try_for_each(|&id| in_vocab("bad_words", i64::from(id)))?;
        Ok(())
    }

    /// The row of `row_params` shared by all draws of the request; noise keys are left 0.
    pub fn row_params(&self, vocab_size: usize, num_candidates: usize) -> [i32; ROW_PARAMS] {
        let float = |value: f64| (value as f32).to_bits() as i32;
        let mut row = [0; ROW_PARAMS];
        let greedy = self.is_greedy();
        row[RowParam::Temperature as usize] = if greedy { 0 } else { float(self.temperature) };
        let top_k = if greedy || self.top_k < 0 || self.top_k >= vocab_size as i64 { 0 } else { self.top_k };
        row[RowParam::TopK as usize] = top_k as i32;
        row[RowParam::TopP as usize] = float(if greedy { 1.0 } else { self.top_p });
        row[RowParam::MinP as usize] = float(if greedy { 0.0 } else { self.min_p });
        row[RowParam::PresencePenalty as usize] = float(self.presence_penalty);
        row[RowParam::FrequencyPenalty as usize] = float(self.frequency_penalty);
        row[RowParam::RepetitionPenalty as usize] = float(self.repetition_penalty);
        row[RowParam::NumLogprobs as usize] = self.num_logprobs(vocab_size);
        row[RowParam::NumCandidates as usize] = num_candidates as i32;
        row
    }

    /// Top log-probabilities each sampled token comes with; -1: not even its own.
    fn num_logprobs(&self, vocab_size: usize) -> i32 {
        match self.logprobs {
            Some(top) => top_count(top, vocab_size) as i32,
            None if self.ranks_outputs() => 0,
            None => -1,
        }
    }

    /// The bits of [`flags`] that a row of this request sets.
    pub fn flags(&self, vocab_size: usize) -> i32 {
        if self.use_beam_search {
            return flags::BEAM;
        }
        if self.is_greedy() {
            return 0;
        }
        let top_k = self.top_k > 0 && self.top_k < vocab_size as i64;
        flags::RANDOM
            | if top_k { flags::TOP_K } else { 0 }
            | if self.top_p < 1.0 { flags::TOP_P } else { 0 }
            | if self.min_p > 0.0 { flags::MIN_P } else { 0 }
    }

    /// Whether rows need the list of tokens in prompt and output.
    pub fn has_penalties(&self) -> bool {
        self.counts_output() || self.has_repetition_penalty()
    }

    /// Whether tokens of the prompt are penalised too.
    pub fn has_repetition_penalty(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() > 0.0
    }

    /// Ids that no position may have, whatever is before them.
    pub fn bad_tokens(&self) -> impl Iterator<Item = u32> {
        self.bad_word_ids.iter().filter(|word| word.len() == 1).map(|word| word[0])
    }

    fn counts_output(&self) -> bool {
        self.presence_penalty.abs() > 0.0 || self.frequency_penalty.abs() > 0.0
    }
}
