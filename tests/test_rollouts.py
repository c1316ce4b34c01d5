"""The audit on tokens that real models sampled: what is known of them must come out, and nothing else.

The oracle in this file reads the logs with the standard library and encodes with `tokenizers`; it shares no
code with the audit but the bytes of tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers

from tests.tiers import DEEP, some
from tests.world import lines_of
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = some(("smollm2", "gemma-3", "qwen2.5-coder"), 1)
KINDS = {"TOK101": "merge", "TOK102": "split", "TOK103": "resplit"}
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]

MEASURED = {
    "qwen2.5-coder": {"merge": 37, "split": 22, "resplit": 24},
    "gemma-3": {"merge": 238, "split": 0, "resplit": 278},
    "smollm2": {"merge": 116, "split": 4, "resplit": 75},
}
"""What the README of the rollouts counts, both modes together, in turns whose text lost no bytes."""

COVERED_BY_A_BREAK = {
    (
        "qwen2.5-coder",
        "retok",
        36,
        2,
        18,
        20,
    ): "the tool call's end is rewritten together with its wrapper (TPL203)",
}
"""Differences of a completion with its own text that a later prompt holds as part of a larger one."""

BREAKS = {
    "qwen2.5-coder": {"same text, other ids": 20, "tool call re-rendered": 60},
    "gemma-3": {"same text, other ids": 58, "whitespace trimmed": 26, "the other end token": 14},
    "smollm2": {"same text, other ids": 24},
}


class Segment(NamedTuple):
    """Where a completion is not what encoding its text gives."""

    row: int
    turn: int
    start: int
    end: int
    kind: str


def log(model: str, mode: str) -> Path:
    return SHARED / "rollouts" / model / f"{mode}.jsonl.gz"


@cache
def rows(model: str, mode: str) -> list[dict[str, Any]]:
    return lines_of(log(model, mode))


@cache
def findings(model: str, mode: str, row: int | None = None) -> tuple[Finding, ...]:
    """Of the log, or of one of its rows."""
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / model), row=row)
    return tuple(f for result in scan_rollouts(log(model, mode), settings) for f in result.findings)


@cache
def segments(model: str, mode: str) -> tuple[frozenset[Segment], frozenset[tuple[int, int]]]:
    """The oracle: segments where the text alone encodes otherwise, and the turns whose text lost bytes."""
    folder = SHARED / "tokenizers" / model
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spell = load_tokenizer(str(folder)).vocabulary.token_bytes
    differing, lost = set(), set()
    for number, row in enumerate(rows(model, mode)):
        stops = set(row["sampling"]["stop_token_ids"])
        for k, call in enumerate(row["calls"]):
            ids = call["generation_token_ids"]
            ids = ids[:-1] if ids and ids[-1] in stops else ids
            again = encoder.encode(call["text"], add_special_tokens=False).ids
            left, right = [spell(i) for i in ids], [spell(i) for i in again]
            if b"".join(left) != b"".join(right):
                lost.add((number, k))
                continue
            differing |= {Segment(number, k, *cut) for cut in cuts(ids, again, left, right)}
    return frozenset(differing), frozenset(lost)


def cuts(ids: list[int], again: list[int], left: list[bytes], right: list[bytes]) -> list[tuple[int, int, str]]:
    """Ranges of `ids` between two common byte ends whose ids differ, with the kind."""
    ends_left = {int(end): n + 1 for n, end in enumerate(np.cumsum([len(b) for b in left]))}
    ends_right = {int(end): n + 1 for n, end in enumerate(np.cumsum([len(b) for b in right]))}
    both = [0, *sorted(ends_left.keys() & ends_right.keys())]
    out = []
    for before, after in pairwise(both):
        a, b = ends_left.get(before, 0), ends_left[after]
        c, d = ends_right.get(before, 0), ends_right[after]
        if ids[a:b] != again[c:d]:
            kind = "merge" if d - c == 1 < b - a else "split" if b - a == 1 < d - c else "resplit"
            out.append((a, b, kind))
    return out


@pytest.mark.parametrize("model", MODELS)
def test_the_oracle_counts_what_was_measured(model: str) -> None:
    counted = Counter(s.kind for mode in ("tito", "retok") for s in segments(model, mode)[0])
    assert {kind: counted[kind] for kind in MEASURED[model]} == MEASURED[model]


@pytest.mark.parametrize("model", MODELS)
def test_a_log_that_kept_its_tokens_has_notes_only(model: str) -> None:
    notes = findings(model, "tito")
    assert notes
    assert {f.severity for f in notes} == {Severity.NOTE}, [
        (f.code, str(f.place), f.hit.message) for f in notes if f.severity is not Severity.NOTE
    ]


@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", MODELS)
def test_merges_splits_and_resplits_are_those_of_the_oracle(model: str, mode: str) -> None:
    """In the completion's own context; the template's seam makes no difference in these files."""
    expected, lost = segments(model, mode)
    measured = {
        Segment(f.place.row, f.hit.turn or 0, f.hit.start, f.hit.end, KINDS[f.code])
        for f in findings(model, mode)
        if f.code in KINDS and (f.place.row, f.hit.turn) not in lost
    }
    covered = {s for s in expected if (model, mode, s.row, s.turn, s.start, s.end) in COVERED_BY_A_BREAK}
    assert measured == expected - covered
    for segment in covered:
        assert any(
            f.code == "TPL203"
            and (f.place.row, f.hit.turn) == (segment.row, segment.turn)
            and f.hit.start <= segment.start
            and segment.end <= f.hit.end
            for f in findings(model, mode)
        )


def test_in_turns_whose_text_lost_bytes_the_rest_is_still_found() -> None:
    """Two merges stand beside bytes that no text can give; the oracle cannot look there."""
    assert [
        (f.place.row, f.hit.turn, f.hit.start, f.hit.recorded.pieces, f.hit.canonical.pieces)
        for f in findings("qwen2.5-coder", "tito", None if DEEP else 44)
        if f.code in KINDS and (f.place.row, f.hit.turn) in segments("qwen2.5-coder", "tito")[1]
    ] == [
        (44, 1, 64, ("\\xe7\\xab", "\\xaf"), ("端",)),
        (44, 1, 72, ("Tr", "ump"), ("Trump",)),
    ]


@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", MODELS)
def test_broken_prefixes_are_exactly_the_calls_that_do_not_continue(model: str, mode: str) -> None:
    broken = set()
    for number, row in enumerate(rows(model, mode)):
        for k, (before, call) in enumerate(pairwise(row["calls"]), start=1):
            seen = before["prompt_token_ids"] + before["generation_token_ids"]
            if call["prompt_token_ids"][: len(seen)] != seen:
                broken.add((number, k))
    sequence = [f for f in findings(model, mode) if f.code.startswith("SEQ")]
    assert {f.code for f in sequence} <= {"SEQ301", "SEQ302"}
    assert len(sequence) == len(broken)
    assert {(f.place.row, f.hit.turn) for f in sequence} == broken
    assert all(f.severity is Severity.ERROR and f.hit.where is Where.PROMPT for f in sequence)


@pytest.mark.parametrize("model", MODELS)
def test_broken_prefixes_have_the_causes_that_were_measured(model: str) -> None:
    causes = Counter(measured_cause(f) for f in findings(model, "retok") if f.code.startswith("SEQ"))
    assert dict(causes) == BREAKS[model]


def measured_cause(finding: Finding) -> str:
    """A finding's cause as the README sorts it: the first of these that takes part in the break."""
    cause = finding.hit.cause
    if "tool call" in cause:
        return "tool call re-rendered"
    if "white space trimmed" in cause:
        return "whitespace trimmed"
    if any(word in cause for word in ("merge", "split", "broken character")):
        return "same text, other ids"
    assert cause == "another stop token"
    return "the other end token"


