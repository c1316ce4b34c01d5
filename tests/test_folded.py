"""What a rule finds very often in one row is folded: reports stay small, and every count stays what it was."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import run, written
from tests.tiers import DEEP, some
from tests.toy import toy_renderer, toy_tokenizer
from tito_audit.evidence.gather import gather
from tito_audit.record.build import build_training_row
from tito_audit.record.finding import Finding, Result, Where
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run import row_repair
from tito_audit.run.check import SINGLE, check_explained, explain_differences
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairChoices, RepairSettings, Settings
from tito_audit.summary import Summary
from tito_audit.tables import findings_table

TOKENIZER = Path("fixtures/tokenizers/toy_bpe")
WORD = " the"
ALL = frozenset(rule.code for rule in all_rules())


def spelled() -> list[int]:
    """The word, each byte a token of its own."""
    vocabulary = toy_tokenizer().vocabulary
    return [vocabulary.ids_of_bytes(bytes([byte]))[0] for byte in WORD.encode()]


def calls(several: int) -> Rollout:
    """A rollout in which every call's answer is re-encoded in the next prompt."""
    sampled, again = spelled(), list(toy_tokenizer().vocabulary.ids_of_bytes(WORD.encode()))
    turns, prompt = [], [82, 76]
    for number in range(several):
        turns.append(Turn(np.array(prompt, np.int32), np.array(sampled, np.int32)))
        prompt = [*prompt, *again, 300 + number % 50]
    return Rollout(Place("calls.jsonl", 0), "generic", turns=tuple(turns))


def row(several: int) -> Rollout:
    """A rollout with a training row of words that re-encode otherwise, all with logprobs above 0."""
    ids = np.array(spelled() * several, np.int32)
    places = np.arange(len(ids))
    logprobs = np.where(places % 2 == 0, 0.5, -0.25 - places % 7 / 8)
    line = build_training_row(ids, mask=("loss_mask", [1] * len(ids)), logprobs=("logprobs", logprobs))
    return Rollout(Place("row.jsonl", 0), "generic", training_row=line)


def audited(rollout: Rollout, single: int | None) -> Result:
    evidence = explain_differences(gather(rollout, toy_tokenizer(), toy_renderer()), all_rules())
    findings, skips = check_explained(evidence, all_rules(), ALL, all_repairs, single)
    return Result(rollout.place, rollout, findings, skips)


def counted(result: Result) -> dict[str, Any]:
    """All counts of a scan of one rollout."""
    summary = Summary()
    summary.add(result)
    heads = {
        key: (headline.words, headline.error, headline.warning, headline.note, headline.rollouts, headline.codes)
        for key, headline in summary.headlines.items()
    }
    return {"findings": summary.findings, "causes": summary.causes, "new": summary.new, "headlines": heads}


@pytest.mark.parametrize("single", [1, 2, 7, 40])
@pytest.mark.parametrize("make", [calls, row])
def test_folding_changes_no_count(make: Any, single: int) -> None:
    rollout = make(50)
    every, folded = audited(rollout, None), audited(rollout, single)
    assert len(folded.findings) < len(every.findings), "something is folded"
    assert counted(folded) == counted(every)
    places = Counter((f.code, f.hit.where, *span) for f in folded.findings for span in f.spans())
    assert places == Counter((f.code, f.hit.where, f.hit.turn, f.hit.start, f.hit.end) for f in every.findings)


@pytest.mark.parametrize("make", [calls, row])
def test_findings_up_to_the_limit_are_as_if_nothing_were_folded(make: Any) -> None:
    rollout = make(30)
    every = audited(rollout, None).findings
    most = max(Counter((finding.code, finding.severity, finding.hit.cause) for finding in every).values())
    assert audited(rollout, most).findings == every
    assert audited(rollout, most - 1).findings == every, "one finding is not folded into itself"
    single_findings = [finding for finding in audited(rollout, 5).findings if finding.folded is None]
    apart, whole = ({replace(f, because_of=None) for f in findings} for findings in (single_findings, every))
    assert apart <= whole


