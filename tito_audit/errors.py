"""What a caller may catch.

    TitoAuditError
    ├── SetupError      the run cannot start: no such file, no template, a bad setting (exit 2)
    │   └── TokenizerError   a tokenizer folder or name that cannot be used
    │       └── EncodeError   a text that a tokenizer cannot encode; in an audit it becomes finding REC001
    ├── StorageError    a file that cannot be opened, or is not what it claims to be (exit 2)
    ├── RecordError     a row that fits no format, or whose values make no sense (REC001)
    ├── RenderError     a chat template that cannot render the messages (TPL211)
    ├── PluginError     a rule, repair or report that fails: a bug of the tool, never of the log (exit 2)
    ├── ProviderError   a model or server that refuses a call, fails, or returns something else (exit 2)
    ├── GateError       too many rows of a batch fail, so that training has to stop
    ├── ChoiceError     an API answer without logprobs or without ids; also a ValueError
    └── SpliceError     a prompt with no place for the sampled tokens; also a ValueError

`SetupError`, `StorageError` and `PluginError` end a run. `RecordError`, `RenderError` and, in an audit,
`EncodeError` never do: they become findings. `SpliceError`, `ChoiceError` and `GateError` come only from functions
that a program calls itself, and are for it to catch. A message says where, what, why it matters and what to do:
with the flags to pass on the command line, with arguments in a Python program.

To add one, subclass the branch with the same exit code and document it here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from tito_audit.voice import for_reader

_PACKAGE = Path(__file__).parent


class TitoAuditError(Exception):
    """Base of every error that tito-audit raises on purpose."""

    _ends_run = False
    """Whether a person reads the message; others are quoted in findings, which read the same everywhere."""

    def __str__(self) -> str:
        message = super().__str__()
        return for_reader(message) if self._ends_run else message


def _short_traceback(error: TitoAuditError) -> list[str]:
    """The traceback that a notebook shows for a user's mistake: the message below the user's own frames."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _PACKAGE not in Path(frame.filename).parents and "IPython" not in Path(frame.filename).parts
    ]
    lines = "".join(traceback.format_list(frames)) + f"{type(error).__name__}: {error}"
    # A message may quote a log, so control characters are escaped.
    shown = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in lines)
    return "".join(shown).split("\n")


class SetupError(TitoAuditError):
    """The run cannot start until a setting, a path or an option changes.

    flag   the flag whose value is wrong; None where the message names it, or where no flag is to blame
    """

    _ends_run = True
    _render_traceback_ = _short_traceback

    def __init__(self, message: str, *, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag


class TokenizerError(SetupError):
    """A tokenizer folder or hub name that cannot be used."""


class EncodeError(TokenizerError):
    """A text that a tokenizer cannot encode, or not within its limits; for a row of a log finding REC001."""


class StorageError(TitoAuditError):
    """A file that cannot be read as a log at all."""

    _ends_run = True
    _render_traceback_ = _short_traceback


class RecordError(TitoAuditError):
    """One row that cannot be read as a rollout; becomes finding REC001."""


class RenderError(TitoAuditError):
    """A chat template that cannot render these messages; becomes finding TPL211."""


class PluginError(TitoAuditError):
    """A rule, repair or report that failed on a row: a bug, told with the row and how to go on."""

    _ends_run = True


class GateError(TitoAuditError):
    """A gate stops training: more rows of a batch fail than it allows.

    step         the step of the batch
    metrics      the numbers of the batch for the tracker
    """

    _ends_run = True

    def __init__(self, message: str, *, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.metrics = metrics or {}


class ChoiceError(TitoAuditError, ValueError):
    """An API response that cannot become a rollout: it has no logprobs, no tokens, or no ids for them."""


class SpliceError(TitoAuditError, ValueError):
    """Sampled tokens that cannot be spliced into a prompt, because their last turn is not in it."""


class ProviderError(TitoAuditError):
    """A model or server that refuses a call, fails, or does not return ids and logprobs.

    status       the HTTP status of the response; None when there was none
    body         the start of the response body; None when there was none
    prompt_seen  the prompt that a server says it was given, where it is not the one that was sent; else None
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str | None = None,
        prompt_seen: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.prompt_seen = prompt_seen


ODD_VALUES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Python raises where code meets a value that it does not expect; covers RecursionError, a RuntimeError."""


def describe_error(error: BaseException) -> str:
    """An unexpected error and where it was raised in this package: `KeyError 'x' in formats/tinker.py (_read)`."""
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    text = str(error).partition("\n")[0][:200]
    files = [(Path(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [(file.relative_to(_PACKAGE).as_posix(), name) for file, name in files if _PACKAGE in file.parents]
    where = f" in {ours[-1][0]} ({ours[-1][1]})" if ours else ""
    return f"{type(error).__name__}{' ' if text else ''}{text}{where}"
