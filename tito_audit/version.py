"""The version of the package, for `--version` and for what a repair writes into a log."""

from __future__ import annotations

VERSION = "0.1.0"
