"""The reference engine: the scan with every shortcut turned off. Both must report exactly the same.

It renders every text with jinja2 alone, encodes whole texts with `tokenizers` alone, remembers no prefix and no
segment, tries every format on every row, and parses whole lines. `python -m benchmarks.reference LOG TOKENIZER`
compares the scan with it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tito_audit import formats
from tito_audit.evidence import judgement, logprob_values, prompts, rendered
from tito_audit.evidence.completions import ConfirmedIds
from tito_audit.evidence.differences import Comparison
from tito_audit.evidence.differences import compare_text as compare_incrementally
from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Result
from tito_audit.render.renderer import Renderer
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings

__all__ = ["by_reference", "main", "nothing_fast", "said"]

Said = tuple[Any, ...]


@contextmanager
def nothing_fast() -> Iterator[None]:
    """Turn off every shortcut of the engine, in this process and its forks."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def never(*_: Any, **__: Any) -> bool:
        return False

    def whole(self: Reference, text: str, _recorded: Ids, **_how: bool) -> Ids:
        # As the library reads it: a surrogate pair is its character, half of one is U+FFFD.
        formed = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return np.array(self.tokenizer.backend.encode(formed, add_special_tokens=False).ids, np.int32)

    def all_of_it(text: str, recorded: Ids, _before: Comparison | None, reference: Reference, **how: Any) -> Any:
        return compare_incrementally(text, recorded, None, reference, **how)[0], None

    with ExitStack() as stack:
        for target, name, instead in (
            (sys.modules["tito_audit.run.rows"], "number_columns", lambda _: {}),
            (formats, "_candidate_formats", lambda _: tuple((format, False) for format in formats.all_formats())),
            (rendered, "render_fast", nothing),
            (rendered, "turn_reader", nothing),
            (logprob_values, "logprob_values_on_mask", nothing),
            (judgement, "_judge_exact_row", nothing),
            (Evidence, "verified", Verified.NOTHING),
            (prompts, "prompt_starts", nothing),
            (prompts, "find_scaffolds", nothing),
            (prompts, "compare_text", all_of_it),
            (ConfirmedIds, "cover", never),
            (Reference, "spells", never),
            (Renderer, "render_chat_fast", lambda *_, **__: ([], None)),
            (Reference, "encode_as", whole),
            (Reference, "leads_to", never),
        ):
            stack.enter_context(patch.object(target, name, instead))
        yield


def said(results: Iterable[Result]) -> Iterator[Said]:
    """Everything that a scan reports for each rollout."""
    for one in results:
        yield one.place, one.findings, one.skips, dict(one.counts)


def by_reference(log: str | Path, settings: Settings) -> Iterator[Said]:
    """What the reference engine reports for each rollout."""
    with nothing_fast():
        yield from said(scan_rollouts(log, replace(settings, encoder="tokenizers")))


def main(argv: Sequence[str] | None = None) -> int:
    """Scan a log with both engines and compare; 1 at the first rollout that differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=main.__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(argv)
    settings = Settings(tokenizer=str(asked.tokenizer), jobs=asked.jobs)
    started = time.perf_counter()
    fast = list(said(scan_rollouts(asked.log, settings)))
    between = time.perf_counter()
    rollouts = findings = 0
    for mine, theirs in zip_longest(fast, by_reference(asked.log, settings)):
        if mine != theirs:
            print(f"rollout {rollouts} differs:\n  scan       {mine}\n  reference  {theirs}")
            return 1
        rollouts += 1
        findings += len(mine[1])
    ended = time.perf_counter()
    tokens = sum(one[3].get("tokens", 0) for one in fast)
    print(
        f"{asked.log}: {tokens:,} tokens in {rollouts:,} rollouts, {findings:,} findings, no difference "
        f"({between - started:.0f} s, the reference {ended - between:.0f} s, {asked.jobs} processes)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
