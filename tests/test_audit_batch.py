"""A batch in a training loop: the findings of a scan of the same rows, out of lists, arrays and tensors."""

from __future__ import annotations

import cProfile
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.batch import Batches
from tests.tables import stored
from tests.tiers import one_in, some
from tests.world import ROOT
from tito_audit import BatchAudit, BatchAuditor, RecordError, Settings, SetupError, audit_batch, read_rollouts
from tito_audit.record.finding import Finding, Result, Where
from tito_audit.run.scan import scan_rollouts

TOY = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
LOGS = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
TOKENIZERS = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
ROLLOUTS = sorted((TOKENIZERS.parent / "rollouts").glob("*/*.jsonl.gz"), reverse=True)
Columns = dict[str, list[Any]]


def numbers(values: Any) -> list[float | None] | None:
    """Numbers as JSON has them."""
    return None if values is None else [None if x != x else x for x in np.asarray(values, float).tolist()]


def columns_of(log: Path, most: int = 40) -> tuple[Columns, Columns]:
    """The training rows and the calls of a log, as a trainer holds them."""
    rows: Columns = {"token_ids": [], "loss_mask": [], "logprobs": []}
    calls: Columns = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    try:
        for rollout in read_rollouts(log, Settings(join=False)):
            row = rollout.training_row
            if row is not None and len(rows["token_ids"]) < most:
                rows["token_ids"].append(row.token_ids.tolist())
                rows["loss_mask"].append(None if row.loss_mask is None else row.loss_mask.astype(int).tolist())
                rows["logprobs"].append(numbers(row.logprobs))
            for turn in rollout.turns:
                if (
                    turn.prompt_ids is not None
                    and turn.completion_ids is not None
                    and len(calls["logprobs"]) < most
                ):
                    calls["prompt_ids"].append(turn.prompt_ids.tolist())
                    calls["completion_ids"].append(turn.completion_ids.tolist())
                    calls["logprobs"].append(numbers(turn.completion_logprobs))
    except RecordError:
        pass  # fixtures hold a row that cannot be read
    return rows, calls


def written(columns: Columns, log: Path) -> Path:
    """The columns as a log, one row a line."""
    rows = zip(*columns.values(), strict=True)
    lines = ({k: v for k, v in zip(columns, row, strict=True) if v is not None} for row in rows)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return log


def contents(results: Iterable[Result], file: str = "batch") -> list[object]:
    """All that results say, in whatever file they are."""
    return [
        (
            result.of_log,
            result.place.row,
            tuple(placed(finding, file) for finding in result.findings),
            result.skips,
            result.counts,
        )
        for result in results
    ]


def placed(finding: Finding, file: str) -> Finding:
    hit = replace(finding.hit, message=finding.hit.message.replace(file, "batch"))
    return replace(finding, place=replace(finding.place, file="batch"), hit=hit)


def same_as_a_scan(columns: Columns, folder: Path, tokenizer: str | None) -> int:
    """The number of findings, which a batch and a scan have in common."""
    log = written(columns, folder / "log.jsonl")
    scan = scan_rollouts(log, Settings(tokenizer=tokenizer, join=False, format="generic"))
    wanted = contents(scan, str(log))
    audit = audit_batch(**columns, tokenizer=tokenizer)
    assert contents(audit) == wanted
    assert audit.summary.notices == [notice.replace(str(log), "batch") for notice in scan.summary.notices]
    assert audit.summary.encoder == scan.summary.encoder
    return len(audit.findings)


@pytest.mark.parametrize("tokenizer", [None, TOY], ids=["ids alone", "with a tokenizer"])
def test_a_batch_has_the_findings_of_a_scan_of_its_rows(tmp_path: Path, tokenizer: str | None) -> None:
    number = 0
    for log in some(LOGS, 24 if tokenizer is None else 12):
        for columns in columns_of(log):
            if any(columns.values()):
                number += same_as_a_scan(columns, tmp_path, tokenizer)
    assert number >= 10