def test_a_folded_finding_is_the_first_of_those_it_stands_for() -> None:
    every, folded = (audited(row(50), single).findings for single in (None, 10))
    (finding,) = (finding for finding in folded if finding.folded is not None and finding.code == "LPR504")
    same = [other for other in every if (other.code, other.hit.cause) == (finding.code, finding.hit.cause)]
    assert finding.times == len(same) - 10
    assert (finding.hit.start, finding.hit.recorded, finding.repair) == (
        same[10].hit.start,
        same[10].hit.recorded,
        same[10].repair,
    )
    more = f" ({finding.times - 1:,} more like this in the row are counted here)"
    assert finding.hit.message == same[10].hit.message + more
    assert finding.fingerprint not in {other.fingerprint for other in every}
    assert finding.tokens == sum(other.tokens for other in same[10:])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_of(tmp_path / "many.jsonl", row(2 * SINGLE))


def log_of(path: Path, rollout: Rollout) -> Path:
    line = rollout.training_row
    assert line is not None
    assert line.loss_mask is not None
    assert line.logprobs is not None
    ids, mask = line.token_ids.tolist(), line.loss_mask.astype(int).tolist()
    return written(path, [{"token_ids": ids, "loss_mask": mask, "logprobs": line.logprobs.tolist()}])


def test_every_report_says_how_many_there_are(log: Path) -> None:
    wanted = 2 * 2 * SINGLE
    scan = ("scan", log, "-t", TOKENIZER, "--select", "LPR504", "--jobs", "1")
    pages = {
        name: run(*scan, "--report", name)[1] for name in ("text", "json", "sarif", "junit", "concise", "github")
    }
    report = json.loads(pages["json"])
    assert report["summary"]["findings"]["LPR504"]["error"] == wanted
    assert sum(finding.get("folded", {"times": 1})["times"] for finding in report["findings"]) == wanted
    assert len(report["findings"]) == SINGLE + 1
    last = report["findings"][-1]
    assert last["folded"]["places"][0] == [last["turn"], last["start"], last["end"]]
    assert len(last["folded"]["places"]) == last["folded"]["times"] == wanted - SINGLE
    results = json.loads(pages["sarif"])["runs"][0]["results"]
    assert sum(entry.get("occurrenceCount", 1) for entry in results) == wanted
    assert f"{wanted:,} like this in row 0" in pages["text"]
    assert f"{wanted:,} error" in pages["junit"] or f"{wanted} error" in pages["junit"]
    for name in ("concise", "sarif", "json"):
        assert f"{wanted - SINGLE - 1} more like this in the row are counted here" in pages[name], name


def test_a_table_says_how_many_findings_a_row_of_it_stands_for() -> None:
    result = audited(row(50), 10)
    times = findings_table([result])["times"].to_pylist()
    assert times == [finding.times for finding in result.findings]
    assert max(times) > 1


def test_a_baseline_knows_a_folded_finding_until_one_of_its_places_changes(log: Path, tmp_path: Path) -> None:
    scan = ("scan", log, "-t", TOKENIZER, "--select", "LPR504", "--baseline", tmp_path / "known.json")
    assert run(*scan, "--update-baseline")[0] == 0
    code, out, _ = run(*scan, "--report", "json")
    assert code == 0
    assert json.loads(out)["summary"]["findings"]["LPR504"]["known"] == 4 * SINGLE
    row = json.loads(log.read_text())
    row["logprobs"][-2] = -0.5
    written(log, [row])
    code, out, _ = run(*scan, "--report", "json")
    assert code == 1
    assert json.loads(out)["summary"]["findings"]["LPR504"]["known"] == SINGLE


