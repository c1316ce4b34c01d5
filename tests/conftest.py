"""What all tests share: nothing that a run keeps on disk reaches another, or the cache of whoever runs them."""

from __future__ import annotations

import os

import tests.tiers  # noqa: F401  (sets how many examples hypothesis tries)

os.environ["TITO_AUDIT_CACHE"] = "off"
