"""An engine inside an asyncio worker: it answers jobs from a queue, many at a time, and gives up on slow ones.

`python examples/embed_asyncio.py [MODEL]`
"""

import asyncio
import sys

from pyvllm import AsyncLLM, EngineArgs, SamplingParams

JOBS = [f"The number {number} is" for number in range(24)]
NUM_WORKERS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


async def answer(llm: AsyncLLM, prompt: str) -> str:
    """The whole answer to one prompt."""
    text = ""
    async for output in llm.generate(prompt, PARAMS):
        text = output.outputs[0].text  # all so far; with `output_kind` DELTA only what is new
    return text


async def work(llm: AsyncLLM, jobs: asyncio.Queue[str], answers: dict[str, str]) -> None:
    """Take jobs for ever. A job that takes too long is cancelled, which frees what it holds in the engine."""
    while True:
        prompt = await jobs.get()
        try:
            answers[prompt] = await asyncio.wait_for(answer(llm, prompt), timeout=60)
        except TimeoutError:
            answers[prompt] = "(too slow)"
        finally:
            jobs.task_done()


async def main() -> None:
    """Answer all jobs, then end."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    llm = AsyncLLM.from_engine_args(EngineArgs(model=model))
    jobs: asyncio.Queue[str] = asyncio.Queue()
    for prompt in JOBS:
        jobs.put_nowait(prompt)
    answers: dict[str, str] = {}
    workers = [asyncio.create_task(work(llm, jobs, answers)) for _ in range(NUM_WORKERS)]
    await jobs.join()
    for worker in workers:
        worker.cancel()
    for prompt, text in sorted(answers.items()):
        print(f"{prompt} ...{text!r}")
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
