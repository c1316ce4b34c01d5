"""What packages of frameworks write themselves is read, and what is written again they read.

Those with tests of their own, beside their formats: verifiers, ART, Agent Lightning, ATIF, tinker-cookbook.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forms import ids_of_turns, spliced
from tests.frameworks.ask import PYTHONS, WRITERS, asked, expected_in, written
from tests.world import ROOT, TOY
from tito_audit import Settings, read_rollouts, scan_rollouts, write_rollouts
from tito_audit.record.rollout import Rollout

REQUIREMENTS = ROOT / "tests" / "frameworks" / "requirements"


def codes_by_rollout(log: Path) -> list[set[str]]:
    """The codes that a scan finds in each rollout of a log."""
    results = scan_rollouts(log, Settings(tokenizer=str(TOY)))
    return [{finding.code for finding in result.findings} for result in results]


# Atropos


def trained(rollout: Rollout) -> list[Any]:
    """Ids, labels and logprobs of a sample, as Atropos writes them."""
    row = rollout.training_row
    assert row.loss_mask is not None
    assert row.logprobs is not None
    labels = np.where(row.loss_mask, row.token_ids, -100)
    return [row.token_ids.tolist(), labels.tolist(), np.nan_to_num(row.logprobs, nan=1.0).tolist()]


@pytest.mark.parametrize("name", ["groups", "nodes"])
def test_what_atropos_writes_is_read(name: str, tmp_path: Path) -> None:
    folder = written("atropos", tmp_path)
    expected = [sample for line in expected_in(folder)[name] for sample in line]
    rollouts = list(read_rollouts(folder / f"{name}.jsonl"))
    assert [rollout.format for rollout in rollouts] == [f"atropos_{name[:-1]}"] * len(expected)
    assert [trained(rollout) for rollout in rollouts] == expected


def test_the_turn_end_that_atropos_writes_twice_when_a_conversation_goes_on_is_found(tmp_path: Path) -> None:
    folder = written("atropos", tmp_path)
    # Three groups: one turn; a conversation with its messages; the same without them, which no template tells.
    assert [codes & {"TOK101", "TPL208"} for codes in codes_by_rollout(folder / "groups.jsonl")] == [
        *(set(), {"TOK101"}),
        *({"TPL208"}, {"TOK101", "TPL208"}),
        *(set(), {"TOK101"}),
    ]


def test_the_api_of_atropos_reads_a_group_whose_tokens_changed(tmp_path: Path) -> None:
    folder = written("atropos", tmp_path)
    log, out = folder / "groups.jsonl", tmp_path / "again.jsonl"
    samples: list[list[Any]] = []

    def touched(rollout: Rollout) -> Rollout:
        assert rollout.training_row is not None
        new = replace(rollout, training_row=spliced(rollout.training_row, 20, 21, [7001, 7001]))
        samples.append(trained(new))
        return new

    assert write_rollouts(log, map(touched, read_rollouts(log)), out) == 3
    assert [sample for group in json.loads(asked("atropos", "--read", out)) for sample in group] == samples
    old = [sample for group in expected_in(folder)["groups"] for sample in group]
    assert [len(sample[0]) for sample in samples] == [len(sample[0]) + 1 for sample in old]


# The OpenAI client


def test_what_the_openai_client_logs_of_a_server_that_tells_ids_is_read(tmp_path: Path) -> None:
    folder = written("openai", tmp_path)
    for rollout, call in zip(read_rollouts(folder / "vllm.jsonl"), expected_in(folder), strict=True):
        assert (rollout.format, rollout.stated.model) == ("vllm", "org/toy")
        assert rollout.messages[-1].role == "assistant"
        ((prompt, completion),), (turn,) = ids_of_turns(rollout), rollout.turns
        assert [prompt, completion, turn.completion_logprobs.tolist()] == call
    assert codes_by_rollout(folder / "vllm.jsonl") == [set(), {"TOK101"}, set()]


@pytest.mark.parametrize(("name", "count"), [("chat", 3), ("responses", 2)])
def test_what_it_logs_of_a_service_without_ids_is_looked_up_by_its_bytes(
    name: str, count: int, tmp_path: Path
) -> None:
    folder = written("openai", tmp_path)
    rollouts = list(read_rollouts(folder / f"{name}.jsonl"))
    for rollout, (_, completion, logprobs) in zip(rollouts, expected_in(folder)[:count], strict=True):
        (turn,) = rollout.turns
        assert rollout.format == "openai_chat"
        assert (turn.prompt_ids, turn.completion_ids) == (None, None)
        assert turn.token_texts is not None
        assert [token.logprob for token in turn.token_texts] == logprobs
        assert len(turn.token_texts) == len(completion)
    assert codes_by_rollout(folder / f"{name}.jsonl") == [set(), {"TOK101"}, set()][:count]


def test_a_stream_that_it_joined_has_lost_all_ids_but_the_first_and_that_is_found(tmp_path: Path) -> None:
    folder = written("openai", tmp_path)
    (rollout,) = read_rollouts(folder / "streamed.jsonl")
    (_, completion, logprobs), *_ = expected_in(folder)
    assert ids_of_turns(rollout)[0][1] == completion[:1]
    assert len(logprobs) > 1
    assert codes_by_rollout(folder / "streamed.jsonl") == [{"REC005", "LPR501"}]


def test_the_openai_client_reads_what_was_written_again(tmp_path: Path) -> None:
    folder = written("openai", tmp_path)
    log, out = folder / "vllm.jsonl", tmp_path / "again.jsonl"

    def longer(rollout: Rollout) -> Rollout:
        (turn,) = rollout.turns
        assert turn.prompt_ids is not None
        prompt = np.append(turn.prompt_ids, np.int32(2002))
        return replace(rollout, turns=(replace(turn, prompt_ids=prompt),))

    assert write_rollouts(log, map(longer, read_rollouts(log)), out) == 3
    assert json.loads(asked("openai", "--read", out)) == [
        [[*prompt, 2002], completion, logprobs] for prompt, completion, logprobs in expected_in(folder)
    ]


# The versions


def pinned(file: Path) -> list[tuple[str, str]]:
    """The packages of a requirement file with their versions, the framework first."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    matches = [re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in lines]
    assert all(matches), f"{file.name} asks for something else than one version"
    return [(match[1], match[2]) for match in matches if match]


