"""The `prometheus` report: the counts of a scan as gauges, for a gate that runs every night.

The text is what the textfile collector of node_exporter and a Pushgateway take; it is valid OpenMetrics too. All
values are of this scan alone. Findings in the baseline are counted apart, as `tito_audit_known_findings`. Rules
that ran and found nothing have zeros, which rules that did not run have not. A family of rules covers a rollout
with token ids if none of its rules was skipped for something that the log lacks.

Alert on `tito_audit_gate_failed == 1`, and on the age of the file: a scan that could not run leaves the old one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TextIO

from tito_audit.record.finding import Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.verdict import verdict

_VERDICTS = ("passed", "failed", "clean", "findings", "nothing audited", "nothing compared")
_FAMILY = 3
"""Characters of a code that name its family."""


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, counting what each family of rules covers, then write the gauges."""
    uncovered: Counter[str] = Counter()  # by family of rules: rollouts that it does not cover; "": that none does
    while (result := (yield)) is not None:
        if result.of_log:
            continue
        if result.rollout is None or not result.counts.get("tokens"):
            uncovered[""] += 1
        else:
            uncovered.update({skip.code[:_FAMILY] for skip in (*result.skips, *result.partial) if skip.applies})
    gauge = partial(_write_gauge, out)
    rows = summary.rollouts + summary.rows_unreadable
    gauge("files", "Logs that were read.", [({}, len(summary.files))])
    gauge("rollouts", "Rollouts that were read.", [({}, summary.rollouts)])
    gauge("unreadable_rows", "Rows that could not be read.", [({}, summary.rows_unreadable)])
    gauge("compared_rollouts", "Rollouts in which something was compared.", [({}, summary.compared)])
    gauge("open_rows", "Rows that could not be judged.", [({}, summary.open_rows)])
    gauge("tokens", "Tokens that were read.", [({}, summary.tokens)])
    gauge("generated_tokens", "Tokens that were sampled.", [({}, summary.generated_tokens)])
    severities = sorted(Severity, reverse=True)
    codes = sorted(summary.codes | summary.findings.keys())
    new, in_baseline = [], []
    for code in codes:
        count = summary.findings.get(code)
        for severity in severities:
            labels = {"code": code, "severity": severity.word}
            new.append((labels, 0 if count is None else count.new[severity]))
        in_baseline.append(({"code": code}, 0 if count is None else count.known))
    gauge("findings", "Findings that are not in the baseline.", new)
    gauge("known_findings", "Findings that are in the baseline.", in_baseline)
    hit = [(severity, summary.new[severity].rollouts if severity in summary.new else 0) for severity in severities]
    labelled = [({"severity": severity.word}, number) for severity, number in hit]
    gauge("rollouts_with_findings", "Rollouts with findings that are not in the baseline.", labelled)
    families = sorted({code[:_FAMILY] for code in summary.codes})
    covered = [({"family": name}, rows - uncovered[""] - uncovered[name]) for name in families]
    gauge("covered_rollouts", "Rollouts that a family of rules covers.", covered)
    if summary.gate is not None:
        gate = summary.gate
        gauge("gate_failed", "1 if the gate failed, 0 if it passed.", [({}, gate.failed)])
        gauge("gate_failing_findings", "Findings that each fail the gate.", [({}, gate.failing)])
        rates = [({"limit": rate.limit}, rate.rate) for rate in gate.rates]
        gauge("gate_rate", "How often findings with a limit occur.", rates)
        shares = [
            ({"required": share.codes or "any", "share": f"{share.share:g}"}, share.rate)
            for share in gate.coverage
        ]
        gauge("gate_coverage_ratio", "Share of rollouts with required coverage.", shares)
    word = verdict(summary).word
    words = [({"verdict": each}, each == word) for each in _VERDICTS]
    gauge("verdict", "1 for the verdict on the scan.", words)
    gauge("scan_seconds", "How long the scan took.", [({}, round(summary.seconds, 3))])
    out.write("# EOF\n")


def _write_gauge(out: TextIO, name: str, what: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
    """Write one gauge with its help; nothing without samples."""
    lines = {}
    for labels, value in samples:
        shown = {key: visible(text).replace("\\", "\\\\").replace('"', '\\"') for key, text in labels.items()}
        quoted = ",".join(f'{key}="{text}"' for key, text in shown.items())
        number = f"{int(value)}" if isinstance(value, int) else "+Inf" if math.isinf(value) else f"{value:.12g}"
        lines[f"tito_audit_{name}{{{quoted}}}" if labels else f"tito_audit_{name}"] = number
    if lines:
        out.write(f"# HELP tito_audit_{name} {what}\n# TYPE tito_audit_{name} gauge\n")
        out.writelines(f"{sample} {number}\n" for sample, number in lines.items())


PROMETHEUS = Report(
    "prometheus",
    "gauges for node_exporter or a Pushgateway: findings by rule, coverage, verdict",
    write,
    suffix="prom",
)
