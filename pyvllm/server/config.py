"""`ServerArgs`: all the HTTP server can be told. Field docstrings are also the command line's help."""

from __future__ import annotations

import argparse
import json
import ssl
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self, get_args, get_type_hints

from pyvllm.config import env
from pyvllm.engine_client import HEARTBEAT_TIMEOUT_S

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
UnknownFields = Literal["error", "warn"]
ContentFormat = Literal["auto", "string"]

MAX_PORT: Final = 65_535
_JSON_LISTS: Final = ("allowed_origins", "allowed_methods", "allowed_headers")
"""Fields that vLLM takes as one JSON list each."""
_NUMBERS: Final[dict[str, tuple[float, float]]] = {
    "port": (0, MAX_PORT),
    "max_body_bytes": (1, 1 << 40),
    "max_header_bytes": (1024, 1 << 30),
    "timeout_keep_alive": (0, 1 << 20),
    "engine_heartbeat_timeout": (0.1, 1 << 20),
    "engine_stall_timeout": (0.1, 1 << 20),
    "shutdown_timeout": (0, 1 << 20),
    "max_log_len": (0, 1 << 40),
    "max_num_queued_reqs": (1, 1 << 40),
    "max_num_queued_tokens": (1, 1 << 40),
    "ssl_cert_reqs": (0, 2),
}


def _default_port() -> int:
    text = env("PORT") or "8000"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"PYVLLM_PORT must be an integer, got {text!r}") from None


def _default_keep_alive() -> float:
    text = env("HTTP_TIMEOUT_KEEP_ALIVE") or "5"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"PYVLLM_HTTP_TIMEOUT_KEEP_ALIVE must be a number of seconds, got {text!r}") from None


