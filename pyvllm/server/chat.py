"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pyvllm import _core
from pyvllm.server.errors import bad_request, not_supported
from pyvllm.server.generation import Job
from pyvllm.server.logprobs import chat_logprobs, prompt_logprobs, shown_tokens
from pyvllm.server.parsing import given_sampling
from pyvllm.server.prompts import Conversation, encode_chat
from pyvllm.server.protocol import ChatBody, ChatCompletionRequest
from pyvllm.server.serving import Notes, Serving
from pyvllm.server.sse import CHAT_SHAPE, ChunkWriter, Extras, Opening
from pyvllm.server.tasks import Task, TextRoute, check_prompt_logprobs, sampling


class ChatTask(Task[ChatBody]):
    """A chat, understood and checked."""

    id_prefix = "chatcmpl-"
    shape = CHAT_SHAPE

    @property
    def role(self) -> str:
        """Of the answer: that of the message it goes on with, or the server's for a new one."""
        last = self.body.messages[-1].get("role")
        return self.serving.args.response_role if begins_answer(self.body) else str(last)

    @property
    def echoed(self) -> str:
        """What is repeated before the answer."""
        last = self.body.messages[-1]
        if not self.body.echo or last.get("role") != self.role:
            return ""
        return content_text(last.get("content"))

    def whole(self, outputs: Sequence[_core.Output]) -> dict[str, Any]:
        """The answer, at once."""
        (output,) = outputs
        choices = [self._choice(completion) for completion in output.completions]
        answer = self.frame("chat.completion", sorted(choices, key=lambda choice: int(choice["index"])), outputs)
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.texts)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _choice(self, completion: _core.Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": self.role, "content": self.echoed + completion.text},
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _logprobs(self, completion: _core.Completion) -> dict[str, Any] | None:
        if completion.logprobs is None or not self.body.logprobs:
            return None
        rows = shown_tokens(completion, include_stop=self.job.params.include_stop_str_in_output)
        return chat_logprobs(completion.logprobs, rows, self.texts)

    def opening(self, writer: ChunkWriter) -> Opening:
        """The role, and what is repeated."""

        def events(index: int, output: _core.Output) -> bytes:
            ids = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
            first = {"index": index, "delta": {"role": self.role, "content": ""}, "finish_reason": None}
            found = writer.chunk(first, **ids)
            if self.echoed:
                found += writer.chunk({"index": index, "delta": {"content": self.echoed}, "finish_reason": None})
            return found

        return events

    def extras(self) -> Extras | None:
        """Log-probabilities and ids."""
        if not (self.body.logprobs or self.body.return_token_ids):
            return None

        def fields(index: int, completion: _core.Completion) -> bytes:
            found, logprobs = b"", self._logprobs(completion)
            if logprobs is not None and logprobs["content"]:
                found = b',"logprobs":' + orjson.dumps(logprobs)
            if self.body.return_token_ids:
                found += b',"token_ids":' + orjson.dumps(completion.token_ids)
            return found

        return fields


class Chat(TextRoute[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatCompletionRequest

    def renamed(self, body: ChatBody) -> Mapping[str, str]:
        """Sampling parameters that have another name here."""
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt_token_ids": "messages", "logprobs": "top_logprobs", "max_tokens": limit}

    async def prepare(self, body: ChatBody, model: str, notes: Notes) -> ChatTask:
        """Understand a body. Raises `ApiError` or `ParameterError` naming what is wrong."""
        check_chat_fields(body)
        given = given_sampling(body, self.serving.processors)
        check_prompt_logprobs(body, given)
        given.pop("logprobs", None)
        fixed: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        if body.max_completion_tokens is not None:
            given["max_tokens"] = body.max_completion_tokens
        elif "max_tokens" not in given:
            # What the context has room for, unless the model's own defaults say less.
            fixed["max_tokens"] = self.serving.default_entries.get("max_tokens")
        params = sampling(self.serving, body, given, **fixed)
        tokenizer = self.serving.tokenizer("messages")
        chat = conversation(self.serving, body)
        prompt = await self.serving.off_loop(encode_chat, tokenizer, chat, body.cache_salt)
        prompt = self.fitted(prompt, body, params, given.get("max_tokens"))
        job = Job(prompts=[prompt], params=params, priority=body.priority, renamed=self.all_renamed(body), notes=notes)
        return ChatTask(self.serving, body, model, job)


def content_text(content: object) -> str:
    """The text of a message that has made a prompt: its content, or the parts of it as templates get them."""
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(str(part[part["type"]]) for part in content)


def begins_answer(body: ChatBody) -> bool:
    """Whether the template is to begin the answer."""
    given = body.add_generation_prompt
    return not body.continue_final_message if given is None else given


def conversation(serving: Serving, body: ChatBody) -> Conversation:
    """What the prompt of a chat is made of. Raises `ApiError` if there is no template for it."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return Conversation(
        messages=body.messages,
        add_generation_prompt=begins_answer(body),
        continue_final_message=body.continue_final_message,
        template=serving.chat_template(body.chat_template),
        template_kwargs=variables,
        documents=body.documents,
        add_special_tokens=body.add_special_tokens,
    )


def check_chat_fields(body: ChatBody) -> None:
    """Fields that do not go with one another. Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs must only be given with logprobs")
    if body.tool_choice not in (None, "none"):
        raise not_supported("tool_choice", "there are no tool calls")