@pytest.mark.parametrize("model", MODELS)
def test_what_a_later_prompt_holds_otherwise_is_an_error_and_the_rest_a_note(model: str) -> None:
    """Every error of a completion belongs to a call that a broken prefix follows."""
    all_findings = findings(model, "retok")
    breaks = {(f.place.row, f.hit.turn) for f in all_findings if f.code.startswith("SEQ")}
    for f in all_findings:
        if f.hit.where is Where.COMPLETION and f.hit.turn is not None:
            follows = (f.place.row, f.hit.turn + 1) in breaks
            assert (f.severity is Severity.ERROR) <= follows
    assert {f.severity for f in all_findings} == {Severity.NOTE, Severity.ERROR}


def with_training_rows(model: str, path: Path, *, encoded_again: bool) -> None:
    """The calls that kept their tokens, with a training row: as sampled, or decoded and encoded again."""
    encoder = tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / model / "tokenizer.json"))
    text_of = load_tokenizer(str(SHARED / "tokenizers" / model)).vocabulary.text
    with path.open("w") as out:
        for row in rows(model, "tito"):
            last = row["calls"][-1]
            ids = last["prompt_token_ids"] + last["generation_token_ids"]
            if encoded_again:
                text = text_of(np.array(ids, np.int32))
                extra: dict[str, Any] = {"token_ids": encoder.encode(text, add_special_tokens=False).ids}
            else:
                mask, logprobs = [0] * len(ids), [0.0] * len(ids)
                for call in row["calls"]:
                    start, size = len(call["prompt_token_ids"]), len(call["generation_token_ids"])
                    mask[start : start + size] = [1] * size
                    logprobs[start : start + size] = call["generation_log_probs"]
                extra = {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs}
            out.write(json.dumps({**row, **extra}) + "\n")


