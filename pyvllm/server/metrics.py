"""What Prometheus is told: the engine's counters, the times of requests, and HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pyvllm import _core
from pyvllm.sampling_params import SamplingParams
from pyvllm.server import histogram as h
from pyvllm.server.histogram import Histogram, bound_text

_PREFIX: Final = "pyvllm:"
_OLD_PREFIX: Final = "vllm:"
_LABELS: Final = ("model_name", "engine")
_ENGINE: Final = "0"
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
"""All values of the label `finished_reason`."""

_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": (h.FIRST_TOKEN_S, "From a request's arrival in the engine to its first token."),
    "inter_token_latency_seconds": (h.INTER_TOKEN_S, "Between two tokens of a request."),
    "request_time_per_output_token_seconds": (h.INTER_TOKEN_S, "Mean time between a request's tokens."),
    "e2e_request_latency_seconds": (h.REQUEST_S, "From a request's arrival to its last token."),
    "request_queue_time_seconds": (h.REQUEST_S, "From a request's arrival until it first ran."),
    "request_inference_time_seconds": (h.REQUEST_S, "From a request's first run to its last token."),
    "request_prefill_time_seconds": (h.REQUEST_S, "From a request's first run to its first token."),
    "request_decode_time_seconds": (h.REQUEST_S, "From a request's first token to its last."),
    "request_prompt_tokens": (h.TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (h.TOKENS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (h.TOKENS, "Generated tokens of a request's longest sequence."),
    "request_params_n": (h.SEQUENCES, "Sequences a request asked for."),
    "request_params_max_tokens": (h.TOKENS, "Most tokens a request asked for."),
    "request_num_preemptions": (h.COUNTS, "Times a request was preempted."),
}


class RequestMetrics:
    """Times and sizes of finished requests. Written on the event loop only."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.inter_token: Final = self.histograms["inter_token_latency_seconds"]
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = {"queue_full": 0, "invalid": 0}
        self.cached_tokens = 0

    def finish(
        self, output: _core.Output, params: SamplingParams, num_prompt_tokens: int, counts: Sequence[int]
    ) -> None:
        """A request has finished. `output`: its last; `counts`: generated tokens of each of its sequences."""
        reasons = [completion.finish_reason for completion in output.completions]
        self.finished["length" if "length" in reasons else "stop"] += 1
        self.cached_tokens += output.num_cached_tokens
        seen = self.histograms
        first, last, queued = output.first_token_ts, output.last_token_ts, output.queued_ts
        longest = max(counts, default=0)
        if first > 0:
            seen["time_to_first_token_seconds"].observe(first - queued)
            seen["request_prefill_time_seconds"].observe(first - output.scheduled_ts)
            seen["request_decode_time_seconds"].observe(last - first)
            seen["request_inference_time_seconds"].observe(last - output.scheduled_ts)
            seen["e2e_request_latency_seconds"].observe(last - queued)
            seen["request_queue_time_seconds"].observe(output.scheduled_ts - queued)
            if longest > 1:
                seen["request_time_per_output_token_seconds"].observe((last - first) / (longest - 1))
        seen["request_prompt_tokens"].observe(num_prompt_tokens)
        seen["request_generation_tokens"].observe(sum(counts))
        seen["request_max_num_generation_tokens"].observe(longest)
        seen["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            seen["request_params_max_tokens"].observe(params.max_tokens)
        seen["request_num_preemptions"].observe(output.num_preemptions)

    def finish_whole(self, output: _core.Output, params: SamplingParams, num_prompt_tokens: int) -> None:
        """A request has finished all of whose tokens came with its last output."""
        counts = [len(completion.token_ids) for completion in output.completions]
        longest = max(counts, default=0)
        if longest > 1:
            step = (output.last_token_ts - output.first_token_ts) / (longest - 1)
            self.inter_token.observe_many(step, longest - 1)
        self.finish(output, params, num_prompt_tokens, counts)


class HttpMetrics:
    """Requests by route, whose labels are a fixed set: clients cannot make new ones."""

    _METHODS: Final = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.counts: dict[tuple[str, str, str], int] = {}
        self.durations: dict[str, Histogram] = {}

    def observe(self, route: str | None, method: str, status: int, seconds: float) -> None:
        """A request was answered. `route`: its path in the routing table, None if it has none."""
        handler = route or "none"
        key = (handler, method if method in self._METHODS else "other", f"{status // 100}xx")
        self.counts[key] = self.counts.get(key, 0) + 1
        if handler not in self.durations:
            self.durations[handler] = Histogram(h.FIRST_TOKEN_S)
        self.durations[handler].observe(seconds)


class Metrics(Collector):
    """All of it, and its text."""

    def __init__(self, *, model_name: str, stats: Callable[[], _core.Stats], old_names: bool) -> None:
        """`stats`: the engine's newest. `old_names`: give all a second time under vllm's prefix."""
        self.requests: Final = RequestMetrics()
        self.http: Final = HttpMetrics()
        self._labels = (model_name, _ENGINE)
        self._stats = stats
        self._prefixes = (_PREFIX, _OLD_PREFIX) if old_names else (_PREFIX,)
        self._last = (time.monotonic(), 0, 0)
        self._throughput = (0.0, 0.0)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: names are not known before they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series."""
        stats = self._stats()
        self._measure_throughput(stats)
        for prefix in self._prefixes:
            yield from self._gauges(prefix, stats)
            yield from self._counters(prefix, stats)
            yield from self._request_histograms(prefix)
            yield self._step_tokens(prefix, stats)
        yield from self._http()

    def _measure_throughput(self, stats: _core.Stats) -> None:
        """Tokens a second since the last scrape."""
        now = time.monotonic()
        seconds = now - self._last[0]
        if seconds >= 0.1:
            prompt, generation = stats.prompt_tokens - self._last[1], stats.generation_tokens - self._last[2]
            self._throughput = (max(0, prompt) / seconds, max(0, generation) / seconds)
            self._last = (now, stats.prompt_tokens, stats.generation_tokens)

    def _gauges(self, prefix: str, stats: _core.Stats) -> Iterator[Metric]:
        usage = 1 - stats.num_free_gpu_blocks / max(1, stats.num_gpu_blocks)
        host_usage = 1 - stats.num_free_cpu_blocks / stats.num_cpu_blocks if stats.num_cpu_blocks else 0.0
        values = {
            "num_requests_running": (stats.num_running, "Sequences that run."),
            "num_requests_waiting": (stats.num_waiting, "Requests that wait."),
            "num_requests_swapped": (stats.num_swapped, "Sequences swapped out to the host."),
            "kv_cache_usage_perc": (usage, "Part of the KV pool that live sequences hold, 0 to 1."),
            "gpu_cache_usage_perc": (usage, "The same under its old name."),
            "cpu_cache_usage_perc": (host_usage, "Part of the host's KV pool that is in use, 0 to 1."),
            "avg_prompt_throughput_toks_per_s": (self._throughput[0], "Prompt tokens a second since the last scrape."),
            "avg_generation_throughput_toks_per_s": (self._throughput[1], "Generated tokens a second, likewise."),
        }
        for name, (value, text) in values.items():
            gauge = GaugeMetricFamily(prefix + name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        reasons = GaugeMetricFamily(
            prefix + "num_requests_waiting_by_reason", "Requests that wait, by what for.", labels=(*_LABELS, "reason")
        )
        # capacity: for memory and room in a step; deferred: for the grammar of constrained output.
        reasons.add_metric((*self._labels, "capacity"), stats.num_waiting - stats.num_compiling)
        reasons.add_metric((*self._labels, "deferred"), stats.num_compiling)
        yield reasons
        config = GaugeMetricFamily(
            prefix + "cache_config_info",
            "Sizes of the KV pools.",
            labels=(*_LABELS, "num_gpu_blocks", "num_cpu_blocks"),
        )
        config.add_metric((*self._labels, str(stats.num_gpu_blocks), str(stats.num_cpu_blocks)), 1)
        yield config

    def _counters(self, prefix: str, stats: _core.Stats) -> Iterator[Metric]:
        values = {
            "num_preemptions": (stats.num_recomputations + stats.num_swap_outs, "Sequences that gave way."),
            "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of requests that ran, cached ones included."),
            "prompt_tokens_cached": (
                self.requests.cached_tokens,
                "Cached prompt tokens of finished requests.",
            ),
            "generation_tokens": (stats.generation_tokens, "Tokens generated."),
            "prefix_cache_queries": (stats.prefix_queries, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.prefix_hits, "Prompt tokens found there."),
        }
        for name, (value, text) in values.items():
            counter = CounterMetricFamily(prefix + name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            prefix + "request_success", "Requests that ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in self.requests.finished.items():
            success.add_metric((*self._labels, reason), count)
        yield success
        rejected = CounterMetricFamily(
            prefix + "admission_rejections", "Requests refused.", labels=(*_LABELS, "reason")
        )
        for reason, count in self.requests.rejected.items():
            rejected.add_metric((*self._labels, reason), count)
        yield rejected

    def _request_histograms(self, prefix: str) -> Iterator[Metric]:
        for name, (_, text) in _HISTOGRAMS.items():
            seen = self.requests.histograms[name]
            names = (name, "time_per_output_token_seconds") if name == "inter_token_latency_seconds" else (name,)
            for one in names:
                family = HistogramMetricFamily(prefix + one, text, labels=_LABELS)
                family.add_metric(self._labels, buckets=seen.buckets(), sum_value=seen.sum)
                yield family

    def _step_tokens(self, prefix: str, stats: _core.Stats) -> Metric:
        # Its name ends like a counter's; dashboards know it so.
        family = HistogramMetricFamily(
            prefix + "iteration_tokens_total", "Tokens of prompts and outputs that a step computed.", labels=_LABELS
        )
        buckets = [(bound_text(bound), float(count)) for bound, count in stats.step_token_buckets]
        family.add_metric(self._labels, buckets=buckets, sum_value=float(stats.step_tokens))
        return family

    def _http(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("http_requests", "Answered requests.", labels=("handler", "method", "status"))
        for labels, count in self.http.counts.items():
            counts.add_metric(labels, count)
        yield counts
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "From a request's head to the end of its answer.", labels=("handler",)
        )
        for handler, seen in self.http.durations.items():
            durations.add_metric((handler,), buckets=seen.buckets(), sum_value=seen.sum)
        yield durations
