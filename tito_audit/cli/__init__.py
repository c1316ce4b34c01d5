"""The command line: one file per command, and the exit codes in `_exits.py`.

A user's mistake is one message on stderr, never a traceback. A traceback is a bug, and also exits with 2, so that
a crash is never mistaken for findings. An interrupted run exits with 130, and one whose reader closed the pipe (`|
head`) with 141, as in a shell.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tito_audit import __version__
from tito_audit.cli import (
    config,
    convert,
    explain,
    identify,
    inspect,
    repair,
    rescore,
    scan,
    serve,
    show,
    template,
)
from tito_audit.cli import list as list_command
from tito_audit.cli._exits import INTERRUPTED, READER_GONE, UNMADE, epilog
from tito_audit.cli._help import SUMMARIES, Command, UsageError
from tito_audit.cli._usage import mistake, refuse_unknown_command
from tito_audit.errors import TitoAuditError

__all__ = ["app", "main"]

_INTERRUPTED = "tito-audit: interrupted; no report was finished"
_NEW_OBJECTS = 100_000
"""Net allocations before Python's garbage collector runs."""


class _Commands(TyperGroup):
    """The command group; maps every expected end of a run to its exit code."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except UsageError as error:
            _complain_of(error, None)

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            refuse_unknown_command(args[0], [*self.commands])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()
            return returned
        except TitoAuditError as error:
            _complain(error, ctx)
            raise typer.Exit(UNMADE) from None
        except UsageError as error:
            _complain_of(error, ctx)
        except KeyboardInterrupt:
            print(_INTERRUPTED, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes stdout once more as it exits, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(READER_GONE) from None


app = typer.Typer(
    name="tito-audit",
    cls=_Commands,
    no_args_is_help=True,
    epilog=epilog(),
    rich_markup_mode=None,  # importing rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("scan", cls=Command, short_help=SUMMARIES["scan"])(scan.scan)
app.command("repair", cls=Command, short_help=SUMMARIES["repair"])(repair.repair)
app.command("convert", cls=Command, short_help=SUMMARIES["convert"])(convert.convert)
app.command("show", cls=Command, short_help=SUMMARIES["show"])(show.show)
app.command("identify", cls=Command, short_help=SUMMARIES["identify"])(identify.identify)
app.command("inspect", cls=Command, short_help=SUMMARIES["inspect"])(inspect.inspect)
app.command("template", cls=Command, short_help=SUMMARIES["template"])(template.template)
app.command("rescore", cls=Command, short_help=SUMMARIES["rescore"])(rescore.rescore)
app.command("serve", cls=Command, short_help=SUMMARIES["serve"])(serve.serve)
app.command("config", cls=Command, short_help=SUMMARIES["config"])(config.config)
app.command("explain", cls=Command, short_help=SUMMARIES["explain"])(explain.explain)
app.command("list", cls=Command, short_help=SUMMARIES["list"])(list_command.list_plugins)


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
    # Garbage collection of imported objects would cost a twentieth of a second, mostly at exit.
    gc.set_threshold(_NEW_OBJECTS)
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        # A terminal with another encoding shows escapes instead of ending the run.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:  # before the command has begun
        print(_INTERRUPTED, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception:
        traceback.print_exc()
        print("tito-audit: this is a bug in tito-audit, not a fault of the log.", file=sys.stderr)
        sys.exit(UNMADE)


def _complain_of(error: Exception, ctx: Any) -> NoReturn:
    """End a run with a mistake in its command line."""
    said = mistake(error, ctx)
    if said is None:
        raise error
    _complain(said, getattr(error, "ctx", None) or ctx)
    raise typer.Exit(UNMADE) from None


def _complain(error: TitoAuditError, ctx: Any) -> None:
    from tito_audit.cli._configured import blamed_file
    from tito_audit.terminal.escape import inert, visible

    blamed = blamed_file(ctx, error) if ctx is not None else []
    lines = [inert(visible(line)) for line in (*str(error).split("\n"), *blamed)]
    print("tito-audit: " + "\n".join(lines), file=sys.stderr)
