"""`pyvllm bench serve` against a real server, and against servers that misbehave."""

import asyncio
import itertools
import json
import math
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pyvllm.bench.client import Answer
from pyvllm.bench.options import ServeOptions
from pyvllm.bench.serve import arrivals, dataset, max_open, metric_values, send_all
from pyvllm.bench.workloads import Request
from pyvllm.cli import main
from tests.server.conftest import serve

SMALL = ["--vocab-size", "256", "--random-input-len", "8", "--random-output-len", "6", "--num-prompts", "12"]


@pytest.fixture(scope="module")
def port(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server with the tiny model."""
    with serve(tiny_llama, tmp_path_factory.mktemp("bench")) as served:
        yield int(served.url.rsplit(":", 1)[1])


def bench(port: int, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the report."""
    path = tmp_path / "report.json"
    status = main(["bench", "serve", "--port", str(port), *SMALL, "--json", str(path), *flags])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_load_on_a_real_server(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    plot = tmp_path / "plot.svg"
    flags = ("--endpoint", endpoint, "--max-concurrency", "3", "--plot", str(plot), "--random-range-ratio", "0.5")
    status, report = bench(port, tmp_path, *flags, "--goodput", "ttft:60000", "e2el:60000")
    assert status == 0
    (result,) = report["results"]
    requests = result["requests"]
    assert (result["completed"], result["failed"], len(requests)) == (12, 0, 12)
    assert [request["output_tokens"] for request in requests] == [request["wanted_tokens"] for request in requests]
    assert len({request["wanted_tokens"] for request in requests}) > 1
    assert result["output_tokens"] == result["wanted_output_tokens"] == sum(r["output_tokens"] for r in requests)
    assert result["input_tokens"] == sum(request["input_tokens"] for request in requests)
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert result["goodput_requests_per_s"] == pytest.approx(result["requests_per_s"])
    for request in requests:
        assert sorted(request["pieces"]) == request["pieces"]
        assert 0 <= request["sent"] <= request["pieces"][0]
        assert request["pieces"][-1] <= result["seconds"]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert result[name].keys() == {"mean", "p50", "p90", "p99"}
    assert 0 < result["client_cpu"] <= 1.5
    assert result["server"].startswith(f"http://127.0.0.1:{port} ")
    assert "| e2el |" in capsys.readouterr().out
    assert "time to first token" in plot.read_text()


def test_prompts_are_new_in_each_run(port: int, tmp_path: Path) -> None:
    salts = {bench(port, tmp_path, "--num-prompts", "1")[1]["settings"]["salt"] for _ in range(2)}
    assert len(salts) == 2


def test_arrivals_keep_the_rate(port: int, tmp_path: Path) -> None:
    status, report = bench(port, tmp_path, "--request-rate", "50", "--burstiness", "inf")
    assert status == 0
    sent = [request["sent"] for request in report["results"][0]["requests"]]
    assert all(at >= i / 50 for i, at in enumerate(sent))


def test_what_the_server_refuses_is_told(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["bench", "serve", "--port", str(port), "--num-prompts", "2", "--json", str(path)]) == 1
    error = capsys.readouterr().err
    assert f"the first request to http://127.0.0.1:{port}/v1/completions failed: HTTP 400" in error


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        assert main(["bench", "serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "no server answers at http://127.0.0.1:" in capsys.readouterr().err


def answer_from(*parts: bytes, status: int = 200) -> Answer:
    """What becomes of a request whose server answers with these bytes and closes the connection."""

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    return asyncio.run(_answer_of(complete))


async def _answer_of(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Answer:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, number = runner.addresses[0][:2]
        options = ServeOptions(host=host, port=number, model="m", num_warmups=0)
        load = await send_all(options, [Request(prompt=[1, 2], output_len=3)])
        return load.answers[0]
    finally:
        await runner.cleanup()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


PIECE = event({"choices": [{"text": "a", "finish_reason": None}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
DONE = b"data: [DONE]\n\n"


def test_pieces_are_timed_and_usage_is_none_of_them() -> None:
    answer = answer_from(PIECE, PIECE, PIECE, USAGE + DONE)
    assert (answer.error, len(answer.pieces)) == (None, 3)
    assert (answer.input_tokens, answer.output_tokens) == (5, 7)
    assert answer.ttft < answer.e2el
    assert answer.tpot == pytest.approx((answer.e2el - answer.ttft) / 6)
    assert sum(answer.itl) == pytest.approx(answer.e2el - answer.ttft)


def test_events_may_be_cut_anywhere_and_end_in_crlf() -> None:
    stream = (PIECE + PIECE + USAGE + DONE).replace(b"\n", b"\r\n")
    answer = answer_from(*(stream[i : i + 7] for i in range(0, len(stream), 7)))
    assert (answer.error, len(answer.pieces), answer.output_tokens) == (None, 2, 7)


def test_without_usage_pieces_are_counted() -> None:
    answer = answer_from(PIECE, PIECE, DONE)
    assert (answer.error, answer.input_tokens, answer.output_tokens) == (None, 2, 2)


def test_the_first_piece_of_a_chat_is_its_first_text() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    text = event({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]})
    answer = answer_from(role, text, text, USAGE, DONE)
    assert (answer.error, len(answer.pieces), answer.output_tokens) == (None, 2, 7)


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        ([b"out of order\n"], 503, "HTTP 503: out of order"),
        ([PIECE, event({"error": {"message": "engine died"}}), DONE], 200, "engine died"),
        ([PIECE, PIECE], 200, "the answer ended before its end"),
        ([DONE], 200, "the answer has no text"),
        ([b"data: {nonsense\n\n"], 200, "JSONDecodeError"),
    ],
)
def test_answers_that_are_wrong_are_errors(parts: list[bytes], status: int, message: str) -> None:
    error = answer_from(*parts, status=status).error
    assert error is not None
    assert message in error


def test_a_connection_that_breaks_is_an_error() -> None:
    async def leave(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    error = asyncio.run(_answer_of(leave)).error
    assert error is not None
    assert "Disconnected" in error


def test_arrival_times_by_their_spread() -> None:
    def gaps(**fields: Any) -> list[float]:
        times = arrivals(4001, ServeOptions(request_rate=10, **fields))
        assert times[0] == 0
        return [after - before for before, after in itertools.pairwise(times)]

    def spread(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean

    assert gaps(burstiness=math.inf) == pytest.approx([0.1] * 4000)
    for burstiness in (0.5, 1.0, 4.0):
        found = gaps(burstiness=burstiness)
        assert sum(found) / 4000 == pytest.approx(0.1, rel=0.1)
        assert spread(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert gaps() == gaps()
    assert gaps() != gaps(seed=1)
    assert arrivals(3, ServeOptions()) == [0, 0, 0]


def test_metrics_by_hand() -> None:
    one = Answer(input_tokens=1, wanted_tokens=4, sent=1.0, output_tokens=4, pieces=[2.0, 2.5, 4.0])
    two = Answer(input_tokens=1, wanted_tokens=1, sent=2.2, output_tokens=1, pieces=[2.4])
    assert list(metric_values([one, two], "ttft")) == pytest.approx([1.0, 0.2])
    assert list(metric_values([one, two], "e2el")) == pytest.approx([3.0, 0.2])
    assert list(metric_values([one, two], "tpot")) == pytest.approx([2 / 3])
    assert list(metric_values([one, two], "itl")) == pytest.approx([0.5, 1.5])
    assert max_open([one, two]) == 2
    assert max_open([one, Answer(input_tokens=1, wanted_tokens=1, sent=4.0, pieces=[5.0])]) == 1


def test_a_fixed_workload_as_dataset() -> None:
    requests = dataset(ServeOptions(dataset_name="nano", num_prompts=5, vocab_size=500), salt=1)
    assert len(requests) == 5
    assert max(token for request in requests for token in request.prompt) < 500
    with pytest.raises(ValueError, match="num_prompts must be at most 256 for nano, got 257"):
        dataset(ServeOptions(dataset_name="nano", num_prompts=257), salt=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v2"}, r"endpoint must be one of /v1/completions, /v1/chat/completions, got '/v2'"),
        ({"dataset_name": "sharegpt_n4"}, r"dataset_name must be one of random, .*got 'sharegpt_n4'"),
        ({"request_rate": 0.0}, r"request_rate must be above 0, got 0.0"),
        ({"request_rate": math.nan}, r"request_rate must be above 0, got nan"),
        ({"max_concurrency": 0}, r"max_concurrency must be above 0, got 0"),
        ({"random_range_ratio": 1.0}, r"random_range_ratio must be at least 0 and below 1, got 1.0"),
        ({"percentile_metrics": "ttft,foo"}, r"percentile_metrics must be some of .*got 'foo'"),
        ({"goodput": ["ttft:200", "itl:3"]}, r"goodput must be ttft, tpot or e2el .*got 'itl:3'"),
        ({"goodput": ["ttft"]}, r"goodput must be .*got 'ttft'"),
        ({"plot": "a.txt"}, r"plot must end with .png or .svg or .pdf, got 'a.txt'"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeOptions(**fields)


@pytest.mark.parametrize(("module", "flags"), [("aiohttp", []), ("matplotlib", ["--plot", "a.png"])])
def test_a_missing_library_is_named_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, flags: list[str]
) -> None:
    # With None in its place, Python says that a module is not there.
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["bench", "serve", *flags]) == 2
    assert f"needs {module}, which is not installed: pip install 'pyvllm[bench]'" in capsys.readouterr().err
