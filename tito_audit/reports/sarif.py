"""The `sarif` report: SARIF 2.1.0, for code scanning and for editors.

One run, within the limits of GitHub's code scanning: it accepts 25,000 results and shows 5,000, so these are the
worst 5,000 with their rules. A notification and the run's properties say how many were left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, TextIO
from urllib.parse import quote

from tito_audit.record.finding import Finding, Severity, Side, Where
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.report_objects import as_json, pick
from tito_audit.summary import Gate, Summary
from tito_audit.terminal.escape import cut, visible
from tito_audit.terminal.place import line_number, place_words, token_range
from tito_audit.terminal.verdict import required_name, skip_lines
from tito_audit.terminal.words import many
from tito_audit.terminal.worst import Shortlist
from tito_audit.version import VERSION

RESULTS = 5_000
"""How many results of a run code scanning shows."""
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_TEXT = 1_000
"""Maximum characters of a message or description; code scanning accepts 1,024."""
_TOKENS = 32
_PIECE = 200
_NOTIFICATIONS = 100
_FIXED = 1_000


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, then write one run, one result per line."""
    shortlist: Shortlist[Finding] = Shortlist(RESULTS)
    while (result := (yield)) is not None:
        for finding in result.findings:
            new = 0 if finding.known else len(Severity)
            shortlist.offer(finding.severity + new, finding.code, finding)
    worst: dict[str, Severity] = {}
    for finding in shortlist:
        worst[finding.code] = max(finding.severity, worst.get(finding.code, Severity.NOTE))
    codes = sorted(worst)
    head = as_json({"$schema": _SCHEMA, "version": "2.1.0"})[:-1]
    rules = []
    for code in codes:
        title = options.titles.get(code) or code
        manual = options.docs.get(code, "")
        manual_or_hint = manual or f"`tito-audit explain {code}` says what it means and what fixes it."
        _, _, finds = f"\n{manual}".partition("\n## What it finds\n")
        finds = " ".join(finds.partition("\n## ")[0].split())
        problem = "recommendation" if worst[code] is Severity.NOTE else worst[code].word
        rule = {
            "id": code,
            "shortDescription": {"text": cut(title, _TEXT)},
            "fullDescription": {"text": cut(finds or title, _TEXT)},
            "help": {"text": manual_or_hint, "markdown": manual_or_hint},
            "defaultConfiguration": {"level": worst[code].word},
            "properties": {
                "tags": ["token-in-token-out"],
                "precision": "high",
                "problem.severity": problem,
            },
        }
        rules.append(rule)
    # The category, which separates alerts of different sets of logs: their common folder.
    posix = [_relative_to_sources(file).as_posix() for file in summary.files]
    try:
        shared = os.path.commonpath(posix) if posix else ""
    except ValueError:  # some absolute, some not
        shared = ""
    named = "/".join(part for part in shared.split("/") if part not in ("", ".", ".."))
    run = {
        "tool": {"driver": {"name": "tito-audit", "version": VERSION, "semanticVersion": VERSION, "rules": rules}},
        "automationDetails": {"id": (f"tito-audit/{visible(named)}/" if named else "tito-audit/")},
        "columnKind": "unicodeCodePoints",
        **_run_facts(summary, shortlist.left_out),
    }
    out.write(f'{head},"runs":[\n{as_json(run)[:-1]},"results":[')
    between = "\n"
    for value in _result_objects(shortlist, codes, summary.gate):
        out.write(between + as_json(value))
        between = ",\n"
    out.write("\n]}]}\n")


def _result_objects(findings: Shortlist[Finding], codes: list[str], gate: Gate | None) -> Iterator[dict[str, Any]]:
    index = {code: number for number, code in enumerate(codes)}
    seen: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        fingerprint = finding.fingerprint
        seen[finding.place.file, fingerprint] += 1
        hit, where = finding.hit, f" ({place_words(finding)})"
        message = cut(visible(hit.message) or finding.code, _TEXT - len(where))
        result = {
            "ruleId": finding.code,
            "ruleIndex": index[finding.code],
            "level": finding.severity.word,
            # `[text](address)` would be a link.
            "message": {"text": message.replace("](", "]\\x28") + where},
            "locations": [_location_object(finding)],
            # Code scanning recognizes an alert by primaryLocationLineHash only.
            "partialFingerprints": {
                "titoAudit/v1": fingerprint,
                "primaryLocationLineHash": f"{fingerprint}:{seen[finding.place.file, fingerprint]}",
            },
            "properties": {
                **pick(finding.place, "row item"),
                **pick(hit, "turn where start end"),
                "cause": cut(hit.cause, _PIECE),
                "recorded": _side_object(hit.recorded) | {"label": hit.labels[0]},
                "canonical": _side_object(hit.canonical) | {"label": hit.labels[1]},
                "becauseOf": finding.because_of,
                "repair": finding.repair,
            },
        }
        if finding.folded is not None:
            result["occurrenceCount"] = finding.times
        if gate is not None and gate.baseline is not None:
            result["baselineState"] = "unchanged" if finding.known else "new"
        yield result


