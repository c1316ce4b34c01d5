"""The command and a scan as tests run them, and logs as they write them.

In this process a run is as new as in its own: what it is told, what it reads and what it prints. Only what is the
same each time is made once: the parser of the command line, the code of a chat template, and a tokenizer out of
files that did not change. Tests about these call `load_tokenizer` or a process of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tokenizers
import typer.main
import typer.testing
from typer.testing import CliRunner

from tests.ready import forked
from tests.tiers import DEEP
from tito_audit import Result, Settings, scan_rollouts
from tito_audit.cli import app
from tito_audit.render.sandbox import ChatEnvironment
from tito_audit.render.template import Template
from tito_audit.run.tasks import strip_rollout
from tito_audit.summary import Summary
from tito_audit.tokens import load
from tito_audit.tokens.cache import cache_folder
from tito_audit.tokens.tokenizer import Tokenizer

__all__ = ["become", "loaded", "loading_once", "run", "scanned", "unchanged", "written"]


def run(
    *arguments: object, env: Mapping[str, str | None] | None = None, stdin: bytes | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    with loading_once():
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def become(*arguments: object, env: Mapping[str, str]) -> NoReturn:
    """Run the command to its end in this process, a fork of one that has loaded it; `make deep` starts it anew."""
    words = [str(argument) for argument in arguments]
    if DEEP:
        os.execve(sys.executable, [sys.executable, "-m", "tito_audit", *words], dict(env))
    forked(words, env)


def written(path: Path, rows: Iterable[object]) -> Path:
    """The path, once the rows are written there as JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def scanned(
    logs: Any, jobs: int | None = None, chunk: int | None = None, *, observe: bool = False, **options: Any
) -> tuple[list[Result], Summary]:
    """What a scan in chunks of so many bytes says, without its clock and what only one process holds."""
    scan = scan_rollouts(logs, Settings(jobs=jobs, **options), observe=observe)
    scan.chunk_bytes = chunk
    results = [strip_rollout(result) for result in scan]
    scan.summary.seconds = 0.0
    return results, scan.summary


def loaded(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, loaded once for all tests of this process, also for modules that load anew."""
    with loading_once():
        return load.load_tokenizer(str(folder))


@contextmanager
def loading_once() -> Iterator[None]:
    """Inside, parser, templates and tokenizers are those of an earlier run where these are the same."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.testing, "_get_command", _parser)
        patched.setattr(ChatEnvironment, "compile", _code)
        patched.setattr(Template, "_read_facts", _reading)
        patched.setattr(load, "_load_json", _tokenizer)
        yield


_parser = cache(typer.main.get_command)
_compile = ChatEnvironment.compile
_read = Template._read_facts
_from_files = load._load_json
_codes: dict[str, Any] = {}
_readings: dict[str, Any] = {}
_tokenizers: dict[object, tuple[Tokenizer, object]] = {}


def _code(self: ChatEnvironment, source: Any, *arguments: Any, **options: Any) -> Any:
    """The code of a template, which holds nothing of the environment that it was compiled in."""
    if not isinstance(source, str) or arguments or options:
        return _compile(self, source, *arguments, **options)
    if source not in _codes:
        _codes[source] = _compile(self, source)
    return _codes[source]


def _reading(self: Template) -> Any:
    """The facts of a template, with its opener in the environment of the template that asks."""
    if self.source not in _readings:
        _readings[self.source] = _read(self)
    facts, opener = _readings[self.source]
    return facts, opener and opener.set_environment(self._reference.environment)


def _tokenizer(path: Path, name: str) -> Tokenizer:
    """The tokenizer of a folder, which remembers nothing of an earlier run."""
    if cache_folder() is not None:
        return _from_files(path, name)
    key = tuple((str(file), *_stamp(file)) for file in sorted(path.rglob("*")))
    if key not in _tokenizers:
        loaded = _from_files(path, name)
        _tokenizers[key] = loaded, _traits(loaded)
    return replace(_tokenizers[key][0], name=name)


def unchanged() -> bool:
    """Whether the tokenizers that runs share are as they were loaded."""
    return all(_traits(tokenizer) == traits for tokenizer, traits in _tokenizers.values())


def _traits(tokenizer: Tokenizer) -> object:
    """What a test that changes a tokenizer in place would change."""
    backend, templates = tokenizer.backend, dict(tokenizer.chat_templates)
    if not isinstance(backend, tokenizers.Tokenizer):
        return templates
    return backend.get_vocab_size(), str(backend.normalizer), str(backend.pre_tokenizer), templates


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with a file's content."""
    status = os.stat(file)  # noqa: PTH116  a pipe or a link that leads nowhere is for the loader to speak of
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode
