"""The command line: one file per command, and the exit codes in `_exit.py`.

A user's mistake is one message on stderr, never a traceback. A traceback means a bug; it exits with 2, so that a
crash is never mistaken for findings. As in a shell, a run ended by a signal exits with 128 plus its number, and a
run whose reader closed the pipe (`| head`) before the result was known exits with 141.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from tito_audit import __version__
from tito_audit.cli._command import (
    SUMMARIES,
    Command,
    UsageError,
    explain_mistake,
    make_command,
    refuse_unknown_command,
)
from tito_audit.cli._exit import (
    HUNG_UP,
    INTERRUPTED,
    NO_RESULT,
    READER_GONE,
    TERMINATED,
    discard_stdout,
    epilog,
    prepare_streams,
    print_message,
    system_error_words,
)
from tito_audit.cli._options import config_error_lines
from tito_audit.errors import TitoAuditError
from tito_audit.signals import exit_on_signals
from tito_audit.voice import messages_name_flags

__all__ = ["app", "main"]

_SIGNAL_MESSAGES = {
    INTERRUPTED: "interrupted; no report was finished",
    TERMINATED: "terminated; no report was finished",
    HUNG_UP: "the terminal is gone; no report was finished",
}
"""The message of a run that a signal ended, by its exit code."""


class _LazyCommands(Mapping[str, Any]):
    """The Typer commands by name; each is built on first access, so a run imports only its own."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(name, cls=Command, short_help=SUMMARIES[name])(make_command(name))
            self._built[name] = typer.main.get_command(alone)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


_COMMANDS = _LazyCommands()


class _Commands(TyperGroup):
    """The root command: loads its commands lazily and turns every expected end of a run into an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = self.commands or cast("Any", _COMMANDS)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        with _exit_on_error(None):
            return super().make_context(info_name, args, parent, **extra)

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            refuse_unknown_command(args[0], [*self.commands])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _exit_on_error(ctx):
            returned = super().invoke(ctx)
            sys.stdout.flush()
            return returned


@contextmanager
def _exit_on_error(ctx: Any) -> Iterator[None]:
    """Print a message for each expected exception of the block, and raise typer.Exit with its exit code."""
    try:
        with messages_name_flags():
            yield
    except TitoAuditError as error:
        _print_error(error, ctx)
        raise typer.Exit(NO_RESULT) from None
    except UsageError as error:
        if (message := explain_mistake(error, ctx)) is None:
            raise
        _print_error(message, getattr(error, "ctx", None) or ctx)
        raise typer.Exit(NO_RESULT) from None
    except KeyboardInterrupt:
        print_message(_SIGNAL_MESSAGES[INTERRUPTED])
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(READER_GONE) from None
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (words := system_error_words(error)) is None:
            raise
        print_message(words)
        raise typer.Exit(NO_RESULT) from None


app = typer.Typer(
    name="tito-audit",
    cls=_Commands,
    no_args_is_help=True,
    epilog=epilog(),
    rich_markup_mode=None,  # importing rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tito-audit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find every break of token-in-token-out in reinforcement-learning rollout logs, and repair it."""


def main() -> None:
    """Run the command line."""
    # numpy starts BLAS threads on import, which costs a small scan 0.1 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atexit.register(gc.freeze)  # collecting the imported objects at exit would cost 0.05 s
    prepare_streams()
    exit_on_signals()
    try:
        app()
    except SystemExit as end:
        code: Any = end.code
        if code in (HUNG_UP, TERMINATED):
            print_message(_SIGNAL_MESSAGES[code])
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stdout()
            code = READER_GONE
        except TitoAuditError as error:  # what was printed cannot be written
            discard_stdout()
            if code not in (NO_RESULT, *_SIGNAL_MESSAGES):
                _print_error(error, None)
                code = NO_RESULT
        sys.exit(code)
    except KeyboardInterrupt:  # before the command has begun
        print_message(_SIGNAL_MESSAGES[INTERRUPTED])
        sys.exit(INTERRUPTED)
    except BaseException as error:  # a panic in a Rust library is not an Exception
        if (words := system_error_words(error)) is not None:
            print_message(words)
            sys.exit(NO_RESULT)
        traceback.print_exc()
        print_message("this is a bug in tito-audit, not a fault of the log.")
        sys.exit(NO_RESULT)


def _print_error(error: TitoAuditError, ctx: Any) -> None:
    from tito_audit.terminal.escape import inert, visible

    with messages_name_flags():
        blamed = config_error_lines(ctx, error) if ctx is not None else []
        lines = [inert(visible(line)) for line in (*str(error).split("\n"), *blamed)]
    print_message("\n".join(lines))
