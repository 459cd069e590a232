"""What the tests of `LLM` share: a small pool, greedy parameters, `generate` without a progress bar.

They are about requests, which no device makes different: on the CPU they take the same time everywhere.
"""

from typing import Any

from pyvllm import LLM, SamplingParams
from pyvllm.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 128, "block_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)
