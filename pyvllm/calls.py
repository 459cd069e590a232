"""One engine under several callers: each waits for its own requests, and whoever waits steps the engine for all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from pyvllm import _core
from pyvllm.engine import Engine
from pyvllm.inputs import ParsedPrompt
from pyvllm.sampling_params import SamplingParams


class Call:
    """The requests of one caller. Leaving its `with` block drops those that have not finished."""

    def __init__(self, calls: Calls) -> None:
        """Made by `Calls.submit`."""
        self.ids: list[str] = []
        """Request ids in the order of the prompts."""
        self.inbox: deque[_core.Output] = deque()
        """Outputs that have not been taken."""
        self.error: BaseException | None = None
        """Why the requests are lost, if they are."""
        self._calls = calls

    def outputs(self, after_wait: Callable[[], None] | None = None) -> Iterator[_core.Output]:
        """Outputs as they come, until all requests have finished. `after_wait` is called now and then meanwhile.

        Raises what a step of this caller raised, and `RuntimeError` if the requests were lost to another's.
        """
        unfinished = len(self.ids)
        while unfinished:
            while not self.inbox:
                self._calls.advance(self)
                if after_wait is not None:
                    after_wait()
            output = self.inbox.popleft()
            unfinished -= output.finished
            yield output

    def close(self) -> None:
        """Drop what has not finished."""
        self._calls.drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Calls:
    """Hands the outputs of an engine to the calls they belong to.

    Adding and aborting need no lock: each is one call into the core, and those exclude each other. Steps do: one
    thread steps, the others that wait are woken after each step.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine`: used by nobody else."""
        self.engine = engine
        # Entered as it is, not through the condition: Ctrl-C cannot come between taking it and its `with` block. It may
        # be taken twice, since the garbage collector ends forgotten streams wherever a thread happens to be.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader: Call | None = None
        """The call whose thread steps. Still that call if Ctrl-C came between: it then ends, or goes on stepping."""
        self._owners: dict[str, Call] = {}
        self._numbers = itertools.count()

    def submit(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        *,
        name_index: bool,
    ) -> Call:
        """Queue requests. All three sequences are as long as one another.

        `name_index`: an error says which of the prompts it is about. If one is refused, none stays behind.
        """
        encoded = self.engine.encode(prompts)
        call = Call(self)
        try:
            for index, request in enumerate(zip(prompts, encoded, params, priorities, strict=True)):
                with naming_prompt(index if name_index else None):
                    self._add(call, *request)
        except BaseException:
            call.close()
            raise
        return call

    def _add(
        self, call: Call, prompt: ParsedPrompt, token_ids: list[int], params: SamplingParams, priority: int
    ) -> None:
        request_id = str(next(self._numbers))
        # The call can drop it, and its owner is known, before another thread steps.
        call.ids.append(request_id)
        self._owners[request_id] = call
        self.engine.add_request(request_id, prompt, token_ids, params, priority=priority)

    def drop(self, call: Call) -> None:
        """Abort a call's requests that have not finished."""
        with self._lock:
            if self._leader is call:  # Interrupted before the outputs of its step were handed out.
                self._end_step([], RuntimeError("a step was interrupted"))
        for request_id in call.ids:
            if self._owners.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def advance(self, call: Call) -> None:
        """Wait for an output of `call`, stepping the engine once if no other thread does."""
        with self._lock:
            while self._leader not in (None, call) and not call.inbox and call.error is None:
                self._changed.wait()
            if call.error is not None:
                raise RuntimeError("the engine failed while these requests were in it") from call.error
            if call.inbox:
                return
            if not self.engine.has_unfinished():
                raise RuntimeError(f"requests {', '.join(call.ids)} are no longer in the engine")
            self._leader = call
        try:
            outputs = self.engine.step()
        except BaseException as error:
            self._end_step([], error)
            raise
        self._end_step(outputs, None)

    def _end_step(self, outputs: list[_core.Output], error: BaseException | None) -> None:
        """Hand out what a step gave, or why no call can go on, and let another thread step."""
        with self._lock:
            self._deliver(outputs)
            if error is not None:
                self._fail(error)
            self._leader = None
            self._changed.notify_all()

    def _deliver(self, outputs: list[_core.Output]) -> None:
        for output in outputs:
            request_id = output.request_id
            owner = self._owners.pop(request_id, None) if output.finished else self._owners.get(request_id)
            if owner is not None:
                owner.inbox.append(output)

    def _fail(self, error: BaseException) -> None:
        """No call can go on. Each drops its requests, which the engine may still have, as it ends."""
        for owner in self._owners.values():
            owner.error = error


@contextlib.contextmanager
def naming_prompt(index: int | None) -> Iterator[None]:
    """Put the prompt's place before the message of an error about it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if index is not None:
            error.args = (f"prompts[{index}]: {error}",)
        raise