@pytest.mark.shared
@pytest.mark.parametrize("log", some(ROLLOUTS, 1), ids=lambda log: f"{log.parent.name}-{log.name}")
def test_a_batch_of_real_rollouts_has_the_findings_of_a_scan(log: Path, tmp_path: Path) -> None:
    tokenizer = str(TOKENIZERS / log.parent.name)
    for columns in columns_of(log, 12):
        if any(columns.values()):
            same_as_a_scan(columns, tmp_path, tokenizer)


def rows(seed: int = 0, size: int = 6) -> Columns:
    """Rows of two turns with logprobs."""
    random, columns = np.random.default_rng(seed), Columns(token_ids=[], loss_mask=[], logprobs=[])
    for _ in range(size):
        lengths = random.integers(8, 30, 4)
        mask = np.repeat([0, 1, 0, 1], lengths)
        columns["token_ids"].append(random.integers(300, 900, mask.size).tolist())
        columns["loss_mask"].append(mask.tolist())
        columns["logprobs"].append(np.where(mask, -random.exponential(1.0, mask.size), np.nan).tolist())
    return columns


def faulty(columns: Columns) -> Columns:
    """The same with a fault in each of some rows: logprobs shifted, above zero, not a number, one too few."""
    logprobs = [list(values) for values in columns["logprobs"]]
    logprobs[1] = [float("nan"), *logprobs[1][:-1]]
    logprobs[2][-1] = 0.5
    logprobs[3][-2] = float("nan")
    return {**columns, "logprobs": logprobs}


def padded(columns: Columns, left: Sequence[int]) -> dict[str, np.ndarray]:
    """The rows as arrays with an attention mask; `left`: padding before each."""
    ids = columns["token_ids"]
    width = max(start + len(row) for start, row in zip(left, ids, strict=True)) + 3
    out = {name: np.zeros((len(ids), width), np.float64) for name in columns}
    out["token_ids"] = np.full((len(ids), width), 7)
    out["attention_mask"] = np.zeros((len(ids), width), np.int64)
    for number, start in enumerate(left):
        here = slice(start, start + len(ids[number]))
        for name in columns:
            out[name][number, here] = columns[name][number]
        out["attention_mask"][number, here] = 1
    out["loss_mask"] = out["loss_mask"].astype(np.int64)
    return out


def test_a_failing_row_is_named_and_can_be_left_out_of_the_loss() -> None:
    columns = faulty(rows())
    audit = audit_batch(**columns)
    assert audit.failed
    assert np.flatnonzero(audit.failing_rows).tolist() == [1, 2, 3]
    assert {finding.place.row for finding in audit.findings if finding.severity.word == "error"} == {1, 2, 3}
    passing = np.flatnonzero(~audit.failing_rows)
    again = audit_batch(**{name: [column[row] for row in passing] for name, column in columns.items()})
    assert not again.failed
    assert not again.findings
    assert again.failing_rows.tolist() == [False] * 3


def test_packed_rows_fail_as_the_row_that_holds_them() -> None:
    columns = {
        "token_ids": np.array([[11, 12, 13], [14, 15, 16]]),
        "loss_mask": np.array([[0, 1, 1], [0, 0, 1]]),
        "logprobs": np.array([[-1.0, -2, 0.5], [-1, -0.2, -3]]),
        "attention_mask": np.array([[1, 1, 2], [1, 1, 1]]),
    }
    audit = audit_batch(**columns)
    assert audit.summary.rollouts == 3
    assert audit.failing_rows.tolist() == [True, False]


def test_only_what_the_settings_say_fails() -> None:
    columns = faulty(rows())
    assert not audit_batch(**columns, settings=Settings(fail_on="never")).failed
    only = audit_batch(**columns, settings=Settings(select=("LPR504",)))
    assert np.flatnonzero(only.failing_rows).tolist() == [2]
    assert {finding.code for finding in only.findings} == {"LPR504"}


