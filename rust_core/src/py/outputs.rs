//! What a commit returns, as Python sees it.

use numpy::ndarray::Array2;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::to_py;
use crate::{output, stats};
use std::sync::Arc;

#[pyclass(frozen, module = "pyvllm._core")]
pub(super) struct LogprobTable(pub Arc<output::LogprobTable>);

#[pymethods]
impl LogprobTable {
    #[new]
    fn new(
        token_ids: PyReadonlyArray2<'_, i32>,
        logprobs: PyReadonlyArray2<'_, f32>,
        ranks: PyReadonlyArray1<'_, i32>,
    ) -> PyResult<Self> {
        let [rows, width] = [token_ids.shape()[0], token_ids.shape()[1]];
        if logprobs.shape() != [rows, width] || ranks.shape() != [rows] {
            return Err(PyValueError::new_err("token_ids and logprobs must be [N, 1 + L], ranks [N]"));
        }
        let contiguous = |_| PyValueError::new_err("token_ids, logprobs and ranks must be C-contiguous");
        Ok(Self(Arc::new(output::LogprobTable {
            width,
            token_ids: token_ids.as_slice().map_err(contiguous)?.to_vec(),
            logprobs: logprobs.as_slice().map_err(contiguous)?.to_vec(),
            ranks: ranks.as_slice().map_err(contiguous)?.to_vec(),
        })))
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        matrix(py, self.0.width, self.0.token_ids.clone())
    }

    #[getter]
    fn logprobs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        matrix(py, self.0.width, self.0.logprobs.clone())
    }

    #[getter]
    fn ranks<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.ranks.clone().into_pyarray(py)
    }
}

fn matrix<T: numpy::Element>(py: Python<'_>, width: usize, words: Vec<T>) -> PyResult<Bound<'_, PyArray2<T>>> {
    let shape = (words.len() / width.max(1), width);
    let array = Array2::from_shape_vec(shape, words).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(array.into_pyarray(py))
}

fn table(source: Option<&output::LogprobTable>) -> Option<LogprobTable> {
    source.map(|table| LogprobTable(Arc::new(table.clone())))
}

#[pyclass(frozen, module = "pyvllm._core")]
#[derive(Clone)]
pub(super) struct Completion(output::Completion);

#[pymethods]
impl Completion {
    #[getter]
    fn index(&self) -> usize {
        self.0.index
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.0.token_ids.clone()
    }

    #[getter]
    fn cumulative_logprob(&self) -> Option<f32> {
        self.0.cumulative_logprob
    }

    #[getter]
    fn logprobs(&self) -> Option<LogprobTable> {
        table(self.0.logprobs.as_ref())
    }

    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.0.finish_reason.map(output::FinishReason::as_str)
    }

    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(match &self.0.stop_reason {
            None => None,
            Some(output::StopReason::Token(id)) => Some(id.into_pyobject(py)?.into_any()),
            Some(output::StopReason::Text(text)) => Some(text.into_pyobject(py)?.into_any()),
        })
    }
}

#[pyclass(frozen, module = "pyvllm._core")]
pub(super) struct Output(pub output::Output);

#[pymethods]
impl Output {
    #[getter]
    fn request_id(&self) -> &str {
        &self.0.request_id
    }

    #[getter]
    fn prompt(&self) -> Option<&str> {
        self.0.prompt.as_deref()
    }

    #[getter]
    fn prompt_token_ids(&self) -> Vec<u32> {
        self.0.prompt_token_ids.to_vec()
    }

    #[getter]
    fn prompt_logprobs(&self) -> Option<LogprobTable> {
        table(self.0.prompt_logprobs.as_ref())
    }

    #[getter]
    fn completions(&self) -> Vec<Completion> {
        self.0.completions.iter().cloned().map(Completion).collect()
    }

    #[getter]
    fn error(&self, py: Python<'_>) -> Option<PyErr> {
        self.0.error.clone().map(|error| to_py(py, error, None))
    }

    #[getter]
    fn finished(&self) -> bool {
        self.0.finished
    }

    #[getter]
    fn num_cached_tokens(&self) -> usize {
        self.0.num_cached_tokens
    }

    #[getter]
    fn num_preemptions(&self) -> u32 {
        self.0.num_preemptions
    }

    #[getter]
    fn arrival_time(&self) -> f64 {
        self.0.timing.arrival_time
    }

    #[getter]
    fn queued_ts(&self) -> f64 {
        self.0.timing.queued
    }

    #[getter]
    fn scheduled_ts(&self) -> f64 {
        self.0.timing.scheduled
    }

    #[getter]
    fn first_token_ts(&self) -> f64 {
        self.0.timing.first_token
    }

    #[getter]
    fn last_token_ts(&self) -> f64 {
        self.0.timing.last_token
    }
}

#[pyclass(frozen, module = "pyvllm._core")]
pub(super) struct Stats(pub stats::Stats);

#[pymethods]
impl Stats {
    #[getter]
    fn num_running(&self) -> usize {
        self.0.num_running
    }

    #[getter]
    fn num_waiting(&self) -> usize {
        self.0.num_waiting
    }

    #[getter]
    fn num_queued_sequences(&self) -> usize {
        self.0.queued.num_sequences
    }

    #[getter]
    fn num_queued_tokens(&self) -> usize {
        self.0.queued.num_tokens
    }

    #[getter]
    fn num_swapped(&self) -> usize {
        self.0.num_swapped
    }

    #[getter]
    fn num_compiling(&self) -> usize {
        self.0.num_compiling
    }

    #[getter]
    fn num_gpu_blocks(&self) -> usize {
        self.0.num_gpu_blocks
    }

    #[getter]
    fn num_free_gpu_blocks(&self) -> usize {
        self.0.num_free_gpu_blocks
    }

    #[getter]
    fn num_cached_gpu_blocks(&self) -> usize {
        self.0.num_cached_gpu_blocks
    }

    #[getter]
    fn num_cpu_blocks(&self) -> usize {
        self.0.num_cpu_blocks
    }

    #[getter]
    fn num_free_cpu_blocks(&self) -> usize {
        self.0.num_free_cpu_blocks
    }

    #[getter]
    fn num_recomputations(&self) -> u64 {
        self.0.counters.num_recomputations
    }

    #[getter]
    fn num_swap_outs(&self) -> u64 {
        self.0.counters.num_swap_outs
    }

    #[getter]
    fn num_copies(&self) -> u64 {
        self.0.num_copies
    }

    #[getter]
    fn prefix_queries(&self) -> u64 {
        self.0.counters.prefix_queries
    }

    #[getter]
    fn prefix_hits(&self) -> u64 {
        self.0.counters.prefix_hits
    }

    #[getter]
    fn prompt_tokens(&self) -> u64 {
        self.0.counters.prompt_tokens
    }

    #[getter]
    fn generation_tokens(&self) -> u64 {
        self.0.counters.generation_tokens
    }

    #[getter]
    fn step_tokens(&self) -> u64 {
        self.0.counters.step_tokens.sum
    }

    #[getter]
    fn step_token_buckets(&self) -> Vec<(f64, u64)> {
        self.0.counters.step_tokens.buckets()
    }
}
