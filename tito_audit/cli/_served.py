"""Starts what `serve` needs, and prints what it started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from tito_audit.errors import SetupError
from tito_audit.parser import ParseOptions, Parser, ParserRun, Reads
from tito_audit.settings.model import Settings
from tito_audit.terminal.escape import inert, visible

if TYPE_CHECKING:
    from tito_audit.render.renderer import Renderer
    from tito_audit.serve.gateway import Gateway, StartParser
    from tito_audit.tokens.tokenizer import Tokenizer

_NEEDED = ("aiohttp", "prometheus_client")
_KEY = "TITO_AUDIT_API_KEY"
_AUTO, _NONE, _SERVER = "auto", "none", "server"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command."""

    settings: Settings
    provider: str
    log: str
    model: str | None
    model_name: str | None
    host: str
    port: int
    api_key: str | None
    tool_parser: str
    reasoning_parser: str
    max_body: int
    max_sessions: int
    idle: float
    grace: float
    fsync: bool
    access_log: bool
    force: bool


@dataclass(frozen=True, slots=True)
class _Parsers:
    """The parsers of answers, and a line about each."""

    tools: Parser | None
    reasoning: Parser | None
    lines: tuple[str, ...]

    def start(self, options: ParseOptions) -> ParserRun:
        """The parsing of one answer."""
        from tito_audit.parsers import start_answer

        return start_answer(self.reasoning, self.tools, options)


def run_gateway(wanted: Wanted, notice: str | None) -> None:
    """Serve until the process is told to end."""
    for name in _NEEDED:
        if find_spec(name) is None:
            raise SetupError(f"serve needs {name}, which is not installed.\npip install 'tito-audit[serve]'")
    if notice is not None:
        _say([notice])
    asyncio.run(_run(wanted))


async def _run(wanted: Wanted) -> None:
    from tito_audit.serve.app import HttpOptions
    from tito_audit.serve.server import ServerOptions, serve

    tokenizer, renderer = _loaded(wanted.settings)
    parsers = _chosen_parsers(wanted, renderer)
    gateway = _gateway(wanted, tokenizer, renderer, parsers.start)
    notes = [*parsers.lines, *await _notes(wanted, gateway)]
    key = wanted.api_key or os.environ.get(_KEY) or None
    if key is None and not _is_local(wanted.host):
        notes.append(f"warning: anyone who can reach {wanted.host} can use it; set {_KEY} to require a key")
    http = HttpOptions(key, wanted.max_body, _log_access if wanted.access_log else None)
    options = ServerOptions(wanted.host, wanted.port, wanted.idle, wanted.grace)
    template = _verdict(renderer)

    def started(address: str) -> None:
        served = f"serving {gateway.model} at {address}/v1, from {gateway.provider.name}"
        log = f"log: {gateway.log.path}" + (", each line synced to disk" if wanted.fsync else "")
        how = f"agents: OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={'…' if key else 'none'}"
        _say([served, log, f"tokenizer: {tokenizer.name}", template, *notes, how])

    await serve(gateway, http, options, started)
    _say([f"ended; {gateway.log.path} has every answer"])


def _loaded(settings: Settings) -> tuple[Tokenizer, Renderer]:
    """The tokenizer and the renderer of its template; SetupError where one is missing."""
    from tito_audit.run.template import open_template

    if settings.tokenizer is None:
        raise SetupError("serve: no tokenizer is given.\nPass the model's: --tokenizer with its folder or name.")
    opened = open_template(settings)
    assert opened.tokenizer is not None, "a tokenizer was named"
    opened.tokenizer.load()
    return opened.tokenizer, opened.renderer


def _gateway(wanted: Wanted, tokenizer: Tokenizer, renderer: Renderer, start: StartParser) -> Gateway:
    from tito_audit.provider import ProviderOptions
    from tito_audit.providers import key_of, open_provider
    from tito_audit.serve.call_log import CallLog
    from tito_audit.serve.gateway import Gateway
    from tito_audit.serve.server_parser import ParsingProvider
    from tito_audit.sessions.engine import Conversations, Limits

    provider = open_provider(wanted.provider, ProviderOptions(wanted.model, key_of(wanted.provider)))
    # Names that no earlier gateway gave, whose lines the log may hold.
    conversations = Conversations(
        tokenizer,
        renderer,
        limits=Limits(sessions=wanted.max_sessions),
        new_id=lambda: f"s-{uuid4().hex[:16]}",
    )
    log = CallLog(Path(wanted.log), sync=wanted.fsync)
    name = wanted.model_name or provider.model or "default"
    by_server = wanted.tool_parser == _SERVER
    if by_server and not isinstance(provider, ParsingProvider):
        raise SetupError(f"--tool-parser server: {provider.name} cannot parse answers.\nChoose a parser by name.")
    return Gateway(provider, tokenizer, conversations, log, name, start, by_server)


