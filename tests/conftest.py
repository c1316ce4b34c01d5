"""What all tests share: nothing that a run keeps on disk reaches another, or the cache of whoever runs them."""

from __future__ import annotations

import os

os.environ["TITO_AUDIT_CACHE"] = "off"
