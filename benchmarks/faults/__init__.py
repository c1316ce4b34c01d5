"""Every fault of the catalogue, planted in rows that were right: a function a fault, with the rules that name it.

A function changes the draft of a row and says whether it could; if not, the draft is of no use any more.
"""

from benchmarks.faults import calls, columns, templates, tokens
from benchmarks.faults.draft import CATALOGUE, Draft, Fault, Kit

__all__ = ["CATALOGUE", "Draft", "Fault", "Kit", "calls", "columns", "templates", "tokens"]
