"""`tito-audit serve`: an OpenAI-compatible gateway that keeps rollouts clean."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from tito_audit.cli._options import Options
from tito_audit.errors import SetupError
from tito_audit.parser import Parser, Reads
from tito_audit.parsers import guess_parser, parser_named, start_answer
from tito_audit.provider import ProviderOptions
from tito_audit.providers import key_of, open_provider
from tito_audit.render.renderer import Renderer
from tito_audit.rows import record_digest
from tito_audit.run.template import open_template
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.errors import Refused
from tito_audit.sessions.engine import Conversations, Limits
from tito_audit.sessions.fit import describe_tokenizer_difference
from tito_audit.templates.append_only import check_append_only
from tito_audit.terminal.escape import inert, shell_word, visible

if TYPE_CHECKING:
    from tito_audit.serve.gateway import Gateway, Parsers

_NEEDED = ("aiohttp", "prometheus_client")
_KEY = "TITO_AUDIT_API_KEY"
_AUTO, _NONE, _SERVER = "auto", "none", "server"


def serve(options: Options) -> None:
    """Serve an OpenAI-compatible gateway."""
    settings = options.settings()
    for name in _NEEDED:
        if find_spec(name) is None:
            raise SetupError(f"serve needs {name}, which is not installed.\npip install 'tito-audit[serve]'")
    if (notice := options.config_notice()) is not None:
        _print_lines([notice])
    from tito_audit.serve.app import HttpOptions, ServerOptions
    from tito_audit.serve.app import serve as serve_gateway
    from tito_audit.serve.gateway import Gateway

    async def run() -> None:
        if settings.tokenizer is None:
            raise SetupError(
                "serve: no tokenizer is given.\nPass the model's: --tokenizer with its folder or name."
            )
        opened = open_template(settings)
        renderer, tokenizer = opened.renderer, opened.tokenizer
        assert tokenizer is not None, "a tokenizer was named"
        tokenizer.load()
        parsers, parser_lines = _choose_parsers(options.tool_parser, options.reasoning_parser, renderer)
        source = open_provider(options.provider, ProviderOptions(options.model, key_of(options.provider)))
        limits = Limits(sessions=options.max_sessions)
        # Random names: the log may hold sessions of an earlier gateway.
        conversations = Conversations(tokenizer, renderer, limits=limits, new_id=lambda: f"s-{uuid4().hex[:16]}")
        name = options.model_name or source.model or "default"
        by_server = options.tool_parser == _SERVER
        if by_server and not hasattr(source, "derender"):
            raise SetupError(
                f"--tool-parser server: {source.name} cannot parse answers.\nChoose a parser by name."
            )
        calls = CallLog(Path(options.log), sync=options.fsync)
        start = partial(start_answer, *parsers)
        gateway = Gateway(source, tokenizer, conversations, calls, name, start, by_server, parsers)
        file = tokenizer.folder / "tokenizer.json" if tokenizer.folder is not None else None
        of_file = {"tokenizer_digest": record_digest(file)} if file is not None and file.is_file() else {}
        gateway.digests = {**of_file, "template_digest": record_digest(renderer.template(False).source)}
        key = options.api_key or os.environ.get(_KEY) or None
        notes = [*parser_lines, *await _check_start(gateway, options, key)]
        template = "template: append-only; a growing conversation never forks"
        if not (append := check_append_only(renderer)).is_append_only:
            broken = sorted({f"{step.answer_kind} before {step.next_speaker}" for step in append.broken})
            what = ", ".join(broken) or "every answer"
            template = f"template: rewrites history ({what}); calls after that fork, and the log says why"

        def started(address: str) -> None:
            served = f"serving {gateway.model} at {address}/v1, from {gateway.provider.name}"
            place = f"log: {gateway.log.path}" + (", each line synced to disk" if options.fsync else "")
            secret = "…" if key else "none"
            agents = (
                f"agents: OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={secret}",
                f'Responses API: the same; in Codex base_url = "{address}/v1", web_search = "disabled"',
                f"Anthropic's API: ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={secret} "
                f"ANTHROPIC_MODEL={shell_word(gateway.model)}",
            )
            _print_lines([served, place, f"tokenizer: {tokenizer.name}", template, *notes, *agents])

        http = HttpOptions(key, options.max_body, partial(print, file=sys.stderr) if options.access_log else None)
        await serve_gateway(
            gateway, http, ServerOptions(options.host, options.port, options.idle, options.grace), started
        )
        _print_lines([f"ended; {gateway.log.path} has every answer"])

    asyncio.run(run())


def _choose_parsers(tool_parser: str, reasoning_parser: str, renderer: Renderer) -> tuple[Parsers, list[str]]:
    """The parsers of reasoning and of tools, and a line about each; (None, None) where the server parses."""
    if tool_parser == _SERVER:
        if reasoning_parser not in (_AUTO, _SERVER):
            raise SetupError(
                f"--reasoning-parser {reasoning_parser}: with --tool-parser server the server reads reasoning "
                "too.\nLeave --reasoning-parser out, or choose both parsers by name."
            )
        return (None, None), ["parsers: the server's own; answers are streamed only when complete"]
    template = renderer.template(True).source
    tools, tools_line = _choose_parser(tool_parser, Reads.TOOLS, template)
    reasoning, reasoning_line = _choose_parser(reasoning_parser, Reads.REASONING, template)
    return (reasoning, tools), [tools_line, reasoning_line]


def _choose_parser(name: str, reads: Reads, template: str) -> tuple[Parser | None, str]:
    word = "tool parser" if reads is Reads.TOOLS else "reasoning parser"
    if name == _NONE:
        return None, f"{word}: none"
    if name == _AUTO:
        guess = guess_parser(template, reads)
        return guess.parser, guess.line
    return parser_named(name, reads), f"{word}: {name}"


async def _check_start(gateway: Gateway, options: Options, key: str | None) -> list[str]:
    """Notes about provider, log and host for the user; SetupError if the provider has another tokenizer."""
    from tito_audit.serve.app import check_fit

    renames, force = options.model_name is None, options.force  # clients use the provider's name of the model
    difference, note = await check_fit(gateway.provider, gateway.tokenizer)
    if difference is not None and not force:
        raise SetupError(
            f"--tokenizer {gateway.tokenizer.name}: this is not the model's tokenizer.\n{difference}.\n"
            "Pass the folder of the served model, or --allow-mismatch to send these ids anyway."
        )
    _take_provider_name(gateway, renames=renames)
    if note is not None:
        gateway.deferred_check = partial(_check_late_provider, renames=renames, force=force)
    notes = [f"warning: {difference}"] if difference is not None else []
    notes += [note] if note is not None else []
    if gateway.log.was_torn:
        notes.append("the log ended in the middle of a line, as after a crash; new lines start after it")
    local = options.host == "localhost"
    with suppress(ValueError):
        local = ip_address(options.host).is_loopback
    if key is None and not local:
        notes.append(f"warning: anyone who can reach {options.host} can use it; set {_KEY} to require a key")
    return notes


async def _check_late_provider(gateway: Gateway, *, renames: bool, force: bool) -> None:
    """Check a server that was down at the start; Refused if it has another tokenizer."""
    await gateway.provider.find_model()  # type: ignore[attr-defined]
    _take_provider_name(gateway, renames=renames)
    difference = await describe_tokenizer_difference(gateway.provider, gateway.tokenizer)
    if difference is not None and not force:
        why = f"the tokenizer of this gateway is not the tokenizer of the model: {difference}"
        raise Refused(why, status=502, code="wrong_tokenizer")


def _take_provider_name(gateway: Gateway, *, renames: bool) -> None:
    if renames and gateway.provider.model is not None:
        gateway.model = gateway.provider.model


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"tito-audit: {inert(visible(line))}", file=sys.stderr, flush=True)
