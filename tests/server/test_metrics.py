"""/metrics, /load, /version, /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pyvllm
from pyvllm.server.histogram import COUNTS, Histogram
from tests.server.conftest import Served

NAMES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "num_requests_swapped"),
    *("kv_cache_usage_perc", "iteration_tokens_total"),
    *("cache_config_info", "gpu_cache_usage_perc", "cpu_cache_usage_perc", "avg_prompt_throughput_toks_per_s"),
    *("avg_generation_throughput_toks_per_s", "num_preemptions", "prompt_tokens", "prompt_tokens_cached"),
    *("generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits", "admission_rejections"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "request_num_preemptions", "time_per_output_token_seconds"),
)


def _families(server: Served) -> dict[str, dict[tuple[str, ...], float]]:
    with server.http() as http:
        text = http.get("/metrics").text
    return {
        family.name: {(sample.name, *sorted(sample.labels.values())): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_names_are_those_of_dashboards(server: Served) -> None:
    families = _families(server)
    assert {f"pyvllm:{name}" for name in NAMES} <= set(families)
    assert {"http_requests", "http_request_duration_seconds"} <= set(families)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_are_counted(server: Served, stream: bool) -> None:
    names = (
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "request_prompt_tokens_sum"),
        *("request_generation_tokens_sum", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
    )
    before = [server.metric(f"pyvllm:{name}") for name in names]
    body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": stream}
    server.post("/v1/completions", body)
    after = [server.metric(f"pyvllm:{name}") for name in names]
    grown = [new - old for old, new in zip(before, after, strict=True)]
    assert grown == [5, 10, 1, 5, 10, 1, 4]


def test_labels_are_a_fixed_set(server: Served) -> None:
    with server.http() as http:
        for i in range(20):
            assert http.request(f"METHOD{i}", f"/path-{i}").status_code == 400
            http.get(f"/path-{i}")
        http.get("/v1/models/tiny")
        size = len(http.get("/metrics").content)
        for i in range(200):
            http.request("GET", f"/other-{i}")
        assert len(http.get("/metrics").content) <= size + 100
        assert "path-1" not in http.get("/metrics").text


def test_models(server: Served, client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny-alias").id == "tiny-alias"
    with server.http() as http:
        card = http.get("/v1/models").json()["data"][0]
    assert (card["object"], card["owned_by"], card["parent"], card["max_model_len"]) == ("model", "pyvllm", None, 512)
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", body | {"model": "tiny-alias"}).json()["model"] == "tiny-alias"
    assert server.post("/v1/completions", body).json()["model"] == "tiny"


def test_small_routes(server: Served) -> None:
    with server.http() as http:
        assert http.get("/version").json() == {"version": pyvllm.__version__}
        assert http.get("/load").json() == {"server_load": 0}
        assert (http.get("/health").status_code, http.get("/health").content) == (200, b"")
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_tokenize_and_back(server: Served) -> None:
    answer = server.post("/tokenize", {"prompt": "the song", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert "".join(answer["token_strs"]) == "the song"
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the song"}
    assert server.post("/detokenize", {"tokens": [10**6, -1]}).json() == {"prompt": ""}
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}):
        assert server.post("/tokenize", body).status_code == 400
    assert server.post("/detokenize", {"tokens": ["a"]}).status_code == 400


@pytest.mark.parametrize("field", [{}, {"structured_outputs": {"regex": "[0-9]{3}"}}])
def test_tokens_of_steps_are_counted(server: Served, field: dict[str, Any]) -> None:
    def counts() -> tuple[float, float]:
        return server.metric("pyvllm:iteration_tokens_total_count"), server.metric("pyvllm:iteration_tokens_total_sum")

    before = counts()
    answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True} | field)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    steps, tokens = (new - old for old, new in zip(before, counts(), strict=True))
    # The last token is sampled and never computed with; a step ahead of it may have begun before it was known to be so.
    last = usage["total_tokens"] - 1
    assert tokens in (last, last + 1)
    assert steps in (usage["completion_tokens"], usage["completion_tokens"] + 1)


def test_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram(COUNTS)
    for value in (0, 1, 2, 3, 100):
        histogram.observe(value)
    histogram.observe_many(5, 2)
    buckets = dict(histogram.buckets())
    assert buckets == {"0.0": 1, "1.0": 2, "2.0": 3, "5.0": 6, "10.0": 6, "20.0": 6, "+Inf": 7}
    assert histogram.sum == 116
