//! `pyvllm._core`: the only part of the crate that knows Python. `pyvllm/_core.pyi` documents it.

// Signatures are Python's: PyO3 hands arguments over by value, and names are the parameters' own.
#![allow(clippy::needless_pass_by_value, clippy::similar_names)]

mod front;
mod outputs;
mod params;

use std::sync::Arc;

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::commit::Sampled;
use crate::detokenizer;
use crate::error::Error;
use crate::plan;
use crate::processor::{ProcessedRow, Processor};
use crate::request::SamplingParams;
use crate::scheduler::{self, Policy, PreemptionMode, RequestOptions};
use crate::wire::{self, RequestMessage};
use front::{BlockMap, FrontEnd, RequestState};
use outputs::{Completion, LogprobTable, Output, Stats};

create_exception!(pyvllm._core, ParameterError, PyValueError, "A field of a request is out of its range.");
create_exception!(pyvllm._core, QueueFullError, PyRuntimeError, "More waits than the queue may hold: try again later.");

/// A [`ParameterError`] with its two attributes.
fn parameter_error(py: Python<'_>, parameter: &str, message: String, value: Py<PyAny>) -> PyErr {
    let error = ParameterError::new_err(message);
    let instance = error.value(py);
    let set = instance.setattr("parameter", parameter).and_then(|()| instance.setattr("value", value));
    set.err().unwrap_or(error)
}

/// The Python exception of an error; `source` has the bad field as an attribute, if anything does.
fn to_py(py: Python<'_>, error: Error, source: Option<&Bound<'_, PyAny>>) -> PyErr {
    match error {
        Error::Internal(message) => PyRuntimeError::new_err(message),
        Error::QueueFull(message) => QueueFullError::new_err(message),
        Error::Parameter { parameter, message } => {
            let value = source.and_then(|source| source.getattr(parameter.as_str()).ok());
            parameter_error(py, &parameter, message, value.map_or_else(|| py.None(), Bound::unbind))
        }
    }
}

#[pyclass(frozen, module = "pyvllm._core")]
struct Vocabulary(Arc<detokenizer::Vocabulary>);

