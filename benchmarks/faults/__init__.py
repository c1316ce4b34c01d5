"""The catalogue of faults to plant in correct rows: one function per fault, with the rules that find it.

A function changes the draft of a row and returns whether it could; if not, the draft is unusable.
"""

from benchmarks.faults import calls, columns, templates, tokens
from benchmarks.faults.draft import CATALOGUE, Draft, Fault, Kit

__all__ = ["CATALOGUE", "Draft", "Fault", "Kit", "calls", "columns", "templates", "tokens"]