def test_a_finding_about_the_whole_batch_fails_every_row() -> None:
    columns = rows(size=16)
    columns["token_ids"] = [[token * 40 for token in ids] for ids in columns["token_ids"]]  # past the vocabulary
    audit = audit_batch(**columns, tokenizer=TOY)
    (finding,) = (item for item in audit.findings if item.hit.where is Where.LOG and item.severity.word == "error")
    assert finding.code == "REC007"
    assert audit.failing_rows.all()


@pytest.mark.parametrize("kind", ["lists", "tuples", "ragged arrays", "arrays", "tensors", "nested", "bfloat16"])
def test_lists_arrays_and_tensors_are_the_same_batch(kind: str) -> None:
    columns = faulty(rows())
    torch: Any = pytest.importorskip("torch") if kind in ("tensors", "nested", "bfloat16") else None
    if kind == "bfloat16":
        columns["logprobs"] = [torch.tensor(values).bfloat16().tolist() for values in columns["logprobs"]]
    wanted = audit_batch(**columns)
    ragged = {
        "tuples": lambda name, row: tuple(row),
        "ragged arrays": lambda name, row: np.array(row),
        "tensors": lambda name, row: torch.tensor(row),
        "bfloat16": lambda name, row: torch.tensor(row).bfloat16() if name == "logprobs" else torch.tensor(row),
    }
    if kind in ragged:
        batch: Any = {name: [ragged[kind](name, values) for values in column] for name, column in columns.items()}
    elif kind == "nested":
        batch = {
            name: torch.nested.nested_tensor([torch.tensor(values) for values in column], layout=torch.jagged)
            for name, column in columns.items()
        }
    else:
        batch = padded(columns, left=[0] * 6) if kind == "arrays" else columns
    assert contents(audit_batch(**batch)) == contents(wanted)
    assert wanted.failed


@pytest.mark.parametrize("left", [[0] * 6, [5, 0, 2, 9, 1, 4]], ids=["on the right", "on both sides"])
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_padding_is_no_part_of_a_row(left: list[int], kind: str) -> None:
    of = np.asarray if kind == "arrays" else pytest.importorskip("torch").tensor
    columns = faulty(rows())
    batch = {name: of(column) for name, column in padded(columns, left).items()}
    assert contents(audit_batch(**batch)) == contents(audit_batch(**columns))
    one_less = {name: column[:, 1:] if name == "logprobs" else column for name, column in batch.items()}
    if not left[0]:
        # The first token of a row is not sampled: nothing is said about it, and nothing else changes.
        codes = [finding.code for finding in audit_batch(**columns).findings]
        assert [finding.code for finding in audit_batch(**one_less).findings] == codes
        one_less["loss_mask"] = of(batch["loss_mask"][:, 1:].tolist()) * 1.0  # a mask of floats
        assert [finding.code for finding in audit_batch(**one_less).findings] == codes


def responses(columns: Columns) -> tuple[Columns, list[int]]:
    """The rows as prompts and responses, with columns over the response; and the length of each prompt."""
    prompts = [mask.index(1) for mask in columns["loss_mask"]]
    split = {
        "prompts": [ids[:at] for ids, at in zip(columns["token_ids"], prompts, strict=True)],
        "responses": [ids[at:] for ids, at in zip(columns["token_ids"], prompts, strict=True)],
    }
    over = {
        name: [values[at:] for values, at in zip(columns[name], prompts, strict=True)]
        for name in ("loss_mask", "logprobs")
    }
    return split | over, prompts


def verl(columns: Columns) -> dict[str, np.ndarray]:
    """A batch as verl pads it: prompts on the left, everything over the response on the right."""
    split, _ = responses(columns)
    widths = {"prompts": max(map(len, split["prompts"])) + 2, "responses": max(map(len, split["responses"])) + 4}
    size = len(split["prompts"])
    batch = {name: np.zeros((size, widths.get(name, widths["responses"]))) for name in split}
    seen = np.zeros((size, sum(widths.values())), np.int64)
    for row in range(size):
        prompt, response = len(split["prompts"][row]), len(split["responses"][row])
        batch["prompts"][row, widths["prompts"] - prompt :] = split["prompts"][row]
        for name in ("responses", "loss_mask", "logprobs"):
            batch[name][row, :response] = split[name][row]
        seen[row, widths["prompts"] - prompt : widths["prompts"] + response] = 1
    ids = {name: batch[name].astype(np.int64) for name in ("prompts", "responses", "loss_mask")}
    return {**batch, **ids, "attention_mask": seen}