@pytest.mark.parametrize("model", MODELS)
def test_a_training_row_of_the_sampled_tokens_adds_nothing(model: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with_training_rows(model, path, encoded_again=False)
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / model))
    got = [f for result in scan_rollouts(path, settings) for f in result.findings]
    assert Counter((f.code, f.severity) for f in got) == Counter(
        (f.code, f.severity) for f in findings(model, "tito")
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_training_row_that_was_encoded_again_makes_every_note_an_error(model: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with_training_rows(model, path, encoded_again=True)
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / model), select=("TOK",))
    got = {
        (f.code, f.place.row, f.hit.turn, f.hit.start, f.hit.end)
        for result in scan_rollouts(path, settings)
        for f in result.findings
        if f.code in KINDS and f.severity is Severity.ERROR
    }
    assert got == {
        (f.code, f.place.row, f.hit.turn, f.hit.start, f.hit.end)
        for f in findings(model, "tito")
        if f.code in KINDS
    }


def test_the_same_rollouts_as_parquet_have_the_same_findings(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for model, mode in (("qwen2.5-coder", "retok"), ("gemma-3", "tito")) if DEEP else (("smollm2", "retok"),):
        table = pyarrow.Table.from_pylist(rows(model, mode))
        path = tmp_path / f"{mode}.parquet"
        parquet.write_table(table, path, row_group_size=17)
        settings = Settings(tokenizer=str(SHARED / "tokenizers" / model), select=("TOK", "SEQ", "REC", "LPR"))
        got = [f for result in scan_rollouts(path, settings) for f in result.findings]
        wanted = [f for f in findings(model, mode) if f.code[:3] in settings.select]
        # Parquet gives every tool call all the others' argument keys; only what rests on ids is compared.
        keep = {"TOK101", "TOK102", "TOK103", "SEQ301"}
        assert {(f.code, f.place.row, f.hit.turn, f.hit.start, f.hit.end) for f in got if f.code in keep} == {
            (f.code, f.place.row, f.hit.turn, f.hit.start, f.hit.end) for f in wanted if f.code in keep
        }


@pytest.fixture(scope="module")
def nemo_findings(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    source = SHARED / "recorded" / "nemo-rl-merged-tokens.json"
    if not source.exists():
        pytest.skip("no shared/recorded beside the checkout")
    data = json.loads(source.read_text())
    seen, start = data["seen_token_ids"], 3056
    calls = [
        {"prompt_ids": seen[:start], "completion_ids": seen[start:]},
        {"prompt_ids": data["output_prompt_token_ids"], "completion_ids": [151645]},
    ]
    path = tmp_path_factory.mktemp("nemo") / "two_calls.jsonl"
    path.write_text(json.dumps({"calls": calls}) + "\n")
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / "qwen3"))
    return [f for result in scan_rollouts(path, settings) for f in result.findings]


class TestMergedTokensOfNemoRl:
    """One Qwen3 conversation of 7,819 tokens whose next prompt a server encoded again."""

    def test_four_merges_and_one_resplit_at_their_positions(self, nemo_findings: list[Finding]) -> None:
        data = json.loads((SHARED / "recorded" / "nemo-rl-merged-tokens.json").read_text())
        completion = data["seen_token_ids"][3056:]
        drift = [f for f in nemo_findings if f.code.startswith("TOK")]
        assert Counter((f.code, f.hit.recorded.pieces, f.hit.canonical.pieces) for f in drift) == {
            ("TOK101", (" Skin", "ny"), (" Skinny",)): 2,
            ("TOK101", (" In", "visible"), (" Invisible",)): 2,
            ("TOK103", (" Clim", "b"), (" Cl", "imb")): 1,
        }
        for f in drift:
            assert f.hit.where is Where.COMPLETION
            assert f.hit.turn == 0
            assert f.severity is Severity.ERROR
            assert tuple(completion[f.hit.start : f.hit.end]) == f.hit.recorded.ids

    def test_the_second_call_breaks_its_prefix(self, nemo_findings: list[Finding]) -> None:
        (broken,) = [f for f in nemo_findings if f.code.startswith("SEQ")]
        assert (broken.code, broken.hit.turn, broken.hit.where) == ("SEQ301", 1, Where.PROMPT)
        first = min(f.hit.start for f in nemo_findings if f.code.startswith("TOK"))
        assert broken.hit.start == 3056 + first

    def test_nothing_else_is_found(self, nemo_findings: list[Finding]) -> None:
        assert Counter(f.code for f in nemo_findings) == {"TOK101": 4, "TOK103": 1, "SEQ301": 1}
