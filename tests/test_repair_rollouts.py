"""Repairs of logs that real models sampled, checked against the calls with code that repairs do not share.

Logs are read with the standard library and encoded with `tokenizers` alone.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.tiers import one_in, some
from tests.world import lines_of
from tito_audit.record.finding import Severity
from tito_audit.record.outcome import Outcome
from tito_audit.run.repair import Repairs, repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.tokens.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = some(("smollm2", "gemma-3", "qwen2.5-coder"), 1)
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]
Row = dict[str, Any]
Retok = tuple[str, Path, Repairs, list[Outcome], dict[str, list[Row]]]
Call = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


def log(model: str, mode: str) -> Path:
    return SHARED / "rollouts" / model / f"{mode}.jsonl.gz"


@cache
def rows(model: str, mode: str) -> tuple[Row, ...]:
    return tuple(lines_of(log(model, mode)))


def repaired(
    source: Path, out: Path, model: str, **repairs: Any
) -> tuple[Repairs, list[Outcome], dict[str, list[Row]]]:
    """The run, its outcomes, and the written rows by the id of the rollout that they come from."""
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / model))
    run = repair_rollouts(source, out, settings, RepairSettings(**repairs))
    outcomes = list(run)
    by_id: dict[str, list[Row]] = {}
    for row in lines_of(out):
        by_id.setdefault(row["id"], []).append(row)
    return run, outcomes, by_id


def call(entry: Row) -> Call:
    return (
        tuple(entry["prompt_token_ids"]),
        tuple(entry["generation_token_ids"]),
        tuple(entry["generation_log_probs"]),
    )


def continues(row: Row) -> bool:
    """Whether each call of the row was given everything that the call before it saw and said."""
    calls = [call(entry) for entry in row["calls"]]
    return all(b[0][: len(a[0]) + len(a[1])] == a[0] + a[1] for a, b in pairwise(calls))


def trained_of(row: Row) -> list[tuple[int, int, float]]:
    """Position, id and logprob of every trained token of a training row."""
    columns = zip(row["token_ids"], row["loss_mask"], row["logprobs"], strict=True)
    return [(n, token, value) for n, (token, mask, value) in enumerate(columns) if mask]


def with_row(
    row: Row, token_ids: list[int], spans: list[tuple[int, int]], values_of_spans: list[list[float]]
) -> Row:
    """A log row with a training row as a careless trainer builds it: logprobs paired by their count."""
    mask, values = [0] * len(token_ids), [0.0] * len(token_ids)
    for (start, end), logprobs in zip(spans, values_of_spans, strict=True):
        mask[start:end] = [1] * (end - start)
        values[start:end] = (logprobs + [0.0] * (end - start))[: end - start]
    return {**row, "token_ids": token_ids, "loss_mask": mask, "logprobs": values}


@pytest.fixture(scope="module", params=MODELS)
def retok(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Retok:
    """A model, the log that was given other tokens, as repaired, and what the repair came to."""
    out = tmp_path_factory.mktemp("retok") / "out.jsonl.gz"
    return request.param, out, *repaired(log(request.param, "retok"), out, request.param)


@cache
def tools_of(model: str) -> tuple[tokenizers.Tokenizer, Any]:
    folder = SHARED / "tokenizers" / model
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), load_tokenizer(str(folder)).vocabulary


def encoded_again(row: Row, model: str) -> Row:
    """The row with a training row made of the decoded text of its last call, trained where answers stand."""
    encoder, vocabulary = tools_of(model)
    last = row["calls"][-1]
    seen = last["prompt_token_ids"] + last["generation_token_ids"]
    ids = encoder.encode(vocabulary.text(np.array(seen, np.int32)), add_special_tokens=False).ids
    ends = np.cumsum([len(vocabulary.token_bytes(i)) for i in ids])
    sampled_ends = np.concatenate(([0], np.cumsum([len(vocabulary.token_bytes(i)) for i in seen])))
    spans = []
    for entry in row["calls"]:
        a = sampled_ends[len(entry["prompt_token_ids"])]
        b = sampled_ends[len(entry["prompt_token_ids"]) + len(entry["generation_token_ids"])]
        spans.append((int(np.searchsorted(ends, a, "right")), int(np.searchsorted(ends, b, "left")) + 1))
    return with_row(
        row, ids, [(a, min(b, len(ids))) for a, b in spans], [c["generation_log_probs"] for c in row["calls"]]
    )


def write(path: Path, lines: list[Row]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("model", MODELS)
def test_a_log_that_kept_its_tokens_comes_out_as_it_was(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    run, outcomes, _ = repaired(log(model, "tito"), out, model)
    assert gzip.decompress(out.read_bytes()) == gzip.decompress(log(model, "tito").read_bytes())
    assert not any(outcome.repaired for outcome in outcomes)
    assert run.before.worst() == run.after.worst()


def test_calls_that_were_given_other_tokens_are_forked_and_every_call_is_kept_once(retok: Retok) -> None:
    model, _, run, outcomes, by_id = retok
    for row in rows(model, "retok"):
        parts = by_id[row["id"]]
        assert all(continues(part) for part in parts)
        expected = Counter(call(entry) for entry in row["calls"])
        assert Counter(call(entry) for part in parts for entry in part["calls"]) == expected
        if continues(row):
            assert parts == [row]
        else:
            assert len(parts) > 1
            assert all(part["tito_audit"]["cured"].keys() == {"fork"} for part in parts)
            assert all(part["category"] == row["category"] for part in parts)
    forked = [row for row in rows(model, "retok") if not continues(row)]
    assert sum(outcome.repaired for outcome in outcomes) == len(forked) > 0
    assert sum(outcome.rows for outcome in outcomes) == sum(len(parts) for parts in by_id.values())
    assert run.after.worst() in (None, Severity.NOTE, Severity.WARNING)


@pytest.mark.parametrize("model", MODELS)
def test_forked_training_rows_train_each_sampled_token_once_where_it_was_sampled(
    model: str, tmp_path: Path
) -> None:
    logged = list(one_in(2, rows(model, "retok")))
    source = write(tmp_path / "rows.jsonl", [encoded_again(row, model) for row in logged])
    _, _, by_id = repaired(source, tmp_path / "out.jsonl", model)
    assert len(by_id) == len(logged)
    for row in logged:
        parts = by_id[row["id"]]
        contexts = {a + b: (len(a), c) for a, b, c in map(call, row["calls"])}
        trained: Counter[tuple[tuple[int, ...], int, float]] = Counter()
        for part in parts:
            assert tuple(part["token_ids"]) in contexts, (
                "a row is a context that the sampler saw, and what it said"
            )
            for position, token, value in trained_of(part):
                trained[(*part["token_ids"][:position], token), position, value] += 1
        sampled = Counter(
            ((*prompt, *completion[: n + 1]), len(prompt) + n, values[n])
            for prompt, completion, values in map(call, row["calls"])
            for n in range(len(completion))
        )
        assert trained == sampled


@pytest.mark.parametrize("model", MODELS)
def test_splice_of_calls_needs_unsafe_and_marks_the_logprobs_of_another_context(
    model: str, tmp_path: Path
) -> None:
    logged = list(one_in(2, rows(model, "retok")))
    source = write(tmp_path / "rows.jsonl", logged)
    _, outcomes, by_id = repaired(source, tmp_path / "safe.jsonl", model, strategies=("splice",))
    assert not any(outcome.repaired for outcome in outcomes)
    assert any("--unsafe" in outcome.declined.get("splice", "") for outcome in outcomes)
    _, outcomes, by_id = repaired(source, tmp_path / "unsafe.jsonl", model, strategies=("splice",), unsafe=True)
    for row, outcome in zip(logged, outcomes, strict=True):
        (now,) = by_id[row["id"]]
        assert [call(entry)[1:] for entry in now["calls"]] == [call(entry)[1:] for entry in row["calls"]]
        if continues(row):
            assert now == row
        elif outcome.repaired:
            assert continues(now)
            assert any("scored in another context" in note for note in now["tito_audit"]["notes"])
    assert sum(outcome.repaired for outcome in outcomes) > 0


@pytest.mark.parametrize("model", MODELS)
def test_training_rows_that_were_encoded_again_come_back_as_sampled(model: str, tmp_path: Path) -> None:
    logged = list(one_in(2, rows(model, "tito")))
    source = write(tmp_path / "rows.jsonl", [encoded_again(row, model) for row in logged])
    run, _, by_id = repaired(source, tmp_path / "out.jsonl", model)
    drifted = 0
    for row, line in zip(logged, lines_of(source), strict=True):
        (now,) = by_id[row["id"]]
        last = row["calls"][-1]
        starts = [len(entry["prompt_token_ids"]) for entry in row["calls"]]
        spans = [(s, s + len(e["generation_token_ids"])) for s, e in zip(starts, row["calls"], strict=True)]
        logprobs = [entry["generation_log_probs"] for entry in row["calls"]]
        wanted = with_row(row, last["prompt_token_ids"] + last["generation_token_ids"], spans, logprobs)
        drifted += wanted != line
        provenance = now.pop("tito_audit", None)
        assert now == wanted
        assert (provenance is None) == (wanted == line)
        assert provenance is None or provenance["cured"].keys() == {"splice"}
    assert drifted > 0
    assert run.after.worst() in (None, Severity.NOTE, Severity.WARNING)


def test_a_repaired_log_is_not_repaired_again(retok: Retok, tmp_path: Path) -> None:
    model, first, *_ = retok
    second = tmp_path / "second.jsonl"
    repaired(first, second, model)
    assert gzip.decompress(first.read_bytes()) == second.read_bytes()


def test_rows_late_under_a_mask_of_ones_are_counted_beside_those_that_prove_it(tmp_path: Path) -> None:
    """Their repair takes what was given out of the loss; what is left of them may be right."""
    one_turn, several = [], []
    for row in rows("qwen2.5-coder", "tito"):
        prompt, completion, _ = call(row["calls"][-1])
        values = [0.0] * len(prompt + completion)
        for before, sampled, logprobs in map(call, row["calls"]):
            values[len(before) : len(before + sampled)] = logprobs
        late = {"token_ids": prompt + completion, "logprobs": [0.0, *values[:-1]]}
        if len(row["calls"]) == 1:
            one_turn.append(late | {"loss_mask": [1] * len(values)})
        elif len(row["calls"]) == 3 and row["calls"][0]["finish_reason"] == "stop":
            several.append(late | {"loss_mask": [int(value != 0.0) for value in values]})
    source = write(tmp_path / "log.jsonl", several[:6] + one_turn[:6])
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / "qwen2.5-coder"))
    run = repair_rollouts(source, tmp_path / "out.jsonl", settings, RepairSettings())
    outcomes = list(run)
    assert all(outcome.cured.keys() == {"mask"} for outcome in outcomes[6:])
    assert sum("realign" in outcome.cured for outcome in outcomes) >= 3
    assert run.before.open_beside_faults >= 6, "what a repair exits with 1 for"
    assert run.before.fault_beside == "--assume logprobs=+1"
