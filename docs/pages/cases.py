"""The example of a rule: what the tool prints of one case of its fixture, and what a repair makes of it.

The case is the one with `example = true`, else the first that a safe repair cures, else the first. A rule about
whole logs has a `[log]` instead: `lines` as they are in a file, or `rows` that are cases, `times` times over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.text import Text

from tests import toy
from tito_audit import RepairSettings, Settings, scan_rollouts
from tito_audit.cli._diff import diff_lines
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Finding, Result, Severity, Where
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Rollout
from tito_audit.repairs import all_repairs
from tito_audit.report import ReportOptions
from tito_audit.rule import Rule
from tito_audit.rules import all_rules
from tito_audit.run.check import check
from tito_audit.run.row_repair import AppliedRepairs, AuditedRollout, RepairTerms, apply_repairs, chosen_repairs
from tito_audit.terminal.page import console_for, finding_lines
from tito_audit.terminal.sequence import DrawOptions, TokenLine, draw_tokens, logprob_words
from tito_audit.voice import messages_name_flags

__all__ = ["Example", "example_of"]

FIXTURES = toy.ROOT / "fixtures" / "rules"
WIDTH = 96
_AROUND = 3
"""Tokens drawn around a finding."""
_SHORT = 30
"""Tokens of a sequence that is drawn whole."""
_NUMBERS = 12
"""Numbers of a column that are shown."""
_DRAWN = ("MSK", "LPR", "REC002", "REC008", "REC009", "REC010")
"""Codes about masks, logprobs or a whole sequence: it is drawn."""
_NEVER = ("canonical", "drop", "rescore")
"""Repairs that give up what was sampled or ask a model: no example needs them."""


@dataclass(frozen=True, slots=True)
class Example:
    """A case as the tool shows it."""

    name: str
    """The sentence that says what is special about the case."""
    before: str
    """The findings of the rule as reports print them, with the tokens of both sides."""
    command: str = ""
    """The command line that repairs it; "" where no repair does."""
    after: str = ""
    """What the repair changes, as `repair --diff` prints it."""


@cache
def example_of(rule: Rule) -> Example:
    """The example of a rule."""
    fixture = tomllib.loads((FIXTURES / f"{rule.code}.toml").read_text(encoding="utf-8"))
    if "log" in fixture:
        return _of_log(rule, fixture["log"])
    cases = [_Case(rule, case) for case in fixture["flag"]]
    chosen = next((one for one in cases if "example" in one.case), None)
    chosen = chosen or next((one for one in cases if one.repair and "--" not in one.repair.flags), cases[0])
    before = "\n".join(_printed(chosen.before()))
    if chosen.repair is None:
        return Example(chosen.case["name"], before)
    command = f"tito-audit repair LOG -o OUT{chosen.repair.flags}"
    return Example(chosen.case["name"], before, command, "\n".join(_printed(chosen.after(chosen.repair.applied))))


def _of_log(rule: Rule, log: Mapping[str, Any]) -> Example:
    """What a scan says of a whole log."""
    lines = log.get("lines") or [json.dumps(_as_row(one)) for one in log["rows"]] * log.get("times", 1)
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        settings = Settings(tokenizer=str(toy.TOKENIZERS / log.get("tokenizer", "toy_bpe")))
        found = [one for result in scan_rollouts([str(path)], settings) for one in result.findings]
        mine = [_relative(one, folder) for one in found if one.code == rule.code]
    return Example(log["name"], "\n".join([*log.get("lines", ()), *_printed(_findings(mine[:1]))]))


def _as_row(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case of one call as a row of a log."""
    (turn,) = toy.rollout_of(case).turns
    assert turn.prompt_ids is not None
    assert turn.completion_ids is not None
    ids = {"prompt_token_ids": turn.prompt_ids.tolist(), "completion_token_ids": turn.completion_ids.tolist()}
    return {"messages": case["messages"], **ids}


