"""The command line: one file per command, and the exit codes in `_ends.py`.

A user's mistake is one message on stderr, never a traceback. A traceback is a bug, and also exits with 2, so that
a crash is never mistaken for findings. A run that a signal ends exits with 128 and its number, and one whose
reader closed the pipe (`| head`) before the result was known with 141, as in a shell.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from tito_audit import __version__
from tito_audit.cli._ends import (
    HUNG_UP,
    INTERRUPTED,
    READER_GONE,
    TERMINATED,
    UNMADE,
    complain,
    epilog,
    give_up_stdout,
    ready_streams,
    refusal,
)
from tito_audit.cli._help import SUMMARIES, Command, UsageError, mistake, refuse_unknown_command
from tito_audit.errors import TitoAuditError
from tito_audit.signals import exit_on_signals
from tito_audit.voice import messages_name_flags

__all__ = ["app", "main"]

_ENDED = {
    INTERRUPTED: "interrupted; no report was finished",
    TERMINATED: "terminated; no report was finished",
    HUNG_UP: "the terminal is gone; no report was finished",
}
"""What is words of a run that a signal ended, by its exit code."""


class _Modules(Mapping[str, Any]):
    """The commands by name, each made when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        return _loaded(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


@cache
def _loaded(name: str) -> Any:
    """A command; KeyError if there is none of this name."""
    summary = SUMMARIES[name]
    from tito_audit.cli._command import command

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=Command, short_help=summary)(command(name))
    return typer.main.get_command(alone)


class _Commands(TyperGroup):
    """The command group; maps every expected end of a run to its exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = self.commands or cast("Any", _Modules())

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        with _ended(None):
            return super().make_context(info_name, args, parent, **extra)

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            refuse_unknown_command(args[0], [*self.commands])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _ended(ctx):
            returned = super().invoke(ctx)
            sys.stdout.flush()
            return returned


@contextmanager
def _ended(ctx: Any) -> Iterator[None]:
    """A block whose expected ends become a message and typer.Exit with their code."""
    try:
        with messages_name_flags():
            yield
    except TitoAuditError as error:
        _complain(error, ctx)
        raise typer.Exit(UNMADE) from None
    except UsageError as error:
        if (message := mistake(error, ctx)) is None:
            raise
        _complain(message, getattr(error, "ctx", None) or ctx)
        raise typer.Exit(UNMADE) from None
    except KeyboardInterrupt:
        complain(_ENDED[INTERRUPTED])
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        give_up_stdout()
        raise typer.Exit(READER_GONE) from None
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (words := refusal(error)) is None:
            raise
        complain(words)
        raise typer.Exit(UNMADE) from None


app = typer.Typer(
    name="tito-audit",
    cls=_Commands,
    no_args_is_help=True,
    epilog=epilog(),
    rich_markup_mode=None,  # importing rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tito-audit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find every break of token-in-token-out in reinforcement-learning rollout logs, and repair it."""


def main() -> None:
    """Run the command line."""
    # On import numpy starts threads for linear algebra, a tenth of a second in a small scan.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atexit.register(gc.freeze)  # collecting imported objects at exit would cost a twentieth of a second
    ready_streams()
    exit_on_signals()
    try:
        app()
    except SystemExit as end:
        sys.exit(_flushed(end.code))
    except KeyboardInterrupt:  # before the command has begun
        complain(_ENDED[INTERRUPTED])
        sys.exit(INTERRUPTED)
    except BaseException as error:  # what a library in Rust panics with is no Exception
        if (words := refusal(error)) is not None:
            complain(words)
            sys.exit(UNMADE)
        traceback.print_exc()
        complain("this is a bug in tito-audit, not a fault of the log.")
        sys.exit(UNMADE)


def _flushed(code: Any) -> Any:
    """The code of a run, once stdout has taken all that was printed; another one if it does not."""
    if code in (HUNG_UP, TERMINATED):
        complain(_ENDED[code])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_stdout()
        return READER_GONE
    except TitoAuditError as error:
        give_up_stdout()
        if code not in (UNMADE, *_ENDED):
            _complain(error, None)
            return UNMADE
    return code


def _complain(error: TitoAuditError, ctx: Any) -> None:
    from tito_audit.cli._options import blamed_file
    from tito_audit.terminal.escape import inert, visible

    with messages_name_flags():
        blamed = blamed_file(ctx, error) if ctx is not None else []
        lines = [inert(visible(line)) for line in (*str(error).split("\n"), *blamed)]
    complain("\n".join(lines))
