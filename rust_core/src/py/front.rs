//! What crosses from the engine's process to its front end, and the front end's own state, as Python sees them.

use std::collections::HashMap;

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::outputs::{Output, Stats};
use super::{params, prompt_ids, to_py};
use crate::admission::RequestOptions;
use crate::front::{self, QueueLimits};
use crate::request::SamplingParams;
use crate::{block_map, wire};

#[pyclass(frozen, module = "pyvllm._core")]
pub(super) struct BlockMap(pub block_map::BlockMap);

#[pymethods]
impl BlockMap {
    #[staticmethod]
    fn from_bytes(py: Python<'_>, message: &[u8]) -> PyResult<Self> {
        wire::decode(message).map(Self).map_err(|error| to_py(py, error, None))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        bytes(py, wire::encode(&self.0))
    }

    #[getter]
    fn ref_counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        self.0.ref_counts.clone().into_pyarray(py)
    }

    #[getter]
    fn owners<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.owners.clone().into_pyarray(py)
    }

    #[getter]
    fn cached<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<bool>> {
        self.0.cached.clone().into_pyarray(py)
    }

    #[getter]
    fn requests(&self) -> Vec<RequestState> {
        self.0.requests.iter().cloned().map(RequestState).collect()
    }
}

#[pyclass(frozen, module = "pyvllm._core")]
pub(super) struct RequestState(block_map::RequestState);

#[pymethods]
impl RequestState {
    #[getter]
    fn request_id(&self) -> &str {
        &self.0.request_id
    }

    #[getter]
    fn state(&self) -> &str {
        &self.0.state
    }

    #[getter]
    fn num_sequences(&self) -> usize {
        self.0.num_sequences
    }

    #[getter]
    fn num_prompt_tokens(&self) -> usize {
        self.0.num_prompt_tokens
    }

    #[getter]
    fn num_output_tokens(&self) -> usize {
        self.0.num_output_tokens
    }
}

#[pyclass(module = "pyvllm._core")]
pub(super) struct FrontEnd {
    front: front::FrontEnd,
    vocab_size: usize,
}

#[pymethods]
impl FrontEnd {
    #[new]
    #[pyo3(signature = (limits, *, max_num_queued_reqs = None, max_num_queued_tokens = None))]
    fn new(
        py: Python<'_>,
        limits: &[u8],
        max_num_queued_reqs: Option<usize>,
        max_num_queued_tokens: Option<usize>,
    ) -> PyResult<Self> {
        let limits: crate::limits::EngineLimits = wire::decode(limits).map_err(|error| to_py(py, error, None))?;
        let vocab_size = limits.request.vocab_size;
        let queue = QueueLimits { max_num_sequences: max_num_queued_reqs, max_num_tokens: max_num_queued_tokens };
        Ok(Self { front: front::FrontEnd::new(limits, queue), vocab_size })
    }

    #[pyo3(signature = (
        request_id, prompt_token_ids, params, *, prompt = None, priority = 0, cache_salt = None, adapter_id = 0,
        bad_word_ids = vec![]
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keyword arguments
    fn add<'py>(
        slf: &Bound<'py, Self>,
        request_id: &str,
        prompt_token_ids: &Bound<'py, PyAny>,
        params: &Bound<'py, PyAny>,
        prompt: Option<String>,
        priority: i64,
        cache_salt: Option<String>,
        adapter_id: u64,
        bad_word_ids: Vec<Vec<u32>>,
    ) -> PyResult<(u64, Bound<'py, PyBytes>)> {
        let py = slf.py();
        // Reading Python objects may run Python code: the front end is not held meanwhile.
        let vocab_size = slf.borrow().vocab_size;
        let ids = prompt_ids(prompt_token_ids, vocab_size)?;
        let fields = SamplingParams { bad_word_ids, ..params::extract(params)? };
        let options = RequestOptions { prompt, priority, cache_salt, adapter_id, processor: None };
        let added = slf.borrow_mut().front.add(request_id, ids, fields, options);
        let (number, message) = added.map_err(|error| to_py(py, error, Some(params)))?;
        Ok((number, PyBytes::new(py, &message)))
    }

    fn receive(&mut self, py: Python<'_>, message: &[u8]) -> PyResult<Vec<u64>> {
        self.front.receive(message).map_err(|error| to_py(py, error, None))
    }

    fn take(&mut self, number: u64) -> Option<Output> {
        self.front.take(number).map(Output)
    }

    fn abort(&mut self, number: u64) -> bool {
        self.front.abort(number)
    }

    fn drop_request(&mut self, number: u64) -> bool {
        self.front.drop_request(number)
    }

    fn drop_through(&mut self, last_number: u64) -> Vec<u64> {
        self.front.drop_through(last_number)
    }

    fn prompt_limit(slf: &Bound<'_, Self>, params: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let params = params::extract(params)?;
        Ok(slf.borrow().front.prompt_limit(&params))
    }

    fn number(&self, request_id: &str) -> Option<u64> {
        self.front.number(request_id)
    }

    fn names(&self) -> HashMap<u64, String> {
        self.front.names().map(|(number, name)| (number, name.to_owned())).collect()
    }

    fn stats(&self) -> Stats {
        Stats(self.front.stats())
    }

    fn num_unfinished(&self) -> usize {
        self.front.num_unfinished()
    }
}

/// A message as Python's bytes.
pub(super) fn bytes(py: Python<'_>, message: crate::error::Result<Vec<u8>>) -> PyResult<Bound<'_, PyBytes>> {
    message.map(|message| PyBytes::new(py, &message)).map_err(|error| to_py(py, error, None))
}

#[pyfunction]
pub(super) fn encode_step<'py>(
    py: Python<'py>,
    outputs: Vec<PyRef<'py, Output>>,
    stats: &Stats,
    last_number: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let outputs = outputs.iter().map(|output| &output.0).collect();
    bytes(py, wire::encode(&wire::StepMessage { last_number, stats: stats.0, outputs }))
}
