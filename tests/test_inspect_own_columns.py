"""What `inspect` suggests for logs of own columns: never a decoy, and whose logprobs it takes is said."""

from __future__ import annotations

import gzip
import json
import random
import shlex
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.own_logs import own_log
from tests.tables import stored, table
from tests.tiers import examples
from tests.world import FORMATS, ROOT
from tito_audit.inspect import Author, Inspection, Role, inspect_log
from tito_audit.settings.model import Settings

SHARED = ROOT.parent / "shared" / "rollouts"
PARAMETERS: dict[str, Any] = stored(__file__, "PARAMETERS")


def judged(inspection: Inspection, right: dict[str, str], optional: set[str]) -> str:
    """How a suggestion compares with the right one: found, unsure or wrong."""
    if any(right.get(ours) != theirs for ours, theirs in inspection.mapping.items()):
        return "wrong"
    missing = right.keys() - inspection.mapping.keys() - optional
    return "unsure" if missing or not all(choice.sure for choice in inspection.logprobs) else "found"


def test_a_decoy_is_never_suggested_and_own_columns_are_nearly_always_found(tmp_path: Path) -> None:
    shares: Counter[str] = Counter()
    for seed in range(examples(25, 1_000)):
        log = own_log(seed)
        inspection = inspect_log(written(tmp_path / "log.jsonl", log.rows))
        assert not log.decoys & set(inspection.mapping.values()), seed
        shares[judged(inspection, log.right, log.optional)] += 1
    assert shares["wrong"] == 0, shares
    assert shares["found"] >= 0.98 * shares.total(), shares


def test_columns_of_no_meaning_are_told_by_their_values(tmp_path: Path) -> None:
    shares: Counter[str] = Counter()
    for seed in range(5_000, 5_000 + examples(25, 1_000)):
        log = own_log(seed)
        nameless = {path: f"c{number}" for number, path in enumerate(log.right.values()) if "." not in path}
        rows = [{nameless.get(key, key): value for key, value in row.items()} for row in log.rows]
        right = {ours: nameless.get(theirs, theirs) for ours, theirs in log.right.items()}
        inspection = inspect_log(written(tmp_path / "log.jsonl", rows))
        assert not log.decoys & set(inspection.mapping.values()), seed
        shares[judged(inspection, right, log.optional)] += 1
    assert shares["wrong"] <= 0.01 * shares.total(), shares
    assert shares["found"] >= 0.9 * shares.total(), shares


def test_the_lists_of_settings_in_real_rollouts_are_no_rows_of_tokens(tmp_path: Path) -> None:
    if not SHARED.exists():
        pytest.skip("no shared rollouts")
    for log in sorted(SHARED.glob("*/retok.jsonl.gz")):
        with gzip.open(log, "rt") as lines:
            rows = [{**json.loads(line), **PARAMETERS} for line in islice(lines, 40)]
        inspection = inspect_log(written(tmp_path / "log.jsonl", rows))
        assert "token_ids" not in inspection.mapping
        assert set(inspection.mapping) <= {"calls", "messages", "tools", "model"}
        assert inspection.trial.training_rows == 0