#[pymethods]
impl Vocabulary {
    #[new]
    #[pyo3(signature = (token_bytes, *, special_token_ids = vec![], byte_token_ids = vec![], strip_leading_space = false))]
    fn new(
        token_bytes: Vec<Vec<u8>>,
        special_token_ids: Vec<u32>,
        byte_token_ids: Vec<u32>,
        strip_leading_space: bool,
    ) -> Self {
        let vocabulary =
            detokenizer::Vocabulary::new(token_bytes, &special_token_ids, &byte_token_ids, strip_leading_space);
        Self(Arc::new(vocabulary))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

#[pyclass(module = "pyvllm._core")]
struct Detokenizer {
    vocabulary: Arc<detokenizer::Vocabulary>,
    state: detokenizer::Detokenizer,
}

#[pymethods]
impl Detokenizer {
    #[new]
    #[pyo3(signature = (vocabulary, prompt_token_ids = vec![], *, skip_special_tokens = true))]
    fn new(vocabulary: &Vocabulary, prompt_token_ids: Vec<u32>, skip_special_tokens: bool) -> Self {
        let vocabulary = Arc::clone(&vocabulary.0);
        let state = detokenizer::Detokenizer::new(&vocabulary, &prompt_token_ids, skip_special_tokens);
        Self { vocabulary, state }
    }

    /// Ids that are not of the vocabulary, negative ones too, have no text.
    fn push(&mut self, token_ids: Vec<i64>) -> String {
        let mut text = String::new();
        for id in token_ids {
            self.state.push(&self.vocabulary, u32::try_from(id).unwrap_or(u32::MAX), &mut text);
        }
        text
    }

    fn finish(&mut self) -> String {
        let mut text = String::new();
        self.state.finish(&mut text);
        text
    }
}

#[pyclass(module = "pyvllm._core")]
struct StepPlan {
    #[pyo3(get)]
    step: u32,
    buffer: Option<Vec<i32>>,
    processed: Vec<ProcessedRow>,
}

#[pymethods]
impl StepPlan {
    #[getter]
    fn buffer<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let buffer = self.buffer.take().ok_or_else(|| PyRuntimeError::new_err("the plan's buffer is taken"))?;
        Ok(buffer.into_pyarray(py))
    }

    /// (row, request id, processor, prompt, output) of each row that goes through the host.
    #[getter]
    #[allow(clippy::type_complexity)] // the tuple is what Python unpacks
    fn processed_rows(&self, py: Python<'_>) -> Vec<(usize, String, Py<PyAny>, Vec<u32>, Vec<u32>)> {
        let row = |row: &ProcessedRow| {
            let processor = row.processor.0.downcast_ref::<Py<PyAny>>()?.clone_ref(py);
            Some((row.row, row.request_id.to_string(), processor, row.prompt.to_vec(), row.output.clone()))
        };
        self.processed.iter().filter_map(row).collect()
    }
}

#[pyclass(module = "pyvllm._core")]
struct Scheduler(scheduler::Scheduler);

/// Prompt ids from a numpy int32 array or from any sequence of integers.
fn prompt_ids(prompt: &Bound<'_, PyAny>, vocab_size: usize) -> PyResult<Vec<u32>> {
    let py = prompt.py();
    let outside = |i: usize, id: &dyn std::fmt::Display| {
        let message = format!(
            "prompt_token_ids[{i}] must be from 0 to {} (the model's vocabulary), got {id}",
            vocab_size.saturating_sub(1)
        );
        parameter_error(py, "prompt_token_ids", message, prompt.clone().unbind())
    };
    if let Ok(array) = prompt.extract::<PyReadonlyArray1<'_, i32>>() {
        let ids = array.as_array();
        return ids.iter().enumerate().map(|(i, &id)| u32::try_from(id).map_err(|_| outside(i, &id))).collect();
    }
    if let Ok(ids) = prompt.extract::<Vec<u32>>()
        && !params::holds_bool(prompt)
    {
        return Ok(ids);
    }
    let mut ids = Vec::new();
    for (i, item) in prompt.try_iter()?.enumerate() {
        let item = item?;
        let id = if params::is_bool(&item) { None } else { item.extract::<u32>().ok() };
        ids.push(id.ok_or_else(|| outside(i, &params::repr(&item)))?);
    }
    Ok(ids)
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (
        *, num_gpu_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size,
        num_cpu_blocks = 0, eos_token_ids = vec![], enable_prefix_caching = true, enable_chunked_prefill = true,
        policy = "fcfs", preemption_mode = "auto", max_logprobs = 20, graph_sizes = vec![],
        cascade_tokens = 0, vocabulary = None, seed = 0, processors = vec![],
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keyword arguments
    fn new(
        py: Python<'_>,
        num_gpu_blocks: usize,
        block_size: usize,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_model_len: usize,
        vocab_size: usize,
        num_cpu_blocks: usize,
        eos_token_ids: Vec<u32>,
        enable_prefix_caching: bool,
        enable_chunked_prefill: bool,
        policy: &str,
        preemption_mode: &str,
        max_logprobs: i64,
        graph_sizes: Vec<usize>,
        cascade_tokens: usize,
        vocabulary: Option<&Vocabulary>,
        seed: i64,
        processors: Vec<(String, Py<PyAny>)>,
    ) -> PyResult<Self> {
        let config = scheduler::Config {
            num_gpu_blocks,
            num_cpu_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            vocab_size,
            eos_token_ids,
            enable_prefix_caching,
            enable_chunked_prefill,
            policy: match policy {
                "fcfs" => Policy::Fcfs,
                "priority" => Policy::Priority,
                other => return Err(to_py(py, Error::range("policy", "fcfs or priority", other), None)),
            },
            preemption_mode: match preemption_mode {
                "auto" => PreemptionMode::Auto,
                "swap" => PreemptionMode::Swap,
                "recompute" => PreemptionMode::Recompute,
                other => {
                    return Err(to_py(py, Error::range("preemption_mode", "auto, swap or recompute", other), None));
                }
            },
            max_logprobs,
            graph_sizes,
            cascade_tokens,
            seed: seed as u64,
        };
        let vocabulary = vocabulary.map(|vocabulary| Arc::clone(&vocabulary.0));
        let mut scheduler = scheduler::Scheduler::new(config, vocabulary).map_err(|error| to_py(py, error, None))?;
        for (name, processor) in processors {
            scheduler.register(name, Processor(Arc::new(processor)));
        }
        Ok(Self(scheduler))
    }

    #[pyo3(signature = (
        request_id, prompt_token_ids, params, *, prompt = None, priority = 0, cache_salt = None, adapter_id = 0,
        bad_word_ids = vec![], processor = None
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keyword arguments
    fn add_request(
        slf: &Bound<'_, Self>,
        request_id: &str,
        prompt_token_ids: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        prompt: Option<String>,
        priority: i64,
        cache_salt: Option<String>,
        adapter_id: u64,
        bad_word_ids: Vec<Vec<u32>>,
        processor: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        // Reading Python objects may run Python code and let another thread in: the scheduler is not held meanwhile.
        let vocab_size = slf.borrow().0.config.vocab_size;
        let ids = prompt_ids(prompt_token_ids, vocab_size)?;
        let fields = SamplingParams { bad_word_ids, ..params::extract(params)? };
        let processor = processor.map(|processor| Processor(Arc::new(processor)));
        let options = RequestOptions { prompt, priority, cache_salt, adapter_id, processor };
        let added = slf.borrow_mut().0.add_request(request_id, ids, fields, options);
        added.map_err(|error| to_py(slf.py(), error, Some(params)))
    }

    fn add_message(&mut self, py: Python<'_>, message: &[u8]) -> PyResult<u64> {
        let RequestMessage { number, prompt, params, options } =
            wire::decode(message).map_err(|error| to_py(py, error, None))?;
        let added = self.0.add_request(&number.to_string(), prompt, params, options);
        added.map(|()| number).map_err(|error| to_py(py, error, None))
    }

    fn limits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        front::bytes(py, wire::encode(self.0.limits()))
    }