def _relative(finding: Finding, folder: str) -> Finding:
    """A finding whose message names files as seen from their folder."""
    said = finding.hit.message.replace(f"{folder}/", "").replace(f"{toy.TOKENIZERS}/", "")
    return replace(finding, hit=replace(finding.hit, message=said))


@dataclass(frozen=True, slots=True)
class _Repair:
    """A repair that cures the findings of the rule."""

    flags: str
    applied: AppliedRepairs


class _Case:
    """A case of a fixture, audited."""

    def __init__(self, rule: Rule, case: dict[str, Any]) -> None:
        self.rule, self.case = rule, case
        self.audited = self._audit(toy.rollout_of(case))
        self.repair = next(self._repairs(), None)

    def before(self) -> Iterator[Text]:
        """The findings of the rule, and the sequence they are in where it is about mask or logprobs."""
        found = self._mine(self.audited)[:2]
        drawn = self.rule.code.startswith(_DRAWN)
        if drawn:
            found = [replace(one, hit=replace(one.hit, recorded=type(one.hit.recorded)())) for one in found]
        yield from _findings(found)
        if drawn:
            yield from _sequence(self.audited.evidence, found)

    def after(self, applied: AppliedRepairs) -> Iterator[Text]:
        """What a repair changes, and the rows of a fork with their tokens."""
        after = tuple(one.result for row in applied.rows for one in row.rollouts)
        outcome = Outcome(self.audited.result.place, (self.audited.result,), after, cured=applied.cured)
        vocabulary = self.audited.evidence.vocabulary
        piece = None if vocabulary is None else vocabulary.piece
        _, *lines = diff_lines(outcome, piece)
        cured = [f"{name} ({', '.join(codes)})" for name, codes in applied.cured.items()]
        yield Text(f"repaired by {', '.join(cured)}")
        if len(after) == 1:
            yield from lines
            return
        for line, one in zip([line for line in lines if "row " in line.plain], after, strict=True):
            yield line
            assert one.rollout is not None
            yield from _drawn(_whole(one.rollout), self.audited.evidence)

    def _mine(self, audited: AuditedRollout) -> list[Finding]:
        return [one for one in audited.result.findings if one.code == self.rule.code]

    def _audit(self, rollout: Rollout) -> AuditedRollout:
        tokenizer = toy.tokenizer_of(self.case) if self.case.get("tokenizer", True) else None
        renderer = toy.renderer_of(self.case) if tokenizer and self.case.get("template", True) else None
        evidence = gather(rollout, tokenizer, renderer, trained_again=toy.again_of(self.case))
        rules = all_rules()
        findings, skips = check(evidence, rules, frozenset(rule.code for rule in rules))
        return AuditedRollout(evidence, Result(rollout.place, rollout, findings, skips))

    def _repairs(self) -> Iterator[_Repair]:
        """The repairs that cure every finding of the rule, first what runs without being named."""
        claiming = [one.name for one in all_repairs() if one.claims(self.rule.code) and one.name not in _NEVER]
        for flags, given, threshold in (
            ("", RepairSettings(), Severity.ERROR),
            (" --fail-on warning", RepairSettings(), Severity.WARNING),
            *((f" --with {name}", RepairSettings((name,)), Severity.WARNING) for name in claiming),
        ):
            before = self._worst(self._mine(self.audited))
            applied = self._applied(given, threshold)
            left = self._worst(one for row in applied.rows for each in row.rollouts for one in self._mine(each))
            if before >= threshold > left:
                yield _Repair(flags, applied)

    @staticmethod
    def _worst(found: Iterable[Finding]) -> int:
        """The highest severity, below all where nothing is found."""
        return max((one.severity for one in found), default=-1)

    def _applied(self, given: RepairSettings, threshold: Severity) -> AppliedRepairs:
        rules = all_rules()
        codes = frozenset(rule.code for rule in rules)
        terms = RepairTerms(chosen_repairs(given), rules, threshold, codes, given.unsafe, given.choices)
        row = {"rollout": self.audited.rollout}
        return apply_repairs(row, _ToyFormat(), [self.audited], lambda row: [self._audit(row["rollout"])], terms)


