"""The same calls to Atropos' managed server and to ours; the docs say of each what differs."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.ask import asked
from tests.managed_scenarios import SCENARIOS, played

pytest.importorskip("openai")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "managed-server.md"
MARK = "<!-- scenarios of tests/managed_scenarios.py -->"
Sample = list[Any]


def verdicts() -> dict[str, str]:
    """What the docs say of each scenario."""
    table = PAGE.read_text(encoding="utf-8").partition(MARK)[2]
    return dict(re.findall(r"^\| (.+?) \| (equal|differ|refused) \|", table, re.M))


@cache
def _theirs(file: Path) -> dict[str, list[Sample]]:
    file.write_text(json.dumps(SCENARIOS))
    printed = asked("atropos", "--managed", file)
    samples: dict[str, list[Sample]] = json.loads(printed.strip().splitlines()[-1])
    return samples


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Sample]]:
    """Ids, labels and logprobs of the nodes that Atropos tracks, by scenario."""
    return _theirs(tmp_path_factory.mktemp("managed") / "scenarios.json")


def test_the_docs_name_every_scenario_once() -> None:
    assert list(verdicts()) == list(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nodes_are_those_of_atropos_or_differ_as_the_docs_say(name: str, theirs: dict[str, list[Sample]]) -> None:
    ours = played(SCENARIOS[name])
    if verdicts()[name] == "refused":
        assert isinstance(ours, str)
        assert ours.startswith("ProviderError")
    elif verdicts()[name] == "equal":
        assert ours == theirs[name]
    else:
        assert ours != theirs[name]
        assert not isinstance(ours, str), ours


def test_the_stop_token_is_there_twice_in_the_next_prompt_of_atropos(theirs: dict[str, list[Sample]]) -> None:
    name = "a second turn after a sampled stop token"
    (_, second) = SCENARIOS[name]["calls"]
    stop = second["answers"][0]["ids"][-1]
    ((ours, *_),), ((theirs_ids, *_),) = played(SCENARIOS[name]), theirs[name]
    pairs = list(pairwise(theirs_ids))
    place = pairs.index((stop, stop))
    assert (stop, stop) not in pairwise(ours)
    assert theirs_ids[:place] + theirs_ids[place + 1 :] == ours


def test_atropos_goes_on_from_another_sample_whose_text_begins_the_same(theirs: dict[str, list[Sample]]) -> None:
    name = "an answer whose text begins another"
    four, forty_two = SCENARIOS[name]["calls"][0]["answers"]
    ours = played(SCENARIOS[name])
    assert four["ids"] != forty_two["ids"]
    assert [label for label in theirs[name][0][1] if label != -100][: len(four["ids"])] == four["ids"]
    assert [label for label in ours[1][1] if label != -100][: len(forty_two["ids"])] == forty_two["ids"]


def test_branches_are_those_of_atropos_where_every_branch_trains_what_it_shares(
    theirs: dict[str, list[Sample]],
) -> None:
    name = "branches of a second turn"
    assert played(SCENARIOS[name], train_once=False) == theirs[name]


def test_a_missing_logprob_is_one_point_zero_in_the_trained_span_of_atropos(
    theirs: dict[str, list[Sample]],
) -> None:
    ((_, labels, logprobs),) = theirs["a logprob that is missing"]
    assert labels[-1] != -100
    assert logprobs[-1] == 1.0