async def _check(wanted: Wanted, gateway: Gateway) -> None:
    """Ask a server that was down at the start what it serves; Refused if it has another tokenizer."""
    from tito_audit.serve.errors import Refused
    from tito_audit.serve.fit import misfit

    await gateway.provider.find_model()  # type: ignore[attr-defined]
    if wanted.model_name is None and gateway.provider.model is not None:
        gateway.model = gateway.provider.model
    found = await misfit(gateway.provider, gateway.tokenizer)
    if found is not None and not wanted.force:
        why = f"the tokenizer of this gateway is not the tokenizer of the model: {found}"
        raise Refused(why, status=502, code="wrong_tokenizer")


async def _notes(wanted: Wanted, gateway: Gateway) -> list[str]:
    """What the user should know before the first request; SetupError if the provider has another tokenizer."""
    from tito_audit.serve.fit import fit_notice

    misfit, note = await fit_notice(gateway.provider, gateway.tokenizer)
    if misfit is not None and not wanted.force:
        raise SetupError(
            f"--tokenizer {gateway.tokenizer.name}: this is not the model's tokenizer.\n{misfit}.\n"
            "Pass the folder of the served model, or --allow-mismatch to send these ids anyway."
        )
    if wanted.model_name is None and gateway.provider.model is not None:
        gateway.model = gateway.provider.model
    if note is not None:
        gateway.unchecked = partial(_check, wanted)
    torn = ["the log ended in the middle of a line, as after a crash; new lines start after it"]
    return [
        *([f"warning: {misfit}"] if misfit is not None else []),
        *([note] if note is not None else []),
        *(torn if gateway.log.was_torn else []),
    ]


def _chosen_parsers(wanted: Wanted, renderer: Renderer) -> _Parsers:
    if wanted.tool_parser == _SERVER:
        return _parsed_by_server(wanted)
    template = renderer.template(True).source
    tools, said = _parser(wanted.tool_parser, Reads.TOOLS, template)
    reasoning, also = _parser(wanted.reasoning_parser, Reads.REASONING, template)
    return _Parsers(tools, reasoning, (said, also))


def _parsed_by_server(wanted: Wanted) -> _Parsers:
    """The server's own parsers, which read reasoning too; none here."""
    if wanted.reasoning_parser not in (_AUTO, _SERVER):
        raise SetupError(
            f"--reasoning-parser {wanted.reasoning_parser}: with --tool-parser server the server reads reasoning "
            "too.\nLeave --reasoning-parser out, or choose both parsers by name."
        )
    return _Parsers(None, None, ("parsers: the server's own; answers are streamed only when complete",))


def _parser(name: str, reads: Reads, template: str) -> tuple[Parser | None, str]:
    from tito_audit.parsers import guess_parser, parser_named

    word = "tool parser" if reads is Reads.TOOLS else "reasoning parser"
    if name == _NONE:
        return None, f"{word}: none"
    if name == _AUTO:
        guess = guess_parser(template, reads)
        return guess.parser, guess.line
    return parser_named(name, reads), f"{word}: {name}"


def _verdict(renderer: Renderer) -> str:
    """Whether the template only appends, in a line."""
    from tito_audit.templates import append_only

    found = append_only(renderer)
    if found.holds:
        return "template: append-only; a growing conversation never forks"
    broken = sorted({f"{step.kind} before {step.next}" for step in found.broken})
    what = ", ".join(broken) or "every answer"
    return f"template: rewrites history ({what}); calls after that fork, and the log says why"


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(lines: list[str]) -> None:
    for line in _shown(lines):
        print(f"tito-audit: {line}", file=sys.stderr, flush=True)


def _shown(lines: list[str]) -> Iterator[str]:
    return (inert(visible(line)) for line in lines)


def _log_access(line: str) -> None:
    print(line, file=sys.stderr)