def _location_object(finding: Finding) -> dict[str, Any]:
    # Relative to the source root, where scans start; a `file:` URI outside of it.
    file = finding.place.file
    if "://" in file:
        scheme, _, rest = file.partition("://")
        artifact = {"uri": f"{scheme}://{quote(rest)}"}
    else:
        path = _relative_to_sources(file)
        try:
            data = os.fsencode(path.as_posix())
        except UnicodeEncodeError:
            data = path.as_posix().encode("utf-8", "backslashreplace")
        if path.is_absolute():
            artifact = {"uri": f"file://{'' if data.startswith(b'/') else '/'}{quote(data)}"}
        else:
            artifact = {"uri": quote(data), "uriBaseId": "%SRCROOT%"}
    physical: dict[str, Any] = {"artifactLocation": artifact}
    line = line_number(finding.place)
    if line is not None:
        physical["region"] = {"startLine": line}
    place, hit = finding.place, finding.hit
    parts = [f"row {place.row}", *([f"item {place.item}"] if place.item else [])]
    parts += [] if hit.turn is None else [f"turn {hit.turn}"]
    if hit.where is Where.LOG or token_range(finding) is not None:
        parts.append("training row" if hit.where is Where.ROW else str(hit.where))
    logical = {"name": parts[-1], "fullyQualifiedName": "/".join(parts), "kind": "element"}
    return {"physicalLocation": physical, "logicalLocations": [logical]}


def _relative_to_sources(file: str) -> PurePath:
    """The path, relative to the working folder if it is inside: that folder differs from machine to machine."""
    path, root = PurePath(file), os.getcwd()  # noqa: PTH109
    return path.relative_to(root) if path.is_absolute() and path.is_relative_to(root) else path


def _side_object(side: Side) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "ids": list(side.ids[:_TOKENS]),
        "pieces": [cut(piece, _PIECE) for piece in side.pieces[:_TOKENS]],
    }
    left = max(len(side.ids), len(side.pieces)) - _TOKENS
    return {**shown, "leftOut": left} if left > 0 else shown


def _run_facts(summary: Summary, left_out: int) -> dict[str, Any]:
    """The notifications and the properties of the run: counts, the verdict of the gate, gone baseline findings.

    Gone findings are not results with state `absent`: code scanning would open an alert for each of them.
    """
    rules, gate = summary.findings.values(), summary.gate
    texts = [("note", notice) for notice in summary.notices]
    texts += [("note", f"Not checked: {line}") for line in skip_lines(summary)]
    if len(texts) > _NOTIFICATIONS:
        texts[_NOTIFICATIONS:] = [("note", f"and {many(len(texts) - _NOTIFICATIONS, 'more notification')}")]
    if left_out:
        words = f"{many(left_out, 'finding')} left out: these are the worst {RESULTS:,}, shared among the rules."
        texts.insert(0, ("warning", words + " The reports json and jsonl hold all of them."))
    invocation: dict[str, Any] = {
        "executionSuccessful": True,
        "toolExecutionNotifications": [
            {"level": level, "message": {"text": cut(visible(text), _TEXT)}} for level, text in texts
        ],
    }
    counts: dict[str, Any] = {
        **pick(summary, "rollouts turns tokens"),
        "generatedTokens": summary.generated_tokens,
        "rowsUnreadable": summary.rows_unreadable,
        "withoutIds": summary.without_ids,
        "uncompared": summary.uncompared,
        "openRows": summary.open_rows,
        "openBesideFaults": summary.open_beside_faults,
        "tokenizer": summary.tokenizer,
        "tokenizerCommits": summary.tokenizer_commits,
        "leftOut": left_out,
        "new": {severity.word: sum(rule.new[severity] for rule in rules) for severity in Severity},
        "known": sum(rule.known for rule in rules),
    }
    if gate is not None:
        invocation["exitCode"] = int(gate.failed)
        because = [cut(visible(reason), _TEXT) for reason in gate.because]
        counts["gate"] = {"failed": gate.failed, "because": because}
        counts["required"] = [
            {"name": required_name(count), **pick(count, "covered of failed")} for count in gate.coverage
        ]
    if gate is not None and gate.baseline is not None:
        counts["fixed"] = [pick(finding, "fingerprint code file row times") for finding in gate.fixed[:_FIXED]]
        counts["fixedLeftOut"] = max(len(gate.fixed) - _FIXED, 0)
    return {"invocations": [invocation], "properties": counts}


SARIF = Report(
    "sarif", "SARIF 2.1.0 for code scanning and editors: the worst 5,000 findings", write, suffix="sarif"
)