def test_the_docs_name_the_versions_of_the_frameworks_that_tests_run() -> None:
    page = (ROOT / "docs/_formats.md").read_text(encoding="utf-8") + "\n"
    (text,) = re.findall(r"^Tests run the packages of these frameworks.*?\n\n", page, re.M | re.S)
    documented = {
        (name, version)
        for name, versions in re.findall(r"`([\w-]+)`\s([\d.]*\d(?:\sand\s[\d.]*\d)*)", text)
        for version in versions.split()
        if version != "and"
    }
    (torch,) = re.findall(r"^TORCH \?= (torch)==([\d.]+\d)", (ROOT / "Makefile").read_text(), re.M)
    files = {file.stem: pinned(file) for file in sorted(REQUIREMENTS.glob("*.txt"))}
    frameworks = {packages[0] for name, packages in files.items() if name not in ("shared", "templates")}
    (tinker,) = (package for package in files["tinker"] if package[0] == "tinker")
    assert documented == {*frameworks, torch, tinker}


def test_every_framework_that_is_installed_has_a_writer_and_every_writer_a_framework() -> None:
    scripts = {file.name.removesuffix("_writer.py") for file in REQUIREMENTS.parent.glob("*_writer.py")}
    names = {file.stem for file in REQUIREMENTS.glob("*.txt")} - {"shared"}
    assert {WRITERS.get(name, name) for name in names} | PYTHONS.keys() == scripts
