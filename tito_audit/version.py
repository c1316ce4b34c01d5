"""The version of the package, for `--version` and for the marks that repairs write into logs."""

from __future__ import annotations

VERSION = "0.1.0"
