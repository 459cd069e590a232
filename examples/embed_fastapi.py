"""An engine inside a FastAPI service of one's own: `POST /continue` streams text as plain chunks.

`python examples/embed_fastapi.py [MODEL] [PORT]`, then `curl -N localhost:8080/continue -d 'Once upon a time'`.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from pyvllm import AsyncLLM, EngineArgs, EngineDeadError, QueueFullError, SamplingParams
from pyvllm.inputs import ParsedPrompt
from pyvllm.sampling_params import RequestOutputKind

PARAMS = SamplingParams(temperature=0.0, max_tokens=48, output_kind=RequestOutputKind.DELTA)


def make_app(model: str) -> FastAPI:
    """The service. The engine is loaded before it accepts connections, and drained when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.llm = AsyncLLM.from_engine_args(EngineArgs(model=model), max_num_queued_reqs=256)
        yield
        await app.state.llm.drain(timeout_s=30)
        app.state.llm.shutdown()

    app = FastAPI(lifespan=lifespan)

    @app.post("/continue")
    async def continue_text(request: Request) -> StreamingResponse:
        llm: AsyncLLM = app.state.llm
        prompt = ParsedPrompt(text=(await request.body()).decode())
        (token_ids,) = await llm.encode([prompt])
        try:
            # What can be refused is refused here, before the answer begins.
            stream = llm.submit(f"request-{id(request)}", prompt, token_ids, PARAMS)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except (QueueFullError, EngineDeadError) as error:
            raise HTTPException(503, str(error)) from error

        async def chunks() -> AsyncIterator[str]:
            try:
                async for output in stream:
                    for completion in output.completions:
                        yield completion.text
            finally:
                stream.close()  # If the client has left, its request is aborted.

        return StreamingResponse(chunks(), media_type="text/plain")

    @app.get("/health")
    async def health() -> Response:
        try:
            await app.state.llm.check_health()
        except EngineDeadError as error:
            raise HTTPException(503, str(error)) from error
        return Response()

    return app


if __name__ == "__main__":
    uvicorn.run(
        make_app(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"),
        port=int(sys.argv[2]) if len(sys.argv) > 2 else 8080,
    )
