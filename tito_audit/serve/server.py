"""Runs the gateway as a server until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http import HttpProcessingError

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import TokenProvider
from tito_audit.serve.app import HttpOptions, make_app
from tito_audit.serve.gateway import Gateway
from tito_audit.sessions.fit import misfit
from tito_audit.tokens.tokenizer import Tokenizer

_HTTP_LOG = logging.getLogger("aiohttp.server")
_SWEEPS = 30.0
"""The longest time between searches for idle sessions, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server's address, and how it shuts down."""

    host: str = "127.0.0.1"
    port: int = 8377
    """0: any free one."""
    idle: float = 3600.0
    """Seconds after which an unused session leaves memory."""
    grace: float = 10.0
    """Seconds that running calls have to finish when the server shuts down."""


async def serve(
    gateway: Gateway, http: HttpOptions, options: ServerOptions, started: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `started` gets the address. SetupError if it is in use.

    Running calls have `grace` seconds to finish and are then cut off; the log and the provider are closed.
    """
    stop = asyncio.Event()
    _HTTP_LOG.addFilter(_is_ours)
    runner = web.AppRunner(
        make_app(gateway, http), handler_cancellation=True, shutdown_timeout=options.grace, access_log=None
    )
    await runner.setup()

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(_SWEEPS, max(options.idle / 2, 0.05)))
            gateway.conversations.drop_idle(gateway.clock() - options.idle)

    sweeping = asyncio.ensure_future(sweep())
    try:
        try:
            await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
        except OSError as error:
            raise SetupError(
                f"--port {options.port}: {options.host}:{options.port} cannot be used ({error.strerror}).\n"
                "Choose another port, or 0 for any free one."
            ) from None
        host = f"[{options.host}]" if ":" in options.host else options.host
        started(f"http://{host}:{runner.addresses[0][1]}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError):
                loop.add_signal_handler(number, stop.set)
        gc.collect()
        gc.freeze()  # Everything loaded by now stays for good: keep the garbage collector off it.
        await stop.wait()
    finally:
        sweeping.cancel()
        await runner.cleanup()
        _HTTP_LOG.removeFilter(_is_ours)
        await gateway.provider.close()
        gateway.log.close()


async def fit_notice(provider: TokenProvider, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Why the gateway must not serve, and a notice for the user; at least one of them is None.

    The provider knows the name of its model afterwards, if its server answers.
    """
    find = getattr(provider, "find_model", None)
    try:
        if find is not None:
            await find()
        return await misfit(provider, tokenizer), None
    except ProviderError as error:
        return None, f"the server's tokenizer was not compared: {error}"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether this is an error of the gateway: not a bad request, and not a client that left."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)
