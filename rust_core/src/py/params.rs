//! `SamplingParams` from any Python object with its attributes; a wrong type is an error that names the field.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

use super::parameter_error;
use crate::error::shortened;
use crate::guided::{Constraint, StructuredOutputs};
use crate::request::{EarlyStopping, OutputKind, SamplingParams, expected};

/// Whether a value is one of Python's two booleans, which are integers too.
pub(super) fn is_bool(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyBool>()
}

/// Whether a sequence has a boolean among its items.
pub(super) fn holds_bool(values: &Bound<'_, PyAny>) -> bool {
    values.try_iter().is_ok_and(|mut items| items.any(|item| item.is_ok_and(|item| is_bool(&item))))
}

/// Python's `repr`, for messages.
pub(super) fn repr(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "?".to_owned(), |text| shortened(text.to_string()))
}

/// The attributes of one Python object.
struct Fields<'a, 'py>(&'a Bound<'py, PyAny>);

impl<'py> Fields<'_, 'py> {
    fn wrong(name: &str, value: &Bound<'py, PyAny>) -> PyErr {
        let message = format!("{name} must be {}, got {}", expected(name), repr(value));
        parameter_error(value.py(), name, message, value.clone().unbind())
    }

    /// An attribute; None stands for the default.
    fn get(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let value = self.0.getattr(name)?;
        Ok((!value.is_none()).then_some(value))
    }

    fn int(&self, name: &str) -> PyResult<Option<i64>> {
        self.get(name)?.map(|value| Self::as_int(name, &value)).transpose()
    }

    fn as_int(name: &str, value: &Bound<'py, PyAny>) -> PyResult<i64> {
        let number = if is_bool(value) { None } else { value.extract().ok() };
        number.ok_or_else(|| Self::wrong(name, value))
    }

    fn float(&self, name: &str) -> PyResult<Option<f64>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        let number = if is_bool(&value) { None } else { value.extract().ok() };
        number.map(Some).ok_or_else(|| Self::wrong(name, &value))
    }

    fn bool(&self, name: &str) -> PyResult<Option<bool>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        value.extract().map(Some).map_err(|_| Self::wrong(name, &value))
    }

    fn ids(&self, name: &str) -> PyResult<Option<Vec<i64>>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        let items = value.try_iter().map_err(|_| Self::wrong(name, &value))?;
        let ids = items.map(|item| Self::as_int(name, &item?));
        ids.collect::<PyResult<_>>().map(Some)
    }

    fn strings(&self, name: &str) -> PyResult<Vec<String>> {
        let Some(value) = self.get(name)? else { return Ok(Vec::new()) };
        if let Ok(text) = value.cast::<PyString>() {
            return Ok(vec![text.to_string()]);
        }
        value.extract().map_err(|_| Self::wrong(name, &value))
    }

    fn logit_bias(&self) -> PyResult<Vec<(i64, f64)>> {
        let Some(value) = self.get("logit_bias")? else { return Ok(Vec::new()) };
        let wrong = || Self::wrong("logit_bias", &value);
        let entries = value.cast::<PyDict>().map_err(|_| wrong())?;
        let entry = |(id, bias): (Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            let id = if is_bool(&id) { None } else { id.extract().ok() };
            let bias = if is_bool(&bias) { None } else { bias.extract().ok() };
            id.zip(bias).ok_or_else(wrong)
        };
        entries.iter().map(entry).collect()
    }

    fn structured_outputs(&self) -> PyResult<Option<StructuredOutputs>> {
        let Some(value) = self.get("structured_outputs")? else { return Ok(None) };
        let wrong = || Self::wrong("structured_outputs", &value);
        let (kind, content) =
            value.call_method0("constraint").and_then(|pair| pair.extract::<(String, Bound<'py, PyAny>)>())?;
        let text = || content.extract::<String>().map_err(|_| wrong());
        let constraint = match kind.as_str() {
            "json" => Constraint::Json(text()?),
            "regex" => Constraint::Regex(text()?),
            "choice" => Constraint::Choice(content.extract().map_err(|_| wrong())?),
            "grammar" => Constraint::Grammar(text()?),
            "structural_tag" => Constraint::StructuralTag(text()?),
            _ => Constraint::JsonObject,
        };
        let options = Fields(&value);
        let flag = |name| options.bool(name).map(Option::unwrap_or_default);
        Ok(Some(StructuredOutputs {
            constraint,
            disable_any_whitespace: flag("disable_any_whitespace")?,
            disable_additional_properties: flag("disable_additional_properties")?,
            whitespace_pattern: options.get("whitespace_pattern")?.map(|pattern| pattern.extract()).transpose()?,
        }))
    }

    /// The names among functions and names.
    fn processor_names(&self) -> PyResult<Vec<String>> {
        let Some(value) = self.get("logits_processors")? else { return Ok(Vec::new()) };
        let names = value.try_iter()?.map(|item| Ok(item?.extract::<String>().ok()));
        names.filter_map(PyResult::transpose).collect()
    }

    fn output_kind(&self) -> PyResult<OutputKind> {
        let Some(value) = self.get("output_kind")? else { return Ok(OutputKind::default()) };
        match value.extract::<i64>() {
            Ok(0) => Ok(OutputKind::Cumulative),
            Ok(1) => Ok(OutputKind::Delta),
            Ok(2) => Ok(OutputKind::FinalOnly),
            _ => Err(Self::wrong("output_kind", &value)),
        }
    }

    fn early_stopping(&self) -> PyResult<EarlyStopping> {
        let Some(value) = self.get("early_stopping")? else { return Ok(EarlyStopping::default()) };
        match (value.extract::<bool>(), value.extract::<String>().as_deref()) {
            (Ok(true), _) => Ok(EarlyStopping::Always),
            (Ok(false), _) => Ok(EarlyStopping::Heuristic),
            (_, Ok("never")) => Ok(EarlyStopping::Never),
            _ => Err(Self::wrong("early_stopping", &value)),
        }
    }
}

/// Read the fields of a request's parameters; their ranges are not checked here.
pub(super) fn extract(params: &Bound<'_, PyAny>) -> PyResult<SamplingParams> {
    let fields = Fields(params);
    let default = SamplingParams::default();
    Ok(SamplingParams {
        n: fields.int("n")?.unwrap_or(default.n),
        best_of: fields.int("best_of")?,
        presence_penalty: fields.float("presence_penalty")?.unwrap_or(default.presence_penalty),
        frequency_penalty: fields.float("frequency_penalty")?.unwrap_or(default.frequency_penalty),
        repetition_penalty: fields.float("repetition_penalty")?.unwrap_or(default.repetition_penalty),
        temperature: fields.float("temperature")?.unwrap_or(default.temperature),
        top_p: fields.float("top_p")?.unwrap_or(default.top_p),
        top_k: fields.int("top_k")?.unwrap_or(default.top_k),
        min_p: fields.float("min_p")?.unwrap_or(default.min_p),
        seed: fields.int("seed")?,
        stop: fields.strings("stop")?,
        stop_token_ids: fields.ids("stop_token_ids")?.unwrap_or_default(),
        stop_regex: fields.strings("stop_regex")?,
        bad_words: fields.strings("bad_words")?,
        bad_word_ids: Vec::new(),
        include_stop_str_in_output: fields.bool("include_stop_str_in_output")?.unwrap_or_default(),
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or_default(),
        max_tokens: fields.int("max_tokens")?,
        min_tokens: fields.int("min_tokens")?.unwrap_or_default(),
        logprobs: fields.int("logprobs")?,
        prompt_logprobs: fields.int("prompt_logprobs")?,
        detokenize: fields.bool("detokenize")?.unwrap_or(default.detokenize),
        skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(default.skip_special_tokens),
        spaces_between_special_tokens: fields
            .bool("spaces_between_special_tokens")?
            .unwrap_or(default.spaces_between_special_tokens),
        truncate_prompt_tokens: fields.int("truncate_prompt_tokens")?,
        logit_bias: fields.logit_bias()?,
        allowed_token_ids: fields.ids("allowed_token_ids")?,
        structured_outputs: fields.structured_outputs()?,
        logits_processors: fields.processor_names()?,
        output_kind: fields.output_kind()?,
        use_beam_search: fields.bool("use_beam_search")?.unwrap_or_default(),
        length_penalty: fields.float("length_penalty")?.unwrap_or(default.length_penalty),
        early_stopping: fields.early_stopping()?,
    })
}