class _ToyFormat:
    """What writes and reads the rollouts of cases, as the driver of repairs asks it of a format."""

    name = "toy"

    def update(self, row: dict[str, Any], repaired: Sequence[Any]) -> list[dict[str, Any]]:
        """The rows of the repaired rollouts, each with its columns as a format would read them."""
        return [{"rollout": _read_again(one.rollout)} for one in repaired]


def _read_again(rollout: Rollout) -> Rollout:
    row = rollout.training_row
    if row is None:
        return rollout
    by_role = {column.role: column for column in row.columns}
    mask, logprobs = by_role.get(ColumnRole.LOSS_MASK), by_role.get(ColumnRole.LOGPROBS)
    read = build_training_row(
        row.token_ids,
        mask=None if mask is None else (mask.name, mask.values),
        logprobs=None if logprobs is None else (logprobs.name, logprobs.values),
        prompt_length=row.prompt_length,
        sentinel=row.sentinel,
    )
    return replace(rollout, training_row=read)


def _findings(found: Sequence[Finding]) -> Iterator[Text]:
    console = console_for(StringIO(), ReportOptions(width=WIDTH, color=False))
    for one in found:
        yield from finding_lines(one, console, with_place=False)


def _sequence(evidence: Evidence, found: Sequence[Finding]) -> Iterator[Text]:
    """The sequence that the findings are in, with its mask and logprobs, and its columns that fit no tokens."""
    first = found[0].hit
    places = [(one.hit.start, one.hit.end) for one in found if one.hit.where is first.where]
    if first.where is Where.ROW:
        row = evidence.rollout.training_row
        assert row is not None
        tokens, columns = TokenLine(row.token_ids, row.loss_mask, row.logprobs), row.columns
    else:
        assert first.turn is not None
        turn = evidence.rollout.turns[first.turn]
        ids = turn.prompt_ids if first.where is Where.PROMPT else turn.completion_ids
        assert ids is not None
        logprobs = turn.completion_logprobs if first.where is Where.COMPLETION else None
        tokens, columns = TokenLine(ids, None, logprobs), turn.columns
    whole = any(end - start == len(tokens.ids) for start, end in places)
    yield from _drawn(tokens, evidence, [] if whole else places)
    yield from (_numbers(one) for one in columns if one.alignment is None or one.role is ColumnRole.OTHER)


def _numbers(column: Column) -> Text:
    first = column.values[:_NUMBERS]
    mask = column.role is ColumnRole.LOSS_MASK
    values = [f"{one:g}" if mask else logprob_words(float(one)) for one in np.asarray(first, np.float64)]
    more = [f"… {len(column.values):,} entries"] if len(column.values) > _NUMBERS else []
    return Text(f"  {column.name}  {'  '.join(values + more)}")


def _whole(rollout: Rollout) -> TokenLine:
    """The training row of a rollout, else what its last call saw and sampled; with what is trained of it."""
    row = rollout.training_row
    if row is not None:
        return TokenLine(row.token_ids, row.loss_mask, row.logprobs)
    seen = rollout.turns[-1].seen_ids
    assert seen is not None
    trained = np.zeros(len(seen), np.bool_)
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        start = len(turn.prompt_ids)
        trained[start : start + len(turn.completion_ids)] = True
    return TokenLine(seen, trained)


def _drawn(tokens: TokenLine, evidence: Evidence, places: Sequence[tuple[int, int]] = ()) -> Iterator[Text]:
    piece = None if evidence.vocabulary is None else evidence.vocabulary.piece
    full = len(tokens.ids) <= _SHORT
    options = DrawOptions(WIDTH, piece, context=_AROUND, full=full, ids=True, logprobs=True)
    for part in draw_tokens(tokens, options, findings=places):
        yield from part.lines


def _printed(lines: Iterator[Text]) -> list[str]:
    with messages_name_flags():
        return [line.plain.rstrip() for line in lines]
