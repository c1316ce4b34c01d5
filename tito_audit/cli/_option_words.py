"""The words that options with a fixed choice take."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["EncoderWord", "FailOnWord", "ToolArgumentsWord"]


class FailOnWord(StrEnum):
    """Severities that `--fail-on` takes."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"


class EncoderWord(StrEnum):
    """Encoders that `--encoder` takes."""

    AUTO = "auto"
    FASTOKENS = "fastokens"
    TOKENIZERS = "tokenizers"


class ToolArgumentsWord(StrEnum):
    """Forms that `--tool-arguments` takes."""

    AUTO = "auto"
    OBJECT = "object"
    STRING = "string"
