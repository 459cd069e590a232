"""From the command line to a server that runs, and to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from pyvllm.async_llm import AsyncLLM, EngineDeadError
from pyvllm.config import EngineArgs
from pyvllm.server.app import load_middleware
from pyvllm.server.config import ServerArgs
from pyvllm.server.http_protocol import limited_protocol
from pyvllm.server.serving import Serving

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD: Final = 1
HEALTH_INTERVAL_S: Final = 1.0
LAST_ANSWERS_S: Final = 5.0
"""How long answers that say that it is over may take to be sent."""
DEAD_GRACE_S: Final = 2.0
"""How long /health says 503 before the server of a dead engine ends."""
BACKLOG: Final = 2048
MAX_FILES: Final = 1 << 16
"""Each connection is an open file, and shells often allow but 1,024 by default."""

MakeApp = Callable[[Serving], ASGIApp]


def serve(engine_args: EngineArgs, args: ServerArgs, make_app: MakeApp) -> int:
    """Run a server until it is told to stop; returns the exit status. `make_app`: what answers.

    The port is taken first, so that it is known to be free before a model is loaded, but nothing is answered before
    the first token can be made. Raises what loading raises, and OSError or ValueError for a port or files that cannot
    be used.
    """
    check_files(args)
    raise_file_limit()
    with listening(args) as listener:
        llm = AsyncLLM.from_engine_args(
            engine_args,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            heartbeat_timeout_s=args.engine_heartbeat_timeout,
            stall_timeout_s=args.engine_stall_timeout,
        )
        try:
            serving = Serving(llm, args, processors=list(engine_args.logits_processors or ()))
            server = Server(uvicorn_config(make_app(serving), args), serving)
            # What start-up has made stays: no collection of garbage needs to look through it again.
            gc.collect()
            gc.freeze()
            logger.info("serving %s on %s", ", ".join(serving.names), _shown(listener, args))
            allow_reuse(listener)
            asyncio.run(server.serve(sockets=[listener]))
            serving.close()
            return server.exit_status
        finally:
            llm.shutdown()


def raise_file_limit() -> None:
    """Let this process open as many files as it may by itself, up to `MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_files(args: ServerArgs) -> None:
    """Raise OSError or ValueError for middleware or TLS files that cannot be used."""
    for name in args.middleware:
        load_middleware(name)
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers is not None:
            context.set_ciphers(args.ssl_ciphers)
    except ssl.SSLError as error:
        raise ValueError(f"TLS with ssl_certfile {args.ssl_certfile!r} cannot be used: {error}") from None


@contextlib.contextmanager
def listening(args: ServerArgs) -> Iterator[socket.socket]:
    """A socket at the address, on which nothing is accepted yet. Raises OSError naming the address."""
    if args.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            # A socket that an earlier server left behind; nothing else is removed.
            if stat.S_ISSOCK(os.stat(args.uds).st_mode):
                os.unlink(args.uds)
        listener = socket.socket(socket.AF_UNIX)
        address: str | tuple[str, int] = args.uds
    else:
        host = args.host or "0.0.0.0"
        # asyncio turns Nagle's algorithm off, which delays each answer by 40 ms, only for sockets that say TCP.
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
        address = (host, args.port)
    with listener:
        try:
            _bind(listener, address)
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {error.strerror or error}") from None
        listener.set_inheritable(False)
        yield listener
    if args.uds is not None:
        Path(args.uds).unlink(missing_ok=True)


def _bind(listener: socket.socket, address: str | tuple[str, int]) -> None:
    """Take an address. Raises OSError if another server has it, even one that does not listen yet."""
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or listener.family == socket.AF_UNIX:
            raise
        # What is left may be connections of a server that has ended. With this option two servers that do not listen
        # yet would both get the address, so it is only the second choice, and set by the first just before it listens.
        allow_reuse(listener)
        listener.bind(address)


def allow_reuse(listener: socket.socket) -> None:
    """Let connections that are left when a server ends, which take after it, not keep its address from the next one."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _shown(listener: socket.socket, args: ServerArgs) -> str:
    if args.uds is not None:
        return f"the Unix socket {args.uds}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if args.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """How uvicorn is to run it."""
    logging.getLogger("uvicorn").setLevel(args.uvicorn_log_level.upper())
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=limited_protocol(args.max_header_bytes),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=args.root_path,
        backlog=BACKLOG,
        timeout_keep_alive=args.timeout_keep_alive,  # type: ignore[arg-type]  # only ever added to a time
        timeout_graceful_shutdown=int(LAST_ANSWERS_S),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1.2",
    )
    config.load()
    return config


class Server(uvicorn.Server):
    """uvicorn, which on the first signal lets running requests finish and refuses new ones, on the second ends.

    It watches the engine, and ends with another exit status when that is gone.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        """`serving`: what all routes share."""
        super().__init__(config)
        self.exit_status = 0
        self._serving = serving
        self._ending: asyncio.Task[None] | None = None
        self._tls = _TlsFiles(serving.args)
        self._next_check = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn's own would be raised again in the end, and hide the exit status."""
        if self._serving.draining:
            self.should_exit = self.force_exit = True
        self._serving.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._ending is None:
            now = asyncio.get_running_loop().time()
            if self._serving.draining:
                self._ending = asyncio.create_task(self._drain())
            elif now >= self._next_check:
                self._next_check = now + HEALTH_INTERVAL_S
                await self._check_engine()
                if self.config.ssl is not None and self._serving.args.enable_ssl_refresh:
                    self._tls.refresh(self.config.ssl)
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        """Let what runs finish, as long as it may take, then answer the rest with an error."""
        serving, timeout = self._serving, self._serving.args.shutdown_timeout
        logger.info("shutting down: %d requests get %g s to finish", len(serving.open), timeout)
        with contextlib.suppress(EngineDeadError):
            if await serving.llm.drain(timeout) and serving.open:
                # All is made; what is left is to send it.
                await asyncio.wait(serving.open, timeout=LAST_ANSWERS_S)
        self._finish()

    async def _check_engine(self) -> None:
        try:
            await self._serving.llm.check_health()
        except EngineDeadError as error:
            logger.error("the engine does not answer, ending: %s", error)
            self.exit_status = EXIT_ENGINE_DEAD
            self._ending = asyncio.create_task(self._mourn())

    async def _mourn(self) -> None:
        """Answer all that is open with an error, and say 503 for as long as a load balancer needs to see it."""
        # In a thread: it waits for the process, which may take its time to go, while answers are still to be sent.
        await asyncio.gather(asyncio.to_thread(self._serving.llm.shutdown), asyncio.sleep(DEAD_GRACE_S))
        self._finish()

    def _finish(self) -> None:
        """End all that is open; the errors that it is answered with are still sent."""
        self._serving.draining = True
        self._serving.stop_open_requests()
        self.should_exit = True


class _TlsFiles:
    """Loads certificate and key again when they were replaced."""

    def __init__(self, args: ServerArgs) -> None:
        """Remember how the files are now."""
        self._args = args
        self._seen = self._times()

    def _times(self) -> list[int]:
        files = [file for file in (self._args.ssl_certfile, self._args.ssl_keyfile, self._args.ssl_ca_certs) if file]
        with contextlib.suppress(OSError):  # in the middle of being replaced
            return [os.stat(file).st_mtime_ns for file in files]
        return []

    def refresh(self, context: ssl.SSLContext) -> None:
        """New connections get what the files hold now; files that cannot be used leave things as they are."""
        times = self._times()
        if times == self._seen or not times or self._args.ssl_certfile is None:
            return
        self._seen = times
        try:
            # Where it does no harm first: a certificate without its key, when one is replaced and not yet the other,
            # would go into the context and throw the old key out.
            for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                one.load_cert_chain(self._args.ssl_certfile, self._args.ssl_keyfile)
                if self._args.ssl_ca_certs is not None:
                    one.load_verify_locations(self._args.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            logger.error("the new TLS files cannot be used, the old ones stay: %s", error)
        else:
            logger.info("TLS files were loaded again")
