"""`pyvllm bench latency`: batches, and the parts of steps. Times themselves are not asserted."""

import json
from pathlib import Path
from typing import Any

import pytest

from pyvllm import SamplingParams
from pyvllm.bench.latency import Driver, time_host
from pyvllm.bench.options import LatencyOptions
from pyvllm.bench.step_clock import PARTS, StepClock
from pyvllm.cli import main
from pyvllm.config import EngineArgs
from pyvllm.inputs import ParsedPrompt
from tests.idle import assert_idle


def args(model: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(model), device="cpu", dtype="float32", num_gpu_blocks_override=64, **options)


@pytest.fixture
def driver(tiny_llama: Path) -> Driver:
    return Driver(args(tiny_llama), temperature=0.0)


def test_report_and_tables(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    flags = ["--batch-size", "1,3", "--input-len", "4", "--output-len", "6", "--num-iters", "2", "--json", str(path)]
    flags += ["--host-time", "2", "--host-steps", "5", "--percentiles", "50,99.9", "--dtype", "float32"]
    flags += ["--device", "cpu"]
    assert main(["bench", "latency", str(tiny_llama), *flags]) == 0
    one, three, host = json.loads(path.read_text())["results"]
    for size, result in ((1, one), (3, three)):
        assert (result["kind"], result["batch_size"], len(result["seconds"])) == ("batch", size, 2)
        assert result["output_tokens_per_s"] == pytest.approx(size * 6 / min(result["seconds"]))
        for name in ("latency_ms", "ttft_ms", "itl_ms", "step_ms"):
            assert result[name].keys() == {"mean", "p50", "p99.9"}
        assert result["ttft_ms"]["mean"] <= result["latency_ms"]["mean"]
    assert (host["kind"], host["sequences"]) == ("host", 2)
    assert set(host) == {"kind", "sequences", "step_us", *(f"{part}_us" for part in PARTS)}
    parts = sum(host[f"{part}_us"]["mean"] for part in PARTS)
    assert 0 < parts <= host["step_us"]["mean"]
    printed = capsys.readouterr().out
    assert "| batch | ms" in printed
    assert "| sequences | µs" in printed


def test_every_token_of_a_batch_is_timed(driver: Driver) -> None:
    run = driver.run(driver.workload(3, input_len=4, output_len=6))
    assert (len(run.first), len(run.gaps), len(run.steps)) == (3, 3 * 5, 6)
    assert sum(run.steps) <= run.total * 1.0001
    assert all(first <= run.total for first in run.first)
    assert_idle(driver.engine)


def test_batches_have_other_tokens_each_time(driver: Driver) -> None:
    works = [driver.workload(2, input_len=4, output_len=6) for _ in range(2)]
    assert works[0].requests != works[1].requests


def test_a_batch_that_is_cut_is_no_result(tiny_llama: Path) -> None:
    driver = Driver(args(tiny_llama, max_model_len=8), temperature=0.0)
    with pytest.raises(RuntimeError, match="8 tokens were generated, 12 were asked for"):
        driver.run(driver.workload(2, input_len=4, output_len=6))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_parts_of_each_step_are_timed(tiny_llama: Path, run_ahead: bool) -> None:
    driver = Driver(args(tiny_llama, async_scheduling=run_ahead), temperature=0.0)
    times = time_host(driver, size=2, input_len=4, steps=7)
    assert len(times.steps) == 7
    assert {part: len(values) for part, values in times.parts.items()} == dict.fromkeys(PARTS, 7)
    for i, total in enumerate(times.steps):
        assert 0 < sum(times.parts[part][i] for part in PARTS) < total
    assert_idle(driver.engine)


def test_what_a_step_ahead_waits_for_counts_in_the_step_that_waits(tiny_llama: Path) -> None:
    driver = Driver(args(tiny_llama, async_scheduling=True), temperature=0.0)
    driver.add(driver.workload(1, input_len=4, output_len=20), final_only=True)
    driver.engine.step()
    with StepClock(driver.engine) as clock:
        for done in range(1, 4):
            driver.engine.step()
            assert {part: len(values) for part, values in clock.seconds().items()} == dict.fromkeys(PARTS, done)
    driver.engine.step()
    assert len(clock.seconds()["wait"]) == 3


def test_the_clock_changes_no_token_and_leaves_no_trace(driver: Driver) -> None:
    engine = driver.engine

    def generate(request_id: str) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
        engine.add_request(request_id, ParsedPrompt(token_ids=[5, 6]), [5, 6], params)
        outputs = []
        while engine.has_unfinished():
            outputs = engine.step()
        return outputs[0].completions[0].token_ids

    before = vars(engine).copy()
    expected = generate("plain")
    with StepClock(engine) as clock:
        assert generate("timed") == expected
    assert len(clock.seconds()["launch"]) == 9
    assert vars(engine) == before
    assert generate("after") == expected


def test_a_step_that_fails_ends_the_timing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = driver.engine
    with StepClock(engine) as clock:
        driver.add(driver.workload(1, input_len=4, output_len=4), final_only=True)

        def fail() -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(engine._runner, "launch", lambda buffer: fail())
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    monkeypatch.undo()
    assert clock.seconds()["schedule"]
    assert driver.run(driver.workload(1, input_len=4, output_len=4)).first


def test_host_steps_that_do_not_fit_are_refused_with_the_numbers(tiny_llama: Path) -> None:
    driver = Driver(args(tiny_llama, max_model_len=64), temperature=0.0)
    with pytest.raises(ValueError, match="host_steps must be at most 28 with input_len 4 and max_model_len 64, got 29"):
        time_host(driver, size=1, input_len=4, steps=29)


def test_sequences_that_do_not_fit_into_the_pool_are_no_result(tiny_llama: Path) -> None:
    small = EngineArgs(model=str(tiny_llama), device="cpu", num_gpu_blocks_override=4, max_model_len=64)
    driver = Driver(small, temperature=0.0)
    with pytest.raises(ValueError, match=r"of 8 sequences only . ran at the end; the KV pool has 4 blocks"):
        time_host(driver, size=8, input_len=4, steps=10)
    assert_idle(driver.engine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": "1,x"}, r"batch_size must be comma-separated numbers of at least 1, got '1,x'"),
        ({"host_time": "0"}, r"host_time must be comma-separated numbers of at least 1, got '0'"),
        ({"percentiles": "50,101"}, r"percentiles must be comma-separated numbers from 0 to 100, got '50,101'"),
        ({"percentiles": ""}, r"percentiles must be comma-separated numbers from 0 to 100, got ''"),
        ({"num_iters": 0}, r"num_iters must be at least 1, got 0"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyOptions(**fields)
