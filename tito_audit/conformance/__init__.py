"""Which templates and which ways to build the next prompt keep what was sampled: a table with a proof per cell."""

from __future__ import annotations

from tito_audit.conformance.builders import BUILDERS, PromptBuilder
from tito_audit.conformance.corpus import CORPUS, CORPUS_VERSION, CorpusConversation, SamplingForm
from tito_audit.conformance.matrix import DriftCell, TokenFate, cells_of, worse
from tito_audit.conformance.world import World, of_template, of_tokenizer

__all__ = [
    "BUILDERS",
    "CORPUS",
    "CORPUS_VERSION",
    "CorpusConversation",
    "DriftCell",
    "PromptBuilder",
    "SamplingForm",
    "TokenFate",
    "World",
    "cells_of",
    "of_template",
    "of_tokenizer",
    "worse",
]
