"""The exit codes, the same for every command, and where each is said."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXIT_CODES", "FAILED", "INTERRUPTED", "READER_GONE", "TERMINATED", "UNMADE", "epilog"]

FAILED = 1
UNMADE = 2
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143

EXIT_CODES: Mapping[int, tuple[str, str]] = {
    0: ("passed", "The run was made and nothing fails it."),
    FAILED: (
        "failed",
        "The run was made and its result is bad: findings that fail the gate, rows that no repair cured, or what "
        "a conversion would lose.",
    ),
    UNMADE: (
        "no result",
        "The run could not be made: no such file, a wrong flag or setting, no tokenizer where one is needed. "
        "stderr says what to do. A crash is also 2, so that it never passes for findings.",
    ),
    INTERRUPTED: ("interrupted", "Ctrl-C. No report was finished; files appear whole or not at all."),
    READER_GONE: ("reader gone", "The reader of stdout went away, as in `| head`."),
    TERMINATED: ("terminated", "SIGTERM, as when a job is cancelled. What holds for Ctrl-C holds here."),
}
"""Word and sentence of each; no command ends with another by itself."""


def epilog() -> str:
    """The codes in one line of the help."""
    words = [f"{code} {word}" for code, (word, _) in EXIT_CODES.items()]
    return f"Exit codes: {', '.join(words)}."
