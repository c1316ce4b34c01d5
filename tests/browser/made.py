"""Results made up for the page: many findings as real logs have them, measures, views."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tito_audit.record.finding import Finding, Hit, Result, Severity, Side, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.report import ReportOptions, feed_results
from tito_audit.reports import report_named
from tito_audit.summary import Summary
from tito_audit.viewer.model import Measures, Observed, ShownStretch, Swap, View, ViewSequence

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while"),
    *("seven", "wizards", "quietly", "bake", "pies", "for", "Zürich", "日本", "café"),
)
RULES = (
    ("TOK101", Severity.ERROR, "merge"),
    ("TOK103", Severity.NOTE, "resplit"),
    ("SEQ301", Severity.ERROR, "resplit"),
    ("TPL203", Severity.WARNING, "tool call: spacing"),
    ("TPL202", Severity.NOTE, "white space trimmed in an answer"),
    ("LPR505", Severity.ERROR, "0.0"),
)


HOSTILE = (
    "</script><script>window.owned=1</script><!-- <![CDATA[ <img src=x onerror=window.owned=2> "
    "<svg/onload=window.owned=3> \" ' ` onfocus=window.owned=4 autofocus {{7*7}} ${window.owned=5} "
    "http://evil.invalid/ \x1b]0;owned\x07 \x00 \u202eturned\u202c \u2028 \ud83d &lt;b&gt; "
    "javascript:window.owned=6"
)
"""What a model may say to act in a browser."""


def written(results: Iterable[Result], summary: Summary | None = None, **options: Any) -> str:
    """The page of results."""
    summary = summary or Summary(files=["logs/run.jsonl"], tokenizer="toy_bpe", encoder="tokenizers", seconds=2.0)
    out = io.StringIO()

    def tallied() -> Iterator[Result]:
        for result in results:
            summary.add(result)
            yield result

    feed_results(tallied(), report_named("html").write(summary, out, ReportOptions(**options)))
    return out.getvalue()


def page(path: Path, results: Iterable[Result], summary: Summary | None = None, **options: Any) -> Path:
    """The page of results, as a file."""
    path.write_text(written(results, summary, **options), encoding="utf-8", errors="backslashreplace")
    return path


def many(number: int, *, seed: int = 7) -> Iterator[Result]:
    """Rollouts with so many findings in all, no two of one text, four in each rollout."""
    luck = random.Random(seed)
    for row in range(-(-number // 4)):
        place = Place(f"/data/export/part-{row % 7:05}.jsonl", row)
        findings = tuple(_finding(place, luck) for _ in range(min(4, number - 4 * row)))
        counts = {"turns": 3, "tokens": 2000, "generated_tokens": 600}
        yield Result(place, Rollout(place, "slime"), findings, (), counts)


def _finding(place: Place, luck: random.Random) -> Finding:
    code, severity, cause = luck.choice(RULES)
    words = [" " + luck.choice(WORDS) for _ in range(luck.randint(2, 8))]
    start = luck.randrange(4000)
    recorded = Side(tuple(luck.randrange(150_000) for _ in words), tuple(words))
    joined = "".join(words[:2])
    canonical = Side((luck.randrange(150_000), *recorded.ids[2:]), (joined, *words[2:]))
    quoted = "+".join(repr(word) for word in words)
    message = (
        f"the text is cut at other places: recorded {quoted}, encoding the text again gives {joined!r}; "
        f"harmless as logged, but would drift if the text were re-encoded"
    )
    hit = Hit(
        Where.COMPLETION, start, start + len(words), message, luck.randrange(9), cause, None, recorded, canonical
    )
    return Finding(code, severity, place, hit, "fork", luck.random() < 0.1)


def measures() -> Measures:
    """Counts in which every chart has something to draw."""
    counts = Measures()
    counts.by_turn[:6] = [
        [900, 20, 10, 5],
        [800, 30, 0, 12],
        [700, 0, 0, 0],
        [0, 0, 0, 0],
        [90, 9, 9, 9],
        [1, 0, 0, 3],
    ]
    counts.by_position[2:9] = np.arange(28).reshape(7, 4) * 10
    counts.by_logprob[:, 0] = np.arange(16) * 40
    counts.by_logprob[:, 3] = np.arange(16)[::-1]
    counts.without_logprob[:] = (10, 0, 0, 2)
    counts.roles = {"assistant": (600, 12), "user": (0, 400), "tool": (7, 300), "system": (0, 90)}
    return counts


def view(place: Place) -> tuple[Observed, tuple[Finding, ...]]:
    """A rollout of two sequences with a merge, a token too many, a gap and everything a token may say."""
    pieces = ("I", " am", " Skin", "ny", ",", " he", " said", ".", "\n", "<|im_end|>")
    data = tuple(piece.encode().hex() for piece in pieces)
    answer = ShownStretch(
        0,
        tuple(range(100, 110)),
        pieces,
        data,
        (-0.25, -1.5, -7.125, -0.001, None, -0.5, -0.5, -0.5, -0.5, -0.0625),
        (True,) * 9 + (False,),
        ("assistant",) * 9 + ("template",),
    )
    later = ShownStretch(400, (7, 8, 9), ("so", " be", " it"), ("736f", "206265", "206974"))
    swaps = (
        Swap(2, 4, (4410,), (" Skinny",), ("20536b696e6e79",), 1, "TOK101", "next prompt"),
        Swap(8, 8, (198, 198), ("\n", "\n"), ("0a", "0a"), 3, "TPL202", "template", after=1),
    )
    sequences = (
        ViewSequence(Where.COMPLETION, 0, 403, (answer, later), swaps, "ended by length"),
        ViewSequence(Where.PROMPT, 1, 2, (ShownStretch(0, (4, 5), ("Hi", "!")),), same_as="template"),
        ViewSequence(Where.ROW, None, 3, (ShownStretch(0, (1, 2, 3), (), (), None, (False, True, True), None),)),
    )
    merge = Finding(
        "TOK101",
        Severity.ERROR,
        place,
        Hit(
            Where.COMPLETION,
            2,
            4,
            "Two tokens re-encode as one.",
            0,
            "merge",
            None,
            Side((102, 103), (" Skin", "ny")),
        ),
        "splice",
    )
    sentinel = Finding(
        "LPR505", Severity.WARNING, place, Hit(Where.ROW, 1, 3, "A placeholder is trained.", None, "0.0")
    )
    shown = View(("system", "user", "assistant", "user", "assistant"), sequences, left_out=2)
    return Observed(measures(), shown), (merge, sentinel)


def viewed(number: int = 2) -> Iterator[Result]:
    """Rollouts that come with a view."""
    for row in range(number):
        place = Place("logs/run.jsonl", row)
        observed, findings = view(place)
        counts = {"turns": 1, "tokens": 900, "generated_tokens": 403}
        yield Result(place, Rollout(place, "slime"), findings, (), counts, observed=observed)
