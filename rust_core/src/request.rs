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

/// What a field of [`SamplingParams`] must be, as all messages say it, those about wrong types too.
pub(crate) fn expected(field: &str) -> &'static str {
    match field {
        "n" => "an integer from 1 to 16384",
        "best_of" => "None or an integer from n to 16384",
        "presence_penalty" | "frequency_penalty" => "a number from -2 to 2",
        "repetition_penalty" => "a finite number above 0",
        "temperature" => "a finite number of at least 0",
        "top_p" | "min_p" => "a number from 0 to 1",
        "top_k" => "-1 or 0 (off), or an integer of at least 1",
        "seed" => "None or a 64-bit integer",
        "stop" | "stop_regex" | "bad_words" => "a string or a list of strings, Unicode and not empty",
        "stop_token_ids" => "a list of integers",
        "allowed_token_ids" => "None or a list of integers, not empty",
        "max_tokens" => "None or an integer of at least 1",
        "min_tokens" => "an integer from 0 to max_tokens",
        "logprobs" | "prompt_logprobs" => "None, -1 (all) or an integer of at least 0",
        "truncate_prompt_tokens" => "None, -1 (what the model's length allows) or an integer of at least 1",
        "logit_bias" => "a dict of token ids to numbers from -100 to 100",
        "structured_outputs" => "None or a StructuredOutputsParams",
        "output_kind" => "a RequestOutputKind",
        "length_penalty" => "a finite number",
        "early_stopping" => "True, False or \"never\"",
        _ => "True or False",
    }
}

fn check(ok: bool, field: &str, value: impl std::fmt::Display) -> Result<()> {
    check_as(ok, field, expected(field), value)
}

fn check_as(ok: bool, field: &str, expected: &str, value: impl std::fmt::Display) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::range(field, expected, value)) }
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
        check((1..=MAX_N).contains(&self.n), "n", self.n)?;
        if let Some(best_of) = self.best_of {
            let fits = (self.n..=MAX_N).contains(&best_of);
            check(fits, "best_of", format_args!("{best_of} with n = {}", self.n))?;
        }
        check((-2.0..=2.0).contains(&self.presence_penalty), "presence_penalty", self.presence_penalty)?;
        check((-2.0..=2.0).contains(&self.frequency_penalty), "frequency_penalty", self.frequency_penalty)?;
        let repetition = self.repetition_penalty;
        let fits = repetition.is_finite() && repetition as f32 > 0.0 && (repetition as f32).is_finite();
        check(fits, "repetition_penalty", format_args!("{repetition:?}"))?;
        let fits = (self.temperature as f32).is_finite() && self.temperature >= 0.0;
        check(fits, "temperature", format_args!("{:?}", self.temperature))?;
        check((0.0..=1.0).contains(&self.top_p), "top_p", self.top_p)?;
        check(self.top_k >= -1, "top_k", self.top_k)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p)?;
        if let Some(max) = self.max_tokens {
            check(max >= 1, "max_tokens", max)?;
        }
        let max_tokens = self.max_tokens.unwrap_or(i64::MAX);
        let fits = (0..=max_tokens).contains(&self.min_tokens);
        let limit = self.max_tokens.map_or("None".to_owned(), |max| max.to_string());
        check(fits, "min_tokens", format_args!("{} with max_tokens = {limit}", self.min_tokens))?;
        for (name, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(value) = value {
                check(value >= -1, name, value)?;
            }
        }
        self.validate_stops()?;
        check(!self.bad_words.iter().any(String::is_empty), "bad_words", format_args!("{:?}", self.bad_words))?;
        if let Some(most) = self.truncate_prompt_tokens {
            check(most == -1 || most >= 1, "truncate_prompt_tokens", most)?;
        }
        for &(id, bias) in &self.logit_bias {
            check((-100.0..=100.0).contains(&bias), "logit_bias", format_args!("{bias} for {id}"))?;
        }
        check(self.allowed_token_ids.as_ref().is_none_or(|ids| !ids.is_empty()), "allowed_token_ids", "[]")?;
        self.structured_outputs.as_ref().map_or(Ok(()), StructuredOutputs::validate)?;
        self.validate_beam()
    }

    fn validate_stops(&self) -> Result<()> {
        check(!self.stop.iter().any(String::is_empty), "stop", format_args!("{:?}", self.stop))?;
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
        check(self.length_penalty.is_finite(), "length_penalty", self.length_penalty)?;
        if self.use_beam_search {
            let width = self.width();
            check_as(width >= 2, "best_of", "at least 2 with use_beam_search (it is the beam width)", width)?;
            check_as(self.is_greedy(), "temperature", "0 with use_beam_search", self.temperature)?;
            check_as(self.top_p >= 1.0, "top_p", "1 with use_beam_search", self.top_p)?;
            check_as(self.top_k <= 0, "top_k", "off (0 or -1) with use_beam_search", self.top_k)?;
            check_as(self.min_p <= 0.0, "min_p", "0 with use_beam_search", self.min_p)?;
            return Ok(());
        }
        let unit = (self.length_penalty - 1.0).abs() < f64::EPSILON;
        check_as(unit, "length_penalty", "1 without use_beam_search", self.length_penalty)?;
        let default = self.early_stopping == EarlyStopping::Heuristic;
        let given = if self.early_stopping == EarlyStopping::Always { "True" } else { "\"never\"" };
        check_as(default, "early_stopping", "False without use_beam_search", given)?;
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
            check_as(wanted <= vocab, name, &format!("at most {vocab} (the model's vocabulary)"), wanted)?;
            let most = if limits.max_logprobs == -1 { vocab } else { limits.max_logprobs };
            check_as(wanted <= most, name, &format!("at most max_logprobs ({most})"), wanted)?;
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

    /// Top log-probabilities each sampled token comes with; -1: not even its own. (Beams are ranked by what their
    /// candidates come with.)
    fn num_logprobs(&self, vocab_size: usize) -> i32 {
        match self.logprobs {
            Some(top) => top_count(top, vocab_size) as i32,
            None if self.ranks_outputs() && !self.use_beam_search => 0,
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
