"""What a caller may catch.

    TitoAuditError
    ├── SetupError      the run could not be made: no such file, no template, a bad setting (exit 2)
    │   └── TokenizerError   a tokenizer folder or name that cannot be used
    ├── StorageError    a file that cannot be opened or is not what its content says (exit 2)
    ├── RecordError     one row whose shape fits no format, or fits one and makes no sense (REC001)
    ├── RenderError     a chat template that cannot write the messages (TPL211)
    └── SpliceError     a prompt with no place to put sampled tokens into; a ValueError too

`SetupError` and `StorageError` end a run. `RecordError` and `RenderError` never do: the pipeline turns
them into findings with their place. `SpliceError` comes from `splice_prefix` alone, for its caller to
catch. A message says where, what, why it matters and what to do.
To add one: subclass the branch whose exit it shares, and say here what it means.
"""

from __future__ import annotations


class TitoAuditError(Exception):
    """Base of every error that tito-audit raises on purpose."""


class SetupError(TitoAuditError):
    """The run could not be made; a setting, a path or an option has to change first."""


class TokenizerError(SetupError):
    """A tokenizer folder or hub name that cannot be used."""


class StorageError(TitoAuditError):
    """A file that cannot be read as a log at all."""


class RecordError(TitoAuditError):
    """One row that cannot be read as a rollout; becomes finding REC001."""


class RenderError(TitoAuditError):
    """A chat template that cannot write these messages; becomes finding TPL211."""


class SpliceError(TitoAuditError, ValueError):
    """Sampled tokens that cannot be put into a prompt: their last turn is not found in it."""
