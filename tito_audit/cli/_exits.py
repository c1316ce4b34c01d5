"""The exit codes, the same for every command, and their descriptions."""

from __future__ import annotations

from collections.abc import Mapping

FAILED = 1
UNMADE = 2
HUNG_UP = 129
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143

EXIT_CODES: Mapping[int, tuple[str, str]] = {
    0: ("passed", "The run finished and nothing fails."),
    FAILED: (
        "failed",
        "The run finished with a bad result: findings that fail the gate, rows that no repair fixed, data that a "
        "conversion would lose, a log below a required level or without a certain explanation, a chat template "
        "that changes history, or logprobs that are not the model's.",
    ),
    UNMADE: (
        "no result",
        "The run was impossible: a missing file, a wrong flag or setting, no tokenizer where one is needed. "
        "stderr says what to do. A crash is also 2, so that it is never mistaken for findings.",
    ),
    HUNG_UP: ("hung up", "SIGHUP: the terminal is gone, and `nohup` was not used. The same as for Ctrl-C."),
    INTERRUPTED: ("interrupted", "Ctrl-C. No report was finished; files appear whole or not at all."),
    READER_GONE: ("reader gone", "The reader of stdout closed it before the result was known, as in `| head`."),
    TERMINATED: ("terminated", "SIGTERM, as when a job is cancelled. The same as for Ctrl-C."),
}
"""A word and a sentence for each; no command exits with any other by itself."""


def epilog() -> str:
    """The codes in one line, for the help."""
    words = [f"{code} {word}" for code, (word, _) in EXIT_CODES.items()]
    return f"Exit codes: {', '.join(words)}."
