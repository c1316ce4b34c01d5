"""Coverage that a gate demands: where rules ran, had nothing to check, or could not look."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import run, written
from tests.tables import table
from tests.test_fit import row as fitting
from tests.tiers import examples
from tests.world import TOKENIZERS
from tito_audit import (
    CoverageCount,
    Gate,
    GateSettings,
    MaxRate,
    Place,
    Requirement,
    Result,
    Rollout,
    Settings,
    Skip,
    gate_rollouts,
    scan_rollouts,
)
from tito_audit.errors import SetupError
from tito_audit.evidence.needs import Needs, applies, describe_missing
from tito_audit.gate.judge import Coverage
from tito_audit.rules import all_rules
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import Override
from tito_audit.terminal.verdict import coverage_reason, coverage_words

TOY, OTHER = str(TOKENIZERS / "toy_bpe"), str(TOKENIZERS / "toy_metaspace")
ROW = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]}
BARE = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
UNMASKED = {"token_ids": [5, 6, 7, 8], "logprobs": [0.0, 0.0, -0.5, -0.25]}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEXT = {"messages": TALK}
FIRST = {"prompt_token_ids": [5, 6], "generation_token_ids": [7, 8], "generation_log_probs": [-0.5, -0.25]}
NEXT = {"prompt_token_ids": [5, 6, 7, 8, 9], "generation_token_ids": [7], "generation_log_probs": [-0.5]}
CALL, CALLS = {"calls": [FIRST]}, {"calls": [FIRST, NEXT]}
PARTLY = {"calls": [FIRST, {**NEXT, "generation_log_probs": None}]}
UNPROMPTED = {"calls": [FIRST, {**NEXT, "prompt_token_ids": None}]}
UNASKED = {"calls": [{**FIRST, "prompt_token_ids": None}]}
UNSCORED = {"calls": [{**FIRST, "generation_log_probs": None}]}
BROKEN = {**ROW, "logprobs": [0.0, 0.0, 0.5, -0.25]}
"""One LPR504."""
UNREADABLE = {"token_ids": [5, "x"]}
FAMILIES = ("LPR", "MSK", "REC", "SEQ", "TOK", "TPL")


def rows_of(names: str) -> list[dict[str, Any]]:
    """Rows by the names that they have above; `+` stands between names whose columns one row has."""
    return [
        {column: value for part in name.split("+") for column, value in globals()[part].items()}
        for name in names.split()
    ]


def gate_of(log: Any, *required: str, options: Mapping[str, Any] | None = None, **more: Any) -> Gate:
    """What the gate says of a log that required rules have to cover."""
    named = tuple(Requirement(codes) for codes in required)
    scan = gate_rollouts(log, Settings(**(options or {})), GateSettings(**{"required": named, **more}))
    for _ in scan:
        pass
    assert scan.summary.gate is not None
    return scan.summary.gate


def numbers(count: CoverageCount) -> tuple[int, int, int]:
    return count.covered, count.idle, count.of


# What a rollout lacks, and what that means


def test_every_need_says_what_it_means_to_lack_it() -> None:
    for need in Needs:
        assert isinstance(describe_missing(need), str), need  # KeyError for one that the table lacks
        assert isinstance(applies((need,), Needs.NOTHING), bool), need


@pytest.mark.parametrize(*table(__file__, "families_cover_what_holds_all_that_they_check"))
def test_families_cover_what_holds_all_that_they_check_without_a_tokenizer(
    row: str, covers: str, tmp_path: Path
) -> None:
    gate = gate_of(written(tmp_path / "a.jsonl", rows_of(row)), *FAMILIES)
    covered = {count.codes for count in gate.required if count.covered}
    # A row without images does not need the tokenizer to count them.
    assert covered - {"REC"} == {*covers.split()}
    assert ("REC" in covered) == (row != "TEXT")
    assert gate.failed


@pytest.mark.parametrize(*table(__file__, "a_rule_covers_where_it_ran_or_has_nothing_to_check"))
def test_a_rule_covers_where_it_ran_or_has_nothing_to_check(
    code: str, rows: str, covered: int, idle: int, tmp_path: Path
) -> None:
    logged = rows_of(rows)
    (count,) = gate_of(written(tmp_path / "a.jsonl", logged), "" if code == "ALL" else code).required
    assert numbers(count) == (covered, idle, len(logged))
    assert count.codes == code
    assert count.failed == (covered < len(logged))


def test_calls_that_lack_what_others_have_are_said_to(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [CALLS, PARTLY, UNPROMPTED])
    lpr, seq = gate_of(log, "LPR", "SEQ").required
    assert (lpr.because, lpr.first) == ("no logprobs in some calls", Place(str(log), 1))
    assert (seq.because, seq.first) == ("no prompt ids in some calls", Place(str(log), 2))


def test_images_need_a_tokenizer_that_is_known_to_write_them(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, TALK[1]]
    log = written(tmp_path / "a.jsonl", [{**ROW, "messages": image}])
    (bare,) = gate_of(log, "REC010").required
    (toy,) = gate_of(log, "REC010", options={"tokenizer": TOY}).required
    assert (numbers(bare), bare.because) == ((0, 0, 1), describe_missing(Needs.TOKENIZER))
    assert (numbers(toy), toy.because) == ((0, 0, 1), describe_missing(Needs.IMAGE_TOKENS))


def test_what_a_rule_needs_and_has_is_never_nothing_to_check() -> None:
    everything = Needs(sum(need.value for need in Needs))
    assert all(applies(rule.needs, everything) for rule in all_rules())
    assert all(applies(rule.needs, Needs.NOTHING) for rule in all_rules() if Needs.MASK in rule.needs)


def test_a_skip_that_lacks_something_says_so_and_one_with_nothing_to_check_does_too(tmp_path: Path) -> None:
    (result,) = scan_rollouts(written(tmp_path / "a.jsonl", [CALL]))
    skips = {skip.code: skip for skip in result.skips}
    assert not skips["SEQ301"].applies
    assert not skips["LPR507"].applies
    assert skips["MSK401"].applies
    assert skips["TOK101"].applies


def test_a_template_that_is_missing_covers_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in Path(TOY).iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name == "tokenizer_config.json":
            text = json.dumps({key: value for key, value in json.loads(text).items() if key != "chat_template"})
        if file.suffix != ".jinja":
            (folder / file.name).write_text(text, encoding="utf-8")
    log = written(tmp_path / "a.jsonl", [{**CALLS, "messages": TALK}, {**CALL, "messages": TALK}])
    tpl, tok = gate_of(log, "TPL", "TOK", options={"tokenizer": str(folder)}).required
    assert (numbers(tpl), numbers(tok)) == ((0, 0, 2), (2, 0, 2))
    assert tpl.because in (
        describe_missing(Needs.TEMPLATE),
        describe_missing(Needs.SEVERAL_CALLS | Needs.RENDERING),
    )


def test_rules_that_were_held_back_cover_nothing_and_say_so(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [fitting("toy_bpe", number) for number in range(16)])
    fits = gate_of(log, "TOK", "TPL", "LPR", options={"tokenizer": TOY})
    assert [count.covered for count in fits.required] == [16, 16, 16]
    wrong = gate_of(log, "TOK", "TPL", "LPR", options={"tokenizer": OTHER}, min_audited=0.5)
    assert [count.covered for count in wrong.required] == [0, 0, 16]
    assert {count.because for count in wrong.required[:2]} == {"the tokenizer does not fit the log (REC007)"}
    assert wrong.failed


# Counting


CODES = sorted(rule.code for rule in all_rules() if not rule.of_log)
REASONS = ("no logprobs", "no messages", "only one call")


@st.composite
def made_up(draw: st.DrawFn) -> list[Result]:
    """Results of two logs, as any audit might give them."""
    results = []
    for row in range(draw(st.integers(0, 12))):
        place = Place(draw(st.sampled_from(("a", "b"))), row)
        kind = draw(st.sampled_from(("rollout", "rollout", "rollout", "unreadable", "log")))
        skips = tuple(
            Skip(code, draw(st.sampled_from(REASONS)), draw(st.booleans()))
            for code in sorted(draw(st.sets(st.sampled_from(CODES), max_size=len(CODES))))
        )
        partial = tuple(
            Skip(code, "no logprobs in some calls")
            for code in sorted(draw(st.sets(st.sampled_from(CODES), max_size=3)) - {skip.code for skip in skips})
        )
        counts = {"tokens": draw(st.sampled_from((0, 9))), "uncompared": draw(st.sampled_from((0, 1)))}
        if kind == "rollout":
            results.append(Result(place, Rollout(place, "slime"), skips=skips, partial=partial, counts=counts))
        else:
            results.append(Result(place, None, of_log=kind == "log"))
    return results


SHARES = st.sampled_from((0.07, 0.1, 0.3333, 0.5, 0.95, 1.0))


def naively(results: list[Result], prefix: str, codes: Callable[[str], frozenset[str]]) -> list[tuple[str, Place]]:
    """Reason and place of each rollout; "" where it is covered, "-" where none had anything to check."""
    words = []
    for result in results:
        checked = {code for code in codes(result.place.file) if code.startswith(prefix) and code in CODES}
        if result.of_log or not checked:
            continue
        lacking = [skip for skip in (*result.skips, *result.partial) if skip.code in checked and skip.applies]
        idle = {skip.code for skip in result.skips} >= checked
        if result.rollout is None:
            word = "the row cannot be read"
        elif lacking:
            word = lacking[0].because
        elif not result.counts["tokens"] and not checked <= {"REC001", "REC005"}:
            word = "no token ids"
        else:
            word = "-" if idle else ""
        words.append((word, result.place))
    return words


@settings(max_examples=examples(20, 2000), deadline=None)
@given(
    made_up(), st.sampled_from(("", "LPR", "SEQ30", "TPL203", "REC001")), SHARES, st.sets(st.sampled_from(CODES))
)
def test_counts_are_those_of_a_naive_counter(
    results: list[Result], prefix: str, share: float, ignored: set[str]
) -> None:
    def codes(file: str) -> frozenset[str]:
        return frozenset(CODES) - (ignored if file == "b" else frozenset())

    coverage = Coverage((Requirement(prefix, share),), share, codes, lambda file: True)
    coverage.begin(["a", "b"], frozenset(CODES))
    for result in results:
        coverage.add(result)
    (count,) = coverage.required()
    naive = naively(results, prefix, codes)
    lacking = [(word, place) for word, place in naive if word not in ("", "-")]
    assert numbers(count) == (
        len(naive) - len(lacking),
        sum(word == "-" for word, _ in naive),
        len(naive),
    )
    assert count.failed == (not naive or (len(naive) - len(lacking)) * 10_000 < round(share * 10_000) * len(naive))
    named = [word for word, _ in lacking]
    assert count.lacking == max(map(named.count, named), default=0)
    assert (count.because in named) if named else count.because is None
    assert count.first == next((place for word, place in lacking if word == count.because), None)
    audited = coverage.min_audited()
    assert audited is not None
    rows = [result for result in results if not result.of_log]
    looked = [
        result
        for result in rows
        if result.rollout
        and result.counts["tokens"]
        and not result.counts["uncompared"]
        and codes(result.place.file) - {skip.code for skip in result.skips}
    ]
    assert (audited.covered, audited.of, audited.idle) == (len(looked), len(rows), 0)
    if count.failed and count.of:
        assert f"{count.covered - count.idle:,}" in coverage_reason(count) or count.idle
        assert str(count.first) in coverage_reason(count)


def test_reasons_without_number_take_no_memory_without_bound(tmp_path: Path) -> None:
    coverage = Coverage((Requirement("LPR"),), None, lambda file: frozenset(CODES), lambda file: True)
    coverage.begin(["a"], frozenset(CODES))
    for row in range(1000):
        place = Place("a", row)
        skip = Skip("LPR501", f"messages not read: {row}")
        coverage.add(Result(place, Rollout(place, "slime"), skips=(skip,), counts={"tokens": 1}))
    (count,) = coverage.required()
    assert (count.because, count.lacking, count.first) == ("other reasons", 900, Place("a", 100))


MIXED = list(chain.from_iterable([ROW, CALLS, BARE, TEXT, CALL, UNMASKED] for _ in range(25)))


@pytest.mark.parametrize(
    "options",
    [{}, {"sample": 0.4}, {"limit": 57}, {"sample": 0.4, "limit": 31}],
    ids=("all", "sample", "limit", "both"),
)
def test_several_processes_a_sample_and_a_limit_count_the_rows_that_were_audited(
    options: dict[str, Any], tmp_path: Path
) -> None:
    log = written(tmp_path / "a.jsonl", [*MIXED, UNREADABLE])
    required = tuple(Requirement(codes) for codes in FAMILIES)
    gates = []
    for jobs in (1, 2) if can_fork() else (1,):
        gated = gate_rollouts(
            log, Settings(jobs=jobs, **options), GateSettings(required=required, min_audited=1.0)
        )
        gated.scan.chunk_bytes = 1_000 if jobs > 1 else None
        rows = sum(not result.of_log for result in gated)
        assert gated.summary.gate is not None
        assert {count.of for count in gated.summary.gate.coverage} == {rows}
        gates.append(gated.summary.gate)
    assert all(gate == gates[0] for gate in gates)
    assert options or rows == len(MIXED) + 1


def test_joined_calls_are_one_rollout(tmp_path: Path) -> None:
    rows = [
        {
            "session_id": "s",
            "input_ids": call["prompt_token_ids"],
            "output_ids": call["generation_token_ids"],
            "logprobs": call["generation_log_probs"],
        }
        for call in (FIRST, NEXT)
    ]
    log = written(tmp_path / "a.jsonl", rows)
    (joined,) = gate_of(log, "SEQ301").required
    (apart,) = gate_of(log, "SEQ301", options={"join": False}).required
    assert (numbers(joined), numbers(apart)) == ((1, 0, 1), (2, 2, 2))


# The verdict


@pytest.mark.parametrize(*table(__file__, "coverage_in_words"))
def test_coverage_in_words(count: dict[str, Any], reason: str, words: str) -> None:
    file, *at = count.get("first", [""])
    coverage = CoverageCount(**{**count, "first": Place(file, *at) if at else None})
    assert not reason or coverage_reason(coverage) == reason
    assert coverage_words(coverage) == words


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_python_callers_cannot_require_what_is_no_share(share: float, tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(SetupError, match="above 0 and at most 1"):
        gate_rollouts(log, gate=GateSettings(required=(Requirement("LPR", share),)))
    with pytest.raises(SetupError, match="above 0 and at most 1"):
        gate_rollouts(log, gate=GateSettings(min_audited=share))
    with pytest.raises(SetupError, match='Unknown rule "XYZ"'):
        gate_rollouts(log, gate=GateSettings(required=(Requirement("XYZ"),)))


def test_a_rate_and_a_requirement_that_are_missed_are_both_said(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [BROKEN, BARE])
    gate = gate_of(log, "LPR", max_rates=(MaxRate("LPR", 0.0),))
    assert [reason.partition(" ")[0] for reason in gate.because] == ["LPR:", "LPR"]


def test_logs_that_are_let_off_or_have_other_rules_take_no_part(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    written(folder / "a.jsonl", [ROW] * 3)
    written(folder / "b.jsonl", [BARE] * 5)
    off = Override((str(folder / "b.jsonl"),), {"fail_on": "never"})
    other = replace(off, changes={"ignore": ("LPR",)})
    for override in (off, other):
        gate = gate_of(folder, "LPR", options={"overrides": (override,)})
        assert (numbers(gate.required[0]), gate.failed) == ((3, 0, 3), False)
        alone = gate_of(folder / "b.jsonl", "LPR", options={"overrides": (override,)})
        assert (numbers(alone.required[0]), alone.failed) == ((0, 0, 0), False)
    audited = gate_of(folder, min_audited=1.0, options={"overrides": (off,)}).min_audited
    assert audited is not None
    assert audited.of == 3
    whole = gate_of(folder, "LPR", options={"overrides": (off,), "fail_on": "never"})
    assert whole.required[0].of == 8
    chosen = {"select": ("TOK",), "overrides": (replace(off, changes={"select": ("LPR",)}),)}
    assert numbers(gate_of(folder, "LPR", options=chosen).required[0]) == (0, 0, 5)
    with pytest.raises(SetupError, match="exclude every rule of it"):
        gate_of(folder / "a.jsonl", "LPR", options=chosen)


# The configuration file


def test_config_shows_what_the_file_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tito-audit.toml").write_text('require = ["LPR"]\nmin-audited = 0.07\n', encoding="utf-8")
    written(tmp_path / "a.jsonl", [ROW, BARE])
    code, out, _ = run("config")
    assert code == 0
    assert 'require = ["LPR"]' in out
    assert "min-audited = 0.07" in out


# Reports


@pytest.mark.parametrize(
    "report", ["json", "jsonl", "markdown", "junit", "github", "sarif", "html", "concise", "text"]
)
def test_every_report_says_what_was_required_and_missed(report: str, tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [ROW, ROW, BARE])
    code, out, _ = run("scan", log, "-f", report, "--require", "LPR,MSK403", "--min-audited", "1%", "-t", TOY)
    assert code == 1
    assert "no logprobs" in out
    assert "100 % required" in out.replace("%25", "%")
    if report in ("text", "junit"):
        assert "require MSK403: ran on 3 of 3 rollouts (100 %): passed" in out
        assert "min-audited 1%: 3 of 3 rollouts audited (100 %): passed" in out
    if report in ("markdown", "html", "sarif"):
        assert "require MSK403" in out
        assert "min-audited 1%" in out


def test_json_has_the_numbers(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [ROW, BARE, CALL])
    _, out, _ = run("scan", log, "-f", "json", "--require", "LPR,SEQ=50%", "--min-audited", "90%")
    gate = json.loads(out)["summary"]["gate"]
    first = {"file": str(log), "row": 1, "item": 0}
    lpr = {"covered": 2, "of": 3, "rate": 2 / 3, "because": "no logprobs", "lacking": 1, "first": first}
    assert gate["required"] == [
        {"codes": "LPR", "idle": 0, "share": 1.0, "failed": True, **lpr},
        {
            "codes": "SEQ",
            "idle": 3,
            "share": 0.5,
            "failed": False,
            **{"covered": 3, "of": 3, "rate": 1.0, "because": None, "lacking": 0, "first": None},
        },
    ]
    assert gate["min_audited"]["failed"] is True
    assert set(gate["min_audited"]) == set(gate["required"][0]) - {"codes", "idle"}
    assert json.loads(run("scan", log, "-f", "json")[1])["summary"]["gate"]["min_audited"] is None