    fn block_map(&self) -> BlockMap {
        BlockMap(self.0.block_map())
    }

    fn abort(&mut self, request_id: &str) -> bool {
        self.0.abort(request_id)
    }

    fn schedule(&mut self) -> Option<StepPlan> {
        let plan::StepPlan { step, buffer, processed } = self.0.schedule()?;
        Some(StepPlan { step, buffer: Some(buffer), processed })
    }

    #[pyo3(signature = (
        step, token_ids, logprobs, sample_table = None, prompt_table = None, candidate_table = None
    ))]
    #[allow(clippy::too_many_arguments)] // what a step brings back, once
    fn commit(
        &mut self,
        py: Python<'_>,
        step: u32,
        token_ids: PyReadonlyArray2<'_, i32>,
        logprobs: PyReadonlyArray2<'_, f32>,
        sample_table: Option<&LogprobTable>,
        prompt_table: Option<&LogprobTable>,
        candidate_table: Option<&LogprobTable>,
    ) -> PyResult<Vec<Output>> {
        let contiguous = |_| PyValueError::new_err("token_ids and logprobs must be C-contiguous");
        let sampled = Sampled {
            token_ids: token_ids.as_slice().map_err(contiguous)?,
            logprobs: logprobs.as_slice().map_err(contiguous)?,
            sample_table: sample_table.map(|table| &*table.0),
            prompt_table: prompt_table.map(|table| &*table.0),
            candidate_table: candidate_table.map(|table| &*table.0),
        };
        let outputs = self.0.commit(step, sampled).map_err(|error| to_py(py, error, None))?;
        Ok(outputs.into_iter().map(Output).collect())
    }

    fn fail(&mut self, request_id: &str, parameter: &str, message: &str) -> bool {
        self.0.fail(request_id, Error::parameter(parameter, message))
    }

    fn is_compiling(&self) -> bool {
        self.0.is_compiling()
    }

    fn take_failed(&mut self) -> Vec<Output> {
        self.0.take_failed().into_iter().map(Output).collect()
    }

    fn has_unfinished(&self) -> bool {
        self.0.has_unfinished()
    }

    fn num_unfinished(&self) -> usize {
        self.0.num_unfinished()
    }

    fn stats(&self) -> Stats {
        Stats(self.0.stats())
    }

    fn reset_prefix_cache(&mut self) -> bool {
        self.0.reset_prefix_cache()
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check_invariants().map_err(|error| to_py(py, error, None))
    }
}

#[pyfunction]
fn validate_params(py: Python<'_>, params: &Bound<'_, PyAny>) -> PyResult<()> {
    params::extract(params)?.validate().map_err(|error| to_py(py, error, Some(params)))
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ParameterError", module.py().get_type::<ParameterError>())?;
    module.add("QueueFullError", module.py().get_type::<QueueFullError>())?;
    module.add_function(wrap_pyfunction!(validate_params, module)?)?;
    module.add_function(wrap_pyfunction!(front::encode_step, module)?)?;
    module.add_class::<Vocabulary>()?;
    module.add_class::<Detokenizer>()?;
    module.add_class::<LogprobTable>()?;
    module.add_class::<StepPlan>()?;
    module.add_class::<Completion>()?;
    module.add_class::<Output>()?;
    module.add_class::<Stats>()?;
    module.add_class::<Scheduler>()?;
    module.add_class::<BlockMap>()?;
    module.add_class::<RequestState>()?;
    module.add_class::<FrontEnd>()?;
    Ok(())
}
