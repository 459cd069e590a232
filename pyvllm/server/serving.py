"""`Serving`: what all routes share."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from starlette.requests import Request

from pyvllm.async_llm import AsyncLLM
from pyvllm.chat import choose_template
from pyvllm.config import env
from pyvllm.sampling_params import SamplingParams
from pyvllm.server.config import ServerArgs
from pyvllm.server.errors import ApiError, bad_request, chat_error, unavailable
from pyvllm.server.metrics import Metrics
from pyvllm.tokenizer import Tokenizer

NOTES_KEY: Final = "pyvllm.notes"
"""Where a request's notes are in its ASGI scope."""
SEND_KEY: Final = "pyvllm.send"
"""Where the server's own `send` is in an ASGI scope, if nothing around the routes may look at bodies."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_THREADS: Final = 4

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Notes:
    """What the log line of a request says beside its status."""

    request_id: str
    prompt_tokens: int | None = None
    finished_prompts: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    client_gone: bool = False


class Serving:
    """The model, how it is served, and what goes on."""

    def __init__(self, llm: AsyncLLM, args: ServerArgs, processors: Sequence[str] = ()) -> None:
        """`processors`: what requests may name as logits_processors.

        Raises ValueError for a limit in the environment that is no number.
        """
        self.llm = llm
        self.args = args
        self.processors: Final = tuple(processors)
        self.names: Final = args.served_model_name or [llm.info.model]
        self.created: Final = int(time.time())
        self.default_entries: Final = changed_entries(llm.info.default_sampling_params)
        self.max_prompts: Final = _limit("MAX_COMPLETION_PROMPTS", 1024)
        self.max_sequences: Final = _limit("MAX_N_SEQUENCES", 16_384)
        self.metrics: Final = Metrics(model_name=self.names[0], stats=llm.stats, old_names=args.vllm_metrics)
        self.draining = False
        """No new requests are taken."""
        self.open: Final[set[asyncio.Task[Any]]] = set()
        """Work on requests that are being answered."""
        self.load = 0
        """Requests for text that are being answered."""
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="pyvllm-text")

    async def off_loop(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what takes time where it does not hold up others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def now(self) -> int:
        """Seconds since the epoch."""
        return int(time.time())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stop_open_requests(self) -> None:
        """Answer what is open with an error."""
        for task in list(self.open):
            task.cancel()

    def check_draining(self) -> None:
        """Raise `ApiError` 503 if no new requests are taken."""
        if self.draining:
            raise unavailable("the server is shutting down")

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises `ApiError` 404 for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"the model {name[:200]!r} does not exist; there is {known}", param="model")
        return name

    def engine_id(self, public_id: str) -> str:
        """An id that no other request in the engine has, whatever clients send."""
        return f"{public_id}-{next(self._numbers)}"

    def tokenizer(self, field: str) -> Tokenizer:
        """`field`: of the request, what needs it. Raises `ApiError` if there is none."""
        if self.llm.tokenizer is None:
            raise bad_request(field, f"{field} needs a tokenizer, and the server runs without one")
        return self.llm.tokenizer

    def chat_template(self, given: str | None) -> str:
        """The text of the template for a chat. `given`: the client's own. Raises `ApiError`."""
        if given is not None:
            if not self.args.trust_request_chat_template:
                raise bad_request(
                    "chat_template", "chat_template must not be given: the server does not trust_request_chat_template"
                )
            return given
        try:
            return choose_template(self.tokenizer("messages").chat_templates, self.llm.info.chat_template)
        except ValueError as error:
            raise chat_error(error) from None


def changed_entries(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not what `SamplingParams()` has."""
    plain = SamplingParams()
    names = [item.name for item in dataclasses.fields(params)]
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}


def _limit(name: str, default: int) -> int:
    text = env(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"PYVLLM_{name} must be an integer of at least 1, got {text!r}")
    return int(text)


def new_request_id(given: str | None) -> str:
    """A client's own name for its request, if it is a decent one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex


def notes_of(request: Request) -> Notes:
    """The notes of a request."""
    notes = request.scope[NOTES_KEY]
    assert isinstance(notes, Notes)
    return notes
