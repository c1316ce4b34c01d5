"""The examples of the reference on record formats: each is told, read and written again as its section says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import written
from tests.forms import paths, spliced
from tests.tables import stored
from tests.test_formats import check
from tito_audit import Settings, read_rollouts, scan_rollouts, write_rollouts
from tito_audit.errors import RecordError
from tito_audit.formats import all_formats, format_named, pick_format
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Place, Rollout

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "formats.md"
PLACE = Place("log.jsonl", 0)
NEW = (7001, 7002)
"""What comes in place of one token."""
pytestmark = pytest.mark.shared


@dataclass(frozen=True)
class Example:
    """A JSON example of the reference, as `tests/data/tables/reference_examples.toml` says it."""

    section: str
    format: str
    changes: Sequence[str] = ()
    number: int = 0
    also: Sequence[str] = ()
    logprobs: bool = True

    def __str__(self) -> str:
        return f"{self.section}-{self.format}"


EXAMPLES = [Example(**facts) for facts in stored(__file__, "EXAMPLES")]
ID_LISTS, TEXT_ONLY = stored(__file__, "ID_LISTS"), stored(__file__, "TEXT_ONLY")


every_example = pytest.mark.parametrize("example", EXAMPLES, ids=str)
with_ids = pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.format not in ("miles_trajectory", "openai_chat")],
    ids=str,
)
changing = pytest.mark.parametrize("example", [example for example in EXAMPLES if example.changes], ids=str)


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, int], str]:
    """The JSON examples by section and number, as they are printed."""
    if not REFERENCE.is_file():
        pytest.skip("the reference on formats is not beside this checkout")
    whole = REFERENCE.read_text(encoding="utf-8")
    whole = whole[whole.index("\n## 3. ") : whole.index("\n## 4. ")]
    printed: dict[tuple[str, int], str] = {}
    for section in re.split(r"^### ", whole, flags=re.MULTILINE)[1:]:
        examples = re.findall(r"^```json\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        printed |= {(section.split()[0], number): text for number, text in enumerate(examples)}
    return printed


def row_of(example: Example, texts: dict[tuple[str, int], str]) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(texts[example.section, example.number])
    return row


def file_of(example: Example, texts: dict[tuple[str, int], str], form: str, folder: Path) -> Path:
    """The example as a file: as a line of JSONL, or as the document that is printed."""
    text = texts[example.section, example.number]
    path = folder / ("log.jsonl" if form == "line" else "log.json")
    path.write_text(json.dumps(json.loads(text)) + "\n" if form == "line" else text, encoding="utf-8")
    return path


def repaired(rollout: Rollout) -> Rollout:
    """The rollout with two tokens for one: the first trained one of its row, or the last of its last prompt."""
    row = rollout.training_row
    if row is not None:
        assert row.loss_mask is not None
        at = int(np.flatnonzero(row.loss_mask)[0])
        return replace(rollout, training_row=spliced(row, at, at + 1, NEW))
    *before, last = rollout.turns
    prompt = np.concatenate([last.prompt_ids[:-1], np.array(NEW, np.int32)])
    return replace(rollout, turns=(*before, replace(last, prompt_ids=prompt)))


# Detection and read


def test_every_example_of_the_reference_is_looked_at(texts):
    assert {(each.section, each.number) for each in EXAMPLES} | {(section, 0) for section in TEXT_ONLY} == set(
        texts
    )


@every_example
def test_an_example_is_of_the_format_of_its_section_and_of_no_other(example: Example, texts):
    row = row_of(example, texts)
    assert pick_format(row).name == example.format
    others = {form.name for form in all_formats() if form.matches(row)} - {example.format, "generic"}
    assert others == set(example.also)


@every_example
def test_an_example_reads_into_rollouts_whose_columns_fit(example: Example, texts):
    row = row_of(example, texts)
    rollouts = format_named(example.format).read(row, PLACE)
    assert rollouts
    for item, rollout in enumerate(rollouts):
        check(rollout)
        assert rollout.place.item == item
        for turn in rollout.turns:
            assert (turn.completion_ids is None) == (turn.token_texts is not None)
            assert (turn.completion_logprobs is not None) == (example.logprobs and turn.completion_ids is not None)
            if turn.completion_logprobs is not None:
                assert (turn.completion_logprobs <= 0).all()
        trained = rollout.training_row
        if trained is not None:
            assert all(column.alignment is not None for column in trained.columns)
            assert trained.loss_mask is not None
            assert (trained.logprobs[trained.loss_mask] < 0).all()
            outside = trained.logprobs[~trained.loss_mask]
            assert set(outside[~np.isnan(outside)]) <= {0.0, 1.0}


@pytest.mark.parametrize(("section", "whose"), TEXT_ONLY.items())
def test_a_log_of_text_is_told_that_it_holds_no_ids(section: str, whose: str, texts):
    row = json.loads(texts[section, 0])
    assert [form.name for form in all_formats() if form.matches(row)] == ["text_only"]
    (rollout,) = pick_format(row).read(row, PLACE)
    assert re.match(f"No token ids: this is an? {whose}", rollout.stated.notice)


def test_examples_without_ids_say_so(texts):
    rollouts = {
        example.format: format_named(example.format).read(row_of(example, texts), PLACE)[0]
        for example in EXAMPLES
        if example.format in ("miles_trajectory", "openai_chat")
    }
    assert rollouts["miles_trajectory"].stated.ids_wanted is False
    (turn,) = rollouts["openai_chat"].turns  # tokens as text, from which ids are guessed
    assert (turn.prompt_ids, turn.completion_ids) == (None, None)
    assert turn.token_texts


MISSING = object()


def emptied(value: Any, way: Any) -> Any:
    """The row with every list of ids in another way of saying that there are none."""
    if isinstance(value, list):
        return [emptied(entry, way) for entry in value]
    if not isinstance(value, dict):
        return value
    new: dict[str, Any] = {}
    for key, inner in value.items():
        holds = key in ID_LISTS and isinstance(inner, list)
        nested = holds and isinstance(inner[0], list)
        if key == "output_token_logprobs":
            new[key] = []  # SGLang's second copy
        elif not holds:
            new[key] = emptied(inner, way)
        elif way is not MISSING:
            new[key] = [way] * len(inner) if nested and way is not None else way
    return new


@with_ids
@pytest.mark.parametrize("way", [MISSING, None, [], [0]], ids=["missing", "null", "empty", "placeholder"])
def test_an_example_without_its_ids_is_never_clean(example: Example, way: Any, texts, tmp_path: Path):
    row = emptied(row_of(example, texts), way)
    scan = scan_rollouts(written(tmp_path / "log.jsonl", [row]), Settings())
    codes = {finding.code[:3] for result in scan for finding in result.findings}
    summary = scan.summary
    nothing_audited = summary.rollouts > 0 and summary.without_ids == summary.rollouts
    assert summary.rows_unreadable or nothing_audited or "REC" in codes
    if nothing_audited:
        assert any("token ids" in notice for notice in summary.notices)


# Written again


@every_example
@pytest.mark.parametrize("form", ["line", "document"])
def test_an_example_comes_back_byte_for_byte(example: Example, form: str, texts, tmp_path: Path):
    log = file_of(example, texts, form, tmp_path)
    out = tmp_path / f"out{log.suffix}"
    assert write_rollouts(log, read_rollouts(log), out) == 0
    assert out.read_bytes() == log.read_bytes()


def put_in(form: str, row: dict[str, Any]) -> tuple[Rollout, dict[str, Any]]:
    """The last rollout of a row with a token repaired, and the row that holds it."""
    mended = [unrepaired(rollout) for rollout in format_named(form).read(row, PLACE)]
    wanted = repaired(mended[-1].rollout)
    mended[-1] = RepairedRollout(wanted, mended[-1].turns_from)
    (new,) = format_named(form).update(row, mended)
    return wanted, dict(new)


@changing
def test_a_repaired_token_changes_every_copy_of_it_and_nothing_else(example: Example, texts):
    row = row_of(example, texts)
    wanted, new = put_in(example.format, row)
    assert sorted(paths(row, new)) == sorted(example.changes)
    again = format_named(example.format).read(new, PLACE)[-1]
    check(again)
    if wanted.training_row is not None:
        assert again.training_row is not None
        for name in ("token_ids", "loss_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(again.training_row, name), getattr(wanted.training_row, name))
    for a, b in zip(again.turns, wanted.turns, strict=True):
        np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_array_equal(a.completion_logprobs, b.completion_logprobs)


def skeleton(line: str) -> str:
    """What is left of a line without its numbers and what is between them."""
    return re.sub(r"-?\d[\d.e-]*|null|true|false|[\[\], ]", "", line)


@changing
@pytest.mark.parametrize("form", ["line", "document"])
def test_a_repaired_example_is_written_in_its_own_form(example: Example, form: str, texts, tmp_path: Path):
    log = file_of(example, texts, form, tmp_path)
    out = tmp_path / f"out{log.suffix}"
    *before, last = read_rollouts(log)
    assert write_rollouts(log, [*before, repaired(last)], out) == 1
    old, new = log.read_text(encoding="utf-8"), out.read_text(encoding="utf-8")
    assert sorted(paths(json.loads(old), json.loads(new))) == sorted(example.changes)
    assert [skeleton(line) for line in new.split("\n")] == [skeleton(line) for line in old.split("\n")]


def test_a_call_whose_prompt_nobody_logged_has_no_place_for_one(texts):
    example = next(example for example in EXAMPLES if example.format == "sglang")
    row = row_of(example, texts)
    (rollout,) = format_named("sglang").read(row, PLACE)
    turn = replace(rollout.turns[0], prompt_ids=np.array(NEW, np.int32))
    with pytest.raises(RecordError):
        format_named("sglang").update(row, [unrepaired(replace(rollout, turns=(turn,)))])


MILES_TYPES = {
    "sample_index": pa.int32(),
    "response_length": pa.int32(),
    "total_length": pa.int32(),
    "tokens": pa.large_list(pa.int32()),
    "loss_mask": pa.large_list(pa.int8()),
    "rollout_log_probs": pa.large_list(pa.float32()),
}


@pytest.mark.parametrize("repair", [False, True], ids=["as-it-was", "repaired"])
def test_the_example_of_a_table_comes_back_type_for_type(repair: bool, texts, tmp_path: Path):
    example = next(example for example in EXAMPLES if example.format == "miles_columns")
    row = row_of(example, texts)
    log, out = tmp_path / "log.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 3, schema=pa.schema(MILES_TYPES.items())), log, row_group_size=2)
    table = pq.read_table(log)
    assert pick_format(table.to_pylist()[0]).name == "miles_columns"
    rollouts = list(read_rollouts(log))
    assert {rollout.format for rollout in rollouts} == {"miles_columns"}
    changed = [rollouts[0], repaired(rollouts[1]), rollouts[2]] if repair else rollouts
    assert write_rollouts(log, changed, out) == repair
    again = pq.ParquetFile(out)
    assert again.schema_arrow.equals(table.schema, check_metadata=True)
    assert again.num_row_groups == 2
    output = again.read()
    assert output.take([0, 2]).equals(table.take([0, 2]))
    changes = sorted(example.changes) if repair else []
    assert sorted(paths(table.to_pylist()[1], output.to_pylist()[1])) == changes
