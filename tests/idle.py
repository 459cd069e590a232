"""What must hold of an engine once all its requests have ended."""

from pyvllm import LLM
from pyvllm.engine import Engine


def engine_of(llm: LLM) -> Engine:
    assert llm._calls is not None
    return llm._calls.engine


def assert_idle(engine: Engine) -> None:
    """Nothing of any request is left."""
    assert not engine.has_unfinished()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.num_free_gpu_blocks == stats.num_gpu_blocks
    assert stats.num_free_cpu_blocks == stats.num_cpu_blocks
    engine.check_invariants()