def test_a_batch_of_verl_is_read_as_its_log(tmp_path: Path) -> None:
    columns = faulty(rows())
    batch = verl(columns)
    log = tmp_path / "verl.jsonl"
    names = {"loss_mask": "response_mask", "logprobs": "rollout_log_probs"}
    line = {names.get(name, name): column.tolist() for name, column in batch.items()}
    log.write_text(json.dumps(line).replace("NaN", "null") + "\n")
    wanted = [result for result in scan_rollouts(log) if not result.of_log]
    over = {name: batch[name] for name in ("loss_mask", "logprobs", "attention_mask")}
    split = audit_batch(prompt_ids=batch["prompts"], completion_ids=batch["responses"], **over)
    whole = audit_batch(np.concatenate([batch["prompts"], batch["responses"]], axis=1), **over)
    assert contents(split) == contents(whole)
    assert {result.rollout.format for result in wanted if result.rollout} == {"verl_batch"}
    codes = [[finding.code for finding in result.findings] for result in wanted]
    assert [[finding.code for finding in result.findings] for result in split if not result.of_log] == codes
    assert np.flatnonzero(split.failing_rows).tolist() == [1, 2, 3]


def test_a_mask_over_prompt_and_response_fits_a_padded_batch() -> None:
    batch = verl(faulty(rows()))
    wide = np.zeros_like(batch["attention_mask"])
    wide[:, batch["prompts"].shape[1] :] = batch["loss_mask"]
    logprobs = np.full(wide.shape, np.nan)
    logprobs[:, batch["prompts"].shape[1] :] = batch["logprobs"]
    audit = audit_batch(
        prompt_ids=batch["prompts"],
        completion_ids=batch["responses"],
        loss_mask=wide,
        logprobs=logprobs,
        attention_mask=batch["attention_mask"],
    )
    assert contents(audit) == contents(audit_batch(**faulty(rows())))


def test_samples_of_slime_have_columns_over_the_response() -> None:
    columns = faulty(rows())
    split, prompts = responses(columns)
    lengths = [len(ids) - at for ids, at in zip(columns["token_ids"], prompts, strict=True)]
    audit = audit_batch(columns["token_ids"], split["loss_mask"], split["logprobs"], response_lengths=lengths)
    assert np.flatnonzero(audit.failing_rows).tolist() == [1, 2, 3]
    unmasked = audit_batch(columns["token_ids"], None, split["logprobs"], response_lengths=np.array(lengths))
    assert unmasked.summary.generated_tokens == sum(lengths), "without a mask the whole response is trained"


def test_a_trainer_s_logprobs_are_compared_with_the_sampler_s() -> None:
    columns = rows()
    near = [[value - 0.001 * (value < 0) for value in values] for values in columns["logprobs"]]
    far = [[value * 3 for value in values] for values in columns["logprobs"]]
    assert "LPR509" not in {finding.code for finding in audit_batch(**columns, trainer_logprobs=near).findings}
    assert "LPR509" in {finding.code for finding in audit_batch(**columns, trainer_logprobs=far).findings}


def test_rows_of_a_batch_are_compared_with_each_other() -> None:
    columns = rows()
    twice = {name: [*column, column[0]] for name, column in columns.items()}
    audit = audit_batch(**twice)
    repeated = [finding for finding in audit.findings if finding.code == "REC009"]
    assert [finding.place.row for finding in repeated if finding.severity.word == "error"] == [6]
    assert audit.failing_rows.tolist() == [False] * 6 + [True]


def test_a_row_that_cannot_be_read_is_a_finding() -> None:
    columns = rows()
    columns["token_ids"][2][3] = "three"
    audit = audit_batch(**columns)
    assert [(finding.code, finding.place.row) for finding in audit.findings] == [("REC001", 2)]
    assert "position 3" in audit.findings[0].hit.message
    assert audit.failing_rows.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("wrong", stored(__file__, "WRONG"), ids=itemgetter("words"))
