"""Results that are kept with their object, and go with it."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest

from tests import toy
from tito_audit.record.memo import memoized
from tito_audit.render.template import Template
from tito_audit.run.scan import Scan
from tito_audit.settings.model import Settings
from tito_audit.tokens.vocab import Vocabulary

LOADS_ANEW = True
LOG = str(toy.ROOT / "fixtures" / "formats" / "nemo_gym.jsonl")


@dataclass(eq=False)
class Owner:
    memo: dict = field(default_factory=dict)


def test_a_result_is_computed_once_for_each_owner_and_arguments():
    calls = []

    @memoized
    def doubled(owner, number):
        calls.append(number)
        return [2 * number]

    first, second = Owner(), Owner()
    assert doubled(first, 1) is doubled(first, 1)
    assert doubled(second, 1) is not doubled(first, 1)
    assert doubled(first, 2) == [4]
    assert doubled(first, number=3) == [6]
    assert calls == [1, 1, 2, 3]


@pytest.mark.parametrize("encoder", ["tokenizers", "fastokens"])
def test_a_scan_that_is_over_keeps_neither_tokenizer_nor_template(encoder):
    if encoder == "fastokens":
        pytest.importorskip("fastokens")
    settings = Settings(tokenizer=str(toy.TOKENIZERS / "toy_bpe"), encoder=encoder, jobs=1)

    def alive():
        gc.collect()
        return [sum(isinstance(each, kind) for each in gc.get_objects()) for kind in (Vocabulary, Template)]

    assert list(Scan([LOG], settings))
    before = alive()
    for _ in range(3):
        assert list(Scan([LOG], settings))
    assert alive() == before