@pytest.mark.parametrize("log", sorted(FORMATS.glob("*.jsonl")), ids=lambda log: log.name)
def test_parameters_beside_the_columns_of_a_format_are_never_suggested(log: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row.update(PARAMETERS, uid=number)
    inspection = inspect_log(written(tmp_path / "log.jsonl", rows))
    suggested = {path.partition(".")[0] for path in inspection.mapping.values()}
    assert not suggested & PARAMETERS.keys()


def test_a_mapping_that_was_suggested_was_scanned_with_the_rows_that_were_looked_at(tmp_path: Path) -> None:
    log = own_log(1)
    inspection = inspect_log(written(tmp_path / "log.jsonl", log.rows), rows=4)
    assert inspection.trial.scan.rollouts == inspection.trial.rows == 4


def page_of(log: Path) -> str:
    return " ".join(run("inspect", log)[1].split())


def own_rows(count: int = 6) -> list[dict[str, Any]]:
    """Rows with a prompt, an answer and its logprobs."""
    chance = random.Random(5)
    rows = []
    for _ in range(count):
        prompt = [chance.randrange(5, 30_000) for _ in range(chance.randrange(9, 30))]
        answer = [chance.randrange(5, 30_000) for _ in range(chance.randrange(6, 20))]
        rows.append({"prompt": prompt, "answer": answer, "lp": [-chance.expovariate(1.0) for _ in answer]})
    return rows


@pytest.mark.parametrize(
    ("shape", "mapping"),
    [
        ("told by the objects around them", ("req.ids", "res.ids", "res.lp")),
        ("of two nameless lists the one with logprobs was sampled", ("a", "b", "c")),
    ],
)
def test_prompt_and_completion_are_told(shape: str, mapping: tuple[str, ...], tmp_path: Path) -> None:
    rows = [
        {"a": row["prompt"], "b": row["answer"], "c": row["lp"]}
        if "nameless" in shape
        else {"req": {"ids": row["prompt"]}, "res": {"ids": row["answer"], "lp": row["lp"]}}
        for row in own_rows()
    ]
    found = inspect_log(written(tmp_path / "log.jsonl", rows)).mapping
    assert found == dict(zip(("prompt_ids", "completion_ids", "completion_logprobs"), mapping, strict=True))


def test_rows_of_several_samples_are_said_to_be_packed(tmp_path: Path) -> None:
    pairs = [own_rows(6)[number : number + 2] for number in range(4)]
    packed = [
        {
            "toks": [*first["answer"], *two["answer"]],
            "lps": [*first["lp"], *two["lp"]],
            "train_on": [0, 0, *[1] * (len(first["lp"]) - 2), 0, 0, *[1] * (len(two["lp"]) - 2)],
            "parts": [len(first["answer"]), len(two["answer"])],
            "places": [*range(len(first["answer"])), *range(len(two["answer"]))],
        }
        for first, two in pairs
    ]
    for name, canonical in (("parts", "seq_lens"), ("places", "position_ids")):
        rows = [{key: row[key] for key in ("toks", "lps", "train_on", name)} for row in packed]
        log = written(tmp_path / "log.jsonl", rows)
        assert f"{name} splits each row into samples: a scan does if it is called {canonical}." in page_of(log)
        rows = [{canonical: row[name]} | {key: row[key] for key in ("toks", "lps", "train_on")} for row in packed]
        assert "splits each row" not in page_of(written(tmp_path / "log.jsonl", rows))


@pytest.mark.parametrize("shape", ["own", "packed", "text", "calls"])
def test_a_page_ends_with_a_command_that_runs(shape: str, tmp_path: Path) -> None:
    logs = {
        "own": [{"a": row["prompt"], "b": row["answer"], "c": row["lp"]} for row in own_rows()],
        "packed": [{"toks": row["answer"], "lps": row["lp"]} for row in own_rows()],
        "text": [{"text": "no ids here", "n": n} for n in range(3)],
        "calls": [
            {"calls": [{"prompt_ids": row["prompt"], "completion_ids": row["answer"]}]} for row in own_rows()
        ],
    }
    page = run("inspect", written(tmp_path / "log.jsonl", logs[shape]))[1].rstrip().splitlines()
    command = shlex.split(page[-1])
    assert command[0] == "tito-audit"
    assert run(*command[1:])[0] in (0, 1)


# Whose logprobs


def rows_of(**columns: str) -> list[dict[str, Any]]:
    """Rows with ids, a mask and columns of logprobs: each name with how its values come from the sampler's."""
    chance = random.Random(7)
    rows = []
    for number in range(12):
        mask = [0] * chance.randrange(6, 20) + [1] * chance.randrange(6, 20)
        sampled = [-chance.expovariate(1.0) - 1e-4 for _ in mask]
        row: dict[str, Any] = {
            "uid": number,
            "toks": [chance.randrange(5, 30_000) for _ in mask],
            "train_on": mask,
        }
        for name, how in columns.items():
            noise = {"same": 0.0, "near": 0.003, "far": 0.5}[how.split()[0]]
            values = [min(value + chance.gauss(0, noise) * (noise > 0), -1e-6) for value in sampled]
            everywhere = how.endswith("everywhere")
            row[name] = [value if flag or everywhere else 0.0 for value, flag in zip(values, mask, strict=True)]
        rows.append(row)
    return rows


def look(tmp_path: Path, **columns: str) -> tuple[Inspection, str]:
    log = written(tmp_path / "log.jsonl", rows_of(**columns))
    return inspect_log(log), " ".join(run("inspect", log)[1].split())


def test_the_sampler_is_known_by_the_name_of_its_column_and_the_others_are_measured(tmp_path: Path) -> None:
    inspection, page = look(tmp_path, ref_lp="far", old_lp="near", rollout_lp="same")
    (choice,) = inspection.logprobs
    assert choice.sure
    assert [column.path for column in choice.columns] == ["rollout_lp", "ref_lp", "old_lp"]
    assert [column.author for column in choice.columns] == [Author.SAMPLER, Author.REFERENCE, Author.TRAINER]
    far, near = choice.columns[1].difference, choice.columns[2].difference
    assert far is not None
    assert near is not None
    assert 0.001 < near < 0.005 < 0.2 < far < 0.6
    assert inspection.mapping["logprobs"] == "rollout_lp"
    assert "--map logprobs=old_lp" in page


@pytest.mark.parametrize(*table(__file__, "the_samplers_logprobs_are_told_by_names_and_values"), ids=str)
def test_the_samplers_logprobs_are_told_by_names_and_values(
    columns: dict[str, str], sure: bool, taken: str, says: str, tmp_path: Path
) -> None:
    inspection, page = look(tmp_path, **columns)
    (choice,) = inspection.logprobs
    assert (choice.sure, inspection.mapping["logprobs"]) == (sure, taken)
    assert says in page
    if says == "the same values":
        assert choice.columns[1].difference == 0


def test_the_flag_that_is_named_takes_the_other_column(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", rows_of(rollout_lp="same", old_lp="near"))
    inspection = inspect_log(log, settings=Settings(columns={"token_ids": "toks", "logprobs": "old_lp"}))
    assert next(column.path for column in inspection.logprobs[0].columns if column.taken) == "old_lp"


def test_logprobs_of_other_rows_or_of_other_tokens_are_no_alternatives(tmp_path: Path) -> None:
    rows = rows_of(lp="same")
    for number, row in enumerate(rows):
        row["prompt_part_lp"] = [-0.1 * (place + 1) for place in range(3 + number)]
        if number % 2:
            row["other_lp"] = row.pop("lp")
    assert inspect_log(written(tmp_path / "log.jsonl", rows)).logprobs == []


def test_a_format_that_reads_by_name_gets_no_flag(tmp_path: Path) -> None:
    page = " ".join(run("inspect", FORMATS / "prime_rl_tokens.jsonl")[1].split())
    assert (
        "inference_logprobs: taken; the sampler's by its name trainer_logprobs: a trainer's by its name;" in page
    )
    assert "rename the columns: prime_rl_tokens reads by name" in page


def test_one_column_of_logprobs_needs_no_choice(tmp_path: Path) -> None:
    assert look(tmp_path, lp="same")[0].logprobs == []


def test_the_keys_of_a_logit_bias_are_no_columns(tmp_path: Path) -> None:
    rows = [
        {"toks": [5, 6, 7, n], "lp": [-0.5, -1.0, -1.5, -n - 0.1], "logit_bias": {"17": 1, "4": n}}
        for n in range(3)
    ]
    inspection = inspect_log(written(tmp_path / "log.jsonl", rows))
    assert [column.path for column in inspection.columns] == ["toks", "lp", "logit_bias"]
    assert inspection.roles["logit_bias"].role is Role.OBJECT
