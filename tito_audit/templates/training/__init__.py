"""Variants of a chat template that keep history as it was sampled, found by editing it and proved by rendering."""

from __future__ import annotations

from tito_audit.templates.training.edits import TemplateEdit
from tito_audit.templates.training.search import Judged, OfLog, Variant, find_variant

__all__ = ["Judged", "OfLog", "TemplateEdit", "Variant", "find_variant"]