def test_columns_that_do_not_belong_together_are_one_clear_line(wrong: dict[str, Any]) -> None:
    arrays, words = wrong.get("arrays", ()), wrong["words"]
    columns = {name: np.array(column) if name in arrays else column for name, column in wrong["columns"].items()}
    with pytest.raises(Exception, match=re.escape(words)) as caught:
        audit_batch(**columns)
    assert isinstance(caught.value, SetupError) or words == "no such folder"


def test_a_row_of_two_dimensions_is_one_clear_line() -> None:
    with pytest.raises(SetupError, match=r"token_ids\[1\] is not a row but a value of 2 dimensions"):
        audit_batch(token_ids=[[1], np.zeros((2, 2), int)])


def test_a_tensor_that_is_not_dense_is_one_clear_line() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones((1, 2), dtype=torch.int64).to_sparse(), torch.ones((1, 2), device="meta")):
        with pytest.raises(SetupError, match=r"token_ids is not an array .* pass a dense tensor"):
            audit_batch(token_ids=tensor)
        with pytest.raises(SetupError, match=r"token_ids\[0\] is not an array"):
            audit_batch(token_ids=[tensor[0]])


def test_an_empty_batch_is_never_called_clean() -> None:
    audit = audit_batch(token_ids=[])
    assert not audit.failed
    assert str(audit) == "nothing audited: there are no rollouts"


def test_an_audit_says_its_verdict_with_its_causes_and_its_numbers() -> None:
    audit = audit_batch(**faulty(rows()))
    first, *causes = str(audit).splitlines()
    assert first.startswith("findings: errors in 3 of 6 rollouts (50 %): 1 rollout with logprobs above zero, ")
    assert any("above zero" in cause and cause.endswith("LPR504") for cause in causes)
    numbers = audit.metrics()
    assert numbers["tito_audit/share_with_errors"] == 0.5
    assert numbers["tito_audit/findings/LPR504"] == 1
    table = audit.findings_table()
    assert table.num_rows == len(audit.findings)
    assert set(table["file"].to_pylist()) == {"batch"}
    assert "LPR504" in audit._repr_html_()
    assert repr(audit).startswith("<BatchAudit: findings: errors in 3 of 6")


def test_an_auditor_is_made_once_and_keeps_nothing_of_a_batch() -> None:
    auditor = BatchAuditor(Settings(select=("LPR",)))
    first, second = (auditor.audit(**faulty(rows(seed))) for seed in (1, 2))
    assert isinstance(first, BatchAudit)
    assert contents(second) == contents(audit_batch(**faulty(rows(2)), settings=Settings(select=("LPR",))))
    assert contents(auditor.audit(**faulty(rows(1)))) == contents(first)


def test_faults_of_rules_are_found_in_batches_as_in_logs(tmp_path: Path) -> None:
    """Single changes of one entry anywhere in a row."""
    plain = rows(size=1)
    at = range(len(plain["token_ids"][0]))
    for name, value in (("logprobs", 0.25), ("logprobs", 0.0), ("loss_mask", 1), ("loss_mask", 0)):
        changed: Columns = {key: [] for key in plain}
        for position in one_in(5, at):
            for key, column in plain.items():
                entries = list(column[0])
                if key == name:
                    entries[position] = value
                elif key == "token_ids":
                    entries[0] = 300 + position  # or the rows would train the same tokens
                changed[key].append(entries)
        same_as_a_scan(changed, tmp_path, None)


def test_a_clean_row_of_a_batch_takes_no_more_calls_than_it_did() -> None:
    batch = Batches(turns=8, tokens=3_072)
    auditor = BatchAuditor()
    auditor.audit(**batch.batch(0, 4))
    rows, profile = batch.batch(1, 32), cProfile.Profile()
    profile.enable()
    auditor.audit(**rows)
    profile.disable()
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls / 32 < 1_080  # 1,107 before there were rules for what stands beside tokens
