"""uvicorn's HTTP protocol, with a limit for the head of a request, which it has not."""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pyvllm.server.errors import ApiError

DEFAULT_MAX_BYTES: Final = 64 * 1024
LINGER_S: Final = 1.0
"""A client still sends when it is refused; were the connection closed at once, the answer could be lost."""


class _HeadTooLargeError(Exception):
    """Ends the parsing of a request."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a request line and headers that are too long together, before they are kept."""

    max_head_bytes = DEFAULT_MAX_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        self._too_large = False
        self._refused = False

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._head_bytes, self._fed_bytes = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head = False
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            self._too_large = True
            raise _HeadTooLargeError

    def data_received(self, data: bytes) -> None:
        """Bytes from the client. The parser itself keeps a header that is not complete, so they are counted here."""
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._fed_bytes += len(data)
            if self._fed_bytes > self.max_head_bytes:
                self._too_large = True
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no request."""
        limit = f"the request line and headers must have at most {self.max_head_bytes} bytes"
        error = ApiError(431, limit) if self._too_large else ApiError(400, "not a valid HTTP request")
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {'Request Header Fields Too Large' if self._too_large else 'Bad Request'}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._refused = True
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.loop.call_later(LINGER_S, self.transport.close)


def limited_protocol(max_head_bytes: int) -> type[LimitedHttpProtocol]:
    """The protocol with another limit."""
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), {"max_head_bytes": max_head_bytes})
