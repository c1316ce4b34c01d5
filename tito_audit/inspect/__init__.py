"""What a log's columns are, which format it is, and a mapping to propose."""

from __future__ import annotations

from tito_audit.inspect.columns import RelationKind
from tito_audit.inspect.inspection import Inspection, as_flags, as_toml, inspect_log
from tito_audit.inspect.logprobs import Author
from tito_audit.inspect.page import as_object, mapping_lines, page_lines
from tito_audit.inspect.roles import Role

__all__ = [
    "Author",
    "Inspection",
    "RelationKind",
    "Role",
    "as_flags",
    "as_object",
    "as_toml",
    "inspect_log",
    "mapping_lines",
    "page_lines",
]