def _default_keys() -> list[str]:
    key = (env("API_KEY") or "").strip()  # read from a file, it may end with a line break
    return [key] if key else []


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """All the server can be told. Raises `ValueError` naming the field, its value and the allowed range."""

    host: str | None = None
    """Address to listen on. None: all of this machine's."""

    port: int = field(default_factory=_default_port)
    """TCP port, 0: any free one. Without it: PYVLLM_PORT, else 8000."""

    uds: str | None = None
    """Path of a Unix socket to listen on, in place of host and port."""

    root_path: str = ""
    """Prefix of all paths that a proxy in front takes off, such as /llm."""

    api_key: list[str] = field(default_factory=_default_keys, repr=False)
    """Keys of which every request but /health must bring one. Without it: PYVLLM_API_KEY; with neither, no key is
    needed."""

    allowed_origins: list[str] = field(default_factory=list)
    """Origins whose pages may call the server from a browser: a JSON list or several values; * is all."""

    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """Methods that such pages may use."""

    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """Headers that such pages may send."""

    allow_credentials: bool = False
    """Whether such pages may send cookies."""

    middleware: list[str] = field(default_factory=list)
    """Import paths (package.module.name) put around the application: classes as ASGI middleware, coroutine functions
    as HTTP middleware."""

    ssl_keyfile: str | None = None
    """File with the TLS key."""

    ssl_certfile: str | None = None
    """File with the TLS certificate; turns TLS on."""

    ssl_ca_certs: str | None = None
    """File with the certificates that clients' certificates are checked against."""

    ssl_cert_reqs: int = int(ssl.CERT_NONE)
    """Client certificates: 0 none, 1 optional, 2 required."""

    ssl_ciphers: str | None = None
    """OpenSSL's list of ciphers. None: its own choice for TLS 1.2 and newer."""

    enable_ssl_refresh: bool = False
    """Load the TLS files again when they change."""

    enable_request_id_headers: bool = False
    """Send back X-Request-Id."""

    disable_fastapi_docs: bool = False
    """Serve no /docs, /redoc and /openapi.json."""

    disable_page: bool = False
    """Serve no page at /."""

    served_model_name: list[str] = field(default_factory=list)
    """Names under which clients ask for the model, the first of which is reported. None: what --model says."""

    response_role: str = "assistant"
    """Role of chat answers."""

    chat_template_content_format: ContentFormat = "auto"
    """How message contents reach the template; always as one string, parts joined by line breaks."""

    trust_request_chat_template: bool = False
    """Let requests bring their own chat template."""

    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probabilities as token_id:N."""

    enable_force_include_usage: bool = False
    """End every stream with its usage."""

    enable_prompt_tokens_details: bool = False
    """Say in usage how many prompt tokens were cached."""

    unknown_fields: UnknownFields = "error"
    """What an unknown field of a request is: an error (400), or ignored with a Warning header."""

    max_num_queued_reqs: int | None = None
    """Most sequences that may wait in the engine; above it 503. None: no limit."""

    max_num_queued_tokens: int | None = None
    """Most prompt tokens that may wait in the engine; above it 503. None: no limit."""

    engine_heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S
    """Seconds without a sign of life from the engine's process after which it counts as dead."""

    engine_stall_timeout: float = 120.0
    """Seconds that one step may take before the engine counts as dead."""

    max_body_bytes: int = 16 * 1024 * 1024
    """Largest body of a request; above it 413."""

    max_header_bytes: int = 64 * 1024
    """Largest head of a request, address and headers together; above it 431."""

    timeout_keep_alive: float = field(default_factory=_default_keep_alive)
    """Seconds that an idle connection is kept. Without it: PYVLLM_HTTP_TIMEOUT_KEEP_ALIVE, else 5."""

    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C; 0 ends them at once."""

    uvicorn_log_level: LogLevel = "info"
    """Least level of log lines of the HTTP server itself."""

    disable_uvicorn_access_log: bool = False
    """Log no line for each request."""

    enable_log_requests: bool = False
    """Log the parameters of each request, and at level DEBUG its prompt."""

    max_log_len: int | None = None
    """Most characters of a prompt in such a line. None: all."""

    vllm_metrics: bool = False
    """Give metrics a second time under the prefix vllm:, for dashboards made for it."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for item in fields(self):
            self._check(item.name, getattr(self, item.name))
        if self.uds is not None and self.host is not None:
            raise ValueError(f"host must be None with uds {self.uds!r}, got {self.host!r}")
        if self.root_path:
            object.__setattr__(self, "root_path", "/" + self.root_path.strip("/"))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"ssl_certfile must be given with ssl_keyfile {self.ssl_keyfile!r}, got None")

    def _check(self, name: str, value: object) -> None:
        hint = _HINTS[name]
        if name in _NUMBERS:
            low, high = _NUMBERS[name]
            kinds = (int, float) if hint is float else (int,)
            if value is None and type(None) in get_args(hint):
                return
            if type(value) not in kinds or not low <= value <= high:  # type: ignore[operator]
                raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
        elif hint == list[str]:
            if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
                shown = "what was given" if name == "api_key" else repr(value)
                raise ValueError(f"{name} must be a list of strings that are not empty, got {shown}")
            if name == "api_key" and any(entry.split() != [entry] for entry in value):
                raise ValueError("api_key must be a list of strings without spaces, which no header could bring")
        elif hint is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        elif hint in (LogLevel, UnknownFields, ContentFormat):
            if value not in get_args(hint):
                raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, got {value!r}")
        elif not isinstance(value, str) and not (value is None and type(None) in get_args(hint)):
            raise ValueError(f"{name} must be a string, got {value!r}")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field. Without a flag its entry is absent, so that the field's default holds."""
        from pyvllm.arguments import add_field_arguments, field_docs

        group = parser.add_argument_group("server")
        lists = [item.name for item in fields(cls) if _HINTS[item.name] == list[str]]
        add_field_arguments(group, cls, skip=lists)
        docs = field_docs(cls)
        for name in lists:
            flag = "--" + name.replace("_", "-")
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": docs[name]}
            group.add_argument(flag, nargs="+", action="extend", metavar="VALUE", **options)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """From a parsed command line that may have entries of others too."""
        given = {item.name: getattr(namespace, item.name) for item in fields(cls) if hasattr(namespace, item.name)}
        for name in _JSON_LISTS:
            if name in given:
                given[name] = [entry for text in given[name] for entry in _json_list(name, text)]
        return cls(**given)


_HINTS: Final = get_type_hints(ServerArgs)


def _json_list(name: str, text: str) -> list[str]:
    """What one value of a flag lists: the entries of a JSON list, or itself."""
    if not text.startswith("["):
        return [text]
    try:
        found: list[str] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON list: {error}, got {text!r}") from None
    return found
