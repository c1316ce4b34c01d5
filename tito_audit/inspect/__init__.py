"""What a log's columns are, which format it is, and a mapping to propose."""

from __future__ import annotations

from tito_audit.inspect.columns import Column, Look, NumberFacts, Relation, RelationKind
from tito_audit.inspect.logprobs import Author, LogprobChoice, LogprobColumn
from tito_audit.inspect.look import Inspection, MaskNote, Sentinel, TakenFor, inspect_log
from tito_audit.inspect.mapping import PackedColumn, Scanned, Trial, as_flags, as_toml, by_their_names
from tito_audit.inspect.page import InspectedLog, as_object, inspect_rollouts, mapping_lines, page_lines
from tito_audit.inspect.roles import Role, RoleGuess

__all__ = [
    "Author",
    "Column",
    "InspectedLog",
    "Inspection",
    "LogprobChoice",
    "LogprobColumn",
    "Look",
    "MaskNote",
    "NumberFacts",
    "PackedColumn",
    "Relation",
    "RelationKind",
    "Role",
    "RoleGuess",
    "Scanned",
    "Sentinel",
    "TakenFor",
    "Trial",
    "as_flags",
    "as_object",
    "as_toml",
    "by_their_names",
    "inspect_log",
    "inspect_rollouts",
    "mapping_lines",
    "page_lines",
]
