"""The gauges of a nightly gate, as those who read them parse them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as as_openmetrics
from prometheus_client.parser import text_string_to_metric_families as as_prometheus

from tests.command import run
from tests.report_results import GATE, TRAPS, golden, results, written
from tito_audit.reports import report_named
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.summary import RateCount

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "fixtures" / "docs" / "first_scan.jsonl"
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
Labels = tuple[tuple[str, str], ...]
Gauges = dict[str, dict[Labels, float]]


def gauges(text: str) -> Gauges:
    """The values of each gauge by its labels; both parsers read the same, and nothing twice."""
    readings: list[Gauges] = []
    for parse in (as_prometheus, as_openmetrics):
        by_name: Gauges = {}
        for family in parse(text):
            assert family.type == "gauge"
            assert family.documentation
            assert family.name not in by_name
            values = by_name[family.name.removeprefix("tito_audit_")] = {}
            for sample in family.samples:
                labels = tuple(sample.labels.items())
                assert labels not in values
                values[labels] = sample.value
        readings.append(by_name)
    assert readings[0] == readings[1]
    return readings[0]


def by(values: dict[Labels, float], *labels: str) -> dict[str, float]:
    """Values other than 0 by the values of their labels."""
    return {" ".join(dict(key)[name] for name in labels): value for key, value in values.items() if value}


def test_gauges_count_what_the_json_report_counts(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "prometheus")}
    wanted = [f"--report={name}={file}" for name, file in files.items()]
    code, _, _ = run("scan", LOG, "-t", TOY, "--no-config", "-q", *wanted)
    summary = json.loads(files["json"].read_text())["summary"]
    seen = gauges(files["prometheus"].read_text())
    assert code == 1
    for name, key in (("rollouts", "rollouts"), ("tokens", "tokens"), ("generated_tokens", "generated_tokens")):
        assert seen[name][()] == summary[key]
    assert by(seen["findings"], "code", "severity") == {
        f"{code} {word}": count[word]
        for code, count in summary["findings"].items()
        for word in ("error", "warning", "note")
        if count[word]
    }
    codes = {dict(labels)["code"] for labels in seen["findings"]}
    assert codes == {rule.code for rule in all_rules()}, "rules that found nothing have zeros"
    assert seen["gate_failed"][()] == 1
    assert seen["gate_failing_findings"][()] == summary["gate"]["failing"]
    assert by(seen["verdict"], "verdict") == {"failed": 1}


def test_a_rule_that_did_not_run_has_no_zero() -> None:
    code, out, _ = run("scan", LOG, "--select", "LPR,SEQ301", "--no-config", "-f", "prometheus")
    seen = gauges(out)
    assert code == 0
    assert {dict(labels)["code"][:3] for labels in seen["findings"]} == {"LPR", "SEQ"}
    assert {dict(labels)["family"] for labels in seen["covered_rollouts"]} == {"LPR", "SEQ"}


def test_coverage_is_by_family(tmp_path: Path) -> None:
    code, out, _ = run("scan", LOG, "--no-config", "-f", "prometheus")
    covered = gauges(out)["covered_rollouts"]
    assert code in (0, 1)
    assert {dict(labels)["family"] for labels in covered} == set(FAMILIES)
    assert covered[(("family", "SEQ"),)] == 5
    assert covered[(("family", "TPL"),)] == 0, "there is no tokenizer"
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(LOG.read_bytes() + b"{\n")
    seen = gauges(run("scan", bad, "-t", TOY, "--no-config", "-f", "prometheus")[1])
    assert seen["unreadable_rows"][()] == 1
    assert seen["covered_rollouts"][(("family", "REC"),)] == 5, "a row that cannot be read is not covered"


def test_known_findings_are_counted_apart(tmp_path: Path) -> None:
    baseline = tmp_path / "known.json"
    scan = ("scan", LOG, "-t", TOY, "--no-config", "--baseline", baseline)
    run(*scan, "--update-baseline", "-q")
    code, out, _ = run(*scan, "-f", "prometheus")
    seen = gauges(out)
    assert code == 0
    assert sum(seen["known_findings"].values()) == 4
    assert not any(value for labels, value in seen["findings"].items() if dict(labels)["severity"] == "error")
    assert (seen["gate_failed"][()], by(seen["verdict"], "verdict")) == (0, {"passed": 1})


def test_a_log_without_ids_never_passes_as_clean() -> None:
    seen = gauges(run("scan", ROOT / "fixtures/formats/text_only.jsonl", "--no-config", "-f", "prometheus")[1])
    assert by(seen["verdict"], "verdict") == {"nothing audited": 1}
    assert seen["compared_rollouts"][()] == 0
    assert not any(seen["covered_rollouts"].values())


@pytest.mark.parametrize("trap", TRAPS)
def test_labels_are_escaped(trap: str) -> None:
    rates = (RateCount(f'TOK"\\\n{trap}', 1, 2, 0.5, True), RateCount("SEQ=0", 1, 0, float("inf"), True))
    text = written(report_named("prometheus"), results(), gate=replace(GATE, rates=(*rates, rates[0])))
    seen = gauges(text)["gate_rate"]
    assert sorted(seen.values()) == [0.5, float("inf")]
    assert all(line.startswith(("# ", "tito_audit_")) for line in text.splitlines())


def test_the_text_ends_as_openmetrics_do_and_says_no_count_in_exponents() -> None:
    text = golden(report_named("prometheus"))
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    assert "e+" not in text
