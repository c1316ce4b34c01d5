"""Variants of a chat template that keep history as it was sampled, found by editing it and proved by rendering."""

from __future__ import annotations

from tito_audit.templates.training.search import Variant, find_variant

__all__ = ["Variant", "find_variant"]
