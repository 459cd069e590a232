"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pyvllm.sampling_params import check_unicode
from pyvllm.server.chat import conversation
from pyvllm.server.errors import bad_request
from pyvllm.server.parsing import parse_body, read_json
from pyvllm.server.prompts import encode_chat
from pyvllm.server.protocol import ChatBody, DetokenizeBody, TokenizeBody
from pyvllm.server.serving import Serving
from pyvllm.server.tasks import JSON_TYPE


class Tokens:
    """What the tokenizer does, without the model."""

    def __init__(self, serving: Serving) -> None:
        """What all routes share."""
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        found = await read_json(request, self._serving.args.max_body_bytes)
        body, headers = parse_body(TokenizeBody, found, self._serving.args.unknown_fields)
        self._serving.check_model(body.model)
        ids = await self._ids(body)
        strings = None
        if body.return_token_strs:
            tokenizer = self._serving.tokenizer("return_token_strs")
            strings = await self._serving.off_loop(lambda: [tokenizer.token_text(i) for i in ids])
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._serving.llm.info.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return Response(orjson.dumps(answer), media_type=JSON_TYPE, headers=headers)

    async def _ids(self, body: TokenizeBody) -> list[int]:
        tokenizer = self._serving.tokenizer("prompt" if body.messages is None else "messages")
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "either prompt or messages must be given")
        if body.messages is None:
            assert body.prompt is not None
            check_unicode("prompt", body.prompt)
            special = body.add_special_tokens is not False
            return await self._serving.off_loop(tokenizer.encode, body.prompt, special)
        chat = ChatBody(
            messages=body.messages,
            add_special_tokens=body.add_special_tokens is True,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        made = await self._serving.off_loop(encode_chat, tokenizer, conversation(self._serving, chat), None)
        return made.token_ids

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        found = await read_json(request, self._serving.args.max_body_bytes)
        body, headers = parse_body(DetokenizeBody, found, self._serving.args.unknown_fields)
        self._serving.check_model(body.model)
        text = await self._serving.off_loop(self._serving.tokenizer("tokens").decode, body.tokens, False)
        return Response(orjson.dumps({"prompt": text}), media_type=JSON_TYPE, headers=headers)
