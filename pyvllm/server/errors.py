"""Errors as clients see them: OpenAI's shape, whatever went wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import orjson
from starlette.responses import Response

from pyvllm.async_llm import EngineDeadError, EngineGenerateError, QueueFullError
from pyvllm.sampling_params import ParameterError

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5
MAX_MESSAGE: Final = 2000
"""Characters of a message; some show the value that was wrong."""
_KINDS: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_NAMED: Final = re.compile(r"(messages|tools|documents|chat_template_kwargs|chat_template|continue_final_message)\b\S*")
"""How the messages of errors about a chat begin: with the part that is wrong."""

_FUNCTION_FAILED: Final = "logits_processors: "
"""How the message begins if one of the operator's own functions raised, which no client need read."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """`status`: HTTP's. `param`: the field of the request that is wrong."""
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON."""
        kind = _KINDS.get(self.status) or HTTPStatus(self.status).phrase.title().replace(" ", "") + "Error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        try:
            return orjson.dumps({"error": error})
        except TypeError:  # a lone surrogate in what the client sent
            error["message"] = self.message.encode(errors="replace").decode()
            return orjson.dumps({"error": error})

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(param: str | None, message: str) -> ApiError:
    """A field of the request is wrong."""
    return ApiError(400, message, param=param)


def not_supported(param: str, feature: str) -> ApiError:
    """A field asks for what there is not."""
    return ApiError(501, f"{param} is not supported: {feature}", param=param)


def unavailable(message: str) -> ApiError:
    """Not now; the client may try again."""
    return ApiError(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def as_api_error(error: Exception, renamed: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of an exception.

    `renamed`: names of parameters that have another one in this request. Of what is unexpected the client learns no
    more than that; the log has the rest.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        if str(error).startswith(_FUNCTION_FAILED):
            logger.error("a request failed: %s", error)
            return ApiError(500, "one of the request's logits_processors failed", param="logits_processors")
        old = error.parameter
        new = (renamed or {}).get(old, old)
        # The message begins with the name, and a client knows its own; a part of the old name is none of the new one.
        message = str(error)
        if new != old and message.startswith(old):
            message = new + re.sub(r"^\.\w+", "", message.removeprefix(old))
        return bad_request(new, message)
    if isinstance(error, QueueFullError):
        return unavailable(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(500, "the engine has stopped; the server is going down")
    if isinstance(error, EngineGenerateError):
        return ApiError(500, "the engine failed on a step that this request was part of")
    logger.error("an error that no request should cause", exc_info=error)
    return ApiError(500, "internal error")


def chat_error(error: ValueError) -> ApiError:
    """What a client is told when its messages make no prompt."""
    named = _NAMED.match(str(error))
    return bad_request(named.group().rstrip(":,") if named else "messages", str(error))