def test_findings_of_a_resumed_run_stay_folded(log: Path, tmp_path: Path) -> None:
    scan = ("scan", log, "-t", TOKENIZER, "--report", "json", "--resume", "--journal", tmp_path / "journal")
    first, again = (json.loads(run(*scan)[1])["findings"] for _ in range(2))
    assert first == again
    assert any("folded" in finding for finding in first)


def test_repair_sees_every_place_of_a_folded_finding(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("repair", log, "-o", out, "-t", TOKENIZER, "--with", "mask")
    mask = json.loads(out.read_text())["loss_mask"]
    assert not any(mask[::2]), "no token with an impossible logprob is trained"


def test_a_finding_is_what_it_was_where_nothing_is_folded() -> None:
    finding: Finding = audited(row(1), SINGLE).findings[0]
    assert (finding.folded, finding.times, finding.units) == (None, 1, 1)
    assert list(finding.spans()) == [(finding.hit.turn, finding.hit.start, finding.hit.end)]


STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"strategies": ("mask",), "unsafe": True},
    {"strategies": ("canonical",), "unsafe": True},
)
WAYS_TO_MASK = ("span", "turn", "first-divergence")
LOGS = some(sorted(Path("fixtures/formats").glob("*.jsonl")), 3)


def repairs_for(log: Path) -> list[RepairSettings]:
    """All repairs; in `make test` each strategy and each way to mask, and over three logs all pairs."""
    number = LOGS.index(log)
    return [
        RepairSettings(**strategy, choices=RepairChoices(mask_by=by))
        for (at, strategy), (other, by) in product(enumerate(STRATEGIES), enumerate(WAYS_TO_MASK))
        if DEEP or (at + other + number) % 3 == 0
    ]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_folding_changes_no_repair(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(tokenizer=str(TOKENIZER), jobs=1)
    for repairs in repairs_for(log):
        outputs = {}
        for single in (None, 0):
            monkeypatch.setattr(row_repair, "SINGLE", single)
            out = tmp_path / f"{single}.jsonl"
            outcomes = list(repair_rollouts([log], out, settings, replace(repairs, force=True)))
            reports = list(
                map(attrgetter("place", "cured", "declined", "needs_unsafe", "notes", "costs"), outcomes)
            )
            outputs[single] = reports, out.read_bytes()
        assert outputs[None] == outputs[0], repairs


def test_masking_by_turns_takes_out_the_turn_of_each_folded_place() -> None:
    """Two of three answers are re-encoded in the row."""
    again = list(toy_tokenizer().vocabulary.ids_of_bytes(WORD.encode()))
    prompt, added = [82, 76], [300, 301]
    answer, changed = [65, *spelled(), 66], [65, *again, 66]
    first = Turn(np.array(prompt, np.int32), np.array(answer, np.int32))
    second = Turn(np.array([*prompt, *answer, *added], np.int32), np.array(answer, np.int32))
    third = Turn(np.array([*prompt, *answer, *added, *answer, *added], np.int32), np.array([65, 66], np.int32))
    ids = [*prompt, *changed, *added, *changed, *added, 65, 66]
    mask = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    line = build_training_row(np.array(ids, np.int32), mask=("loss_mask", mask))
    rollout = Rollout(Place("row.jsonl", 0), "generic", turns=(first, second, third), training_row=line)
    evidence = explain_differences(gather(rollout, toy_tokenizer(), toy_renderer()), all_rules())
    left = []
    for single in (None, 0):
        findings = audited(rollout, single).findings
        drifts = tuple(f for f in findings if f.code.startswith("TOK") and f.hit.where is Where.COMPLETION)
        assert sum(finding.times for finding in drifts) == 2
        proposal = next(strategy for strategy in all_repairs() if strategy.name == "mask").mend(
            evidence, drifts, RepairChoices(mask_by="turn")
        )
        assert proposal is not None
        (repaired,) = proposal.rollouts
        left.append(repaired.rollout.training_row.loss_mask.tolist())
    assert left == [[False] * 12 + [True] * 2] * 2
