"""The fast engine says what the reference engine says: the same findings, skips and counts, to the token.

The reference renders with jinja2 alone, encodes whole texts with `tokenizers` alone, in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tito_audit.config import Settings
from tito_audit.evidence.reference import Reference
from tito_audit.pipeline import scan_rollouts
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Result
from tito_audit.tokens.encoders import FastEncoder
from tito_audit.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
MODELS = ("qwen2.5-coder", "gemma-3", "smollm2")
needs_rollouts = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]

Said = list[tuple[Any, ...]]


def said(results: Iterator[Result]) -> Said:
    return [(one.place, one.findings, one.skips, dict(one.counts)) for one in results]


def by_reference(log: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What an engine says that has nothing fast in it."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def whole(self: Reference, text: str, _recorded: Ids) -> Ids:
        backend = self.tokenizer.backend
        ids = backend.encode(
            text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), add_special_tokens=False
        ).ids
        import numpy as np

        return np.array(ids, np.int32)

    with monkeypatch.context() as patch:
        patch.setattr("tito_audit.pipeline.number_columns", lambda _: {})
        patch.setattr("tito_audit.evidence.written.spans_fast", nothing)
        patch.setattr(Reference, "render_fast", nothing)
        patch.setattr(Reference, "encode_as", whole)
        patch.setattr(Reference, "leads_to", lambda *_, **__: False)
        patch.setattr(Tokenizer, "prover", nothing)
        return said(iter(scan_rollouts(log, replace(settings, encoder="tokenizers", jobs=1))))


def check(log: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = by_reference(log, settings, monkeypatch)
    monkeypatch.setattr("tito_audit.tokens.tokenizer._WORTH_PROVING", -1)
    for encoder in ("tokenizers", "fastokens"):
        for jobs in (1, 2):
            scan = scan_rollouts(log, replace(settings, encoder=encoder, jobs=jobs))
            scan.chunk_bytes = 1 << 16
            assert said(iter(scan)) == wanted, f"{encoder}, {jobs} jobs"
            assert encoder in str(scan.summary.encoder)


@pytest.mark.parametrize("log", sorted((ROOT / "fixtures" / "formats").glob("*.jsonl")), ids=lambda log: log.stem)
def test_on_example_logs(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(log, Settings(tokenizer=str(TOY)), monkeypatch)


@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", [pytest.param(model, marks=needs_rollouts) for model in MODELS])
def test_on_tokens_that_models_sampled(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SHARED / "rollouts" / model / f"{mode}.jsonl.gz"
    check(log, Settings(tokenizer=str(SHARED / "tokenizers" / model)), monkeypatch)


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=needs_rollouts) for model in ("qwen2.5-coder", "gemma-3", "smollm2")]
)
def test_on_training_rows_with_and_without_messages(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    rows = []
    for line in gzip.decompress((SHARED / "rollouts" / model / "retok.jsonl.gz").read_bytes()).splitlines():
        row = json.loads(line)
        last = row["calls"][-1]
        ids = last["prompt_token_ids"] + last["generation_token_ids"]
        mask = [0] * len(last["prompt_token_ids"]) + [1] * len(last["generation_token_ids"])
        flat = {"token_ids": ids, "loss_mask": mask, "tools": row["tools"]}
        rows += [{**flat, "messages": row["messages"]}, flat]
    log = tmp_path / "rows.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(log, Settings(tokenizer=str(SHARED / "tokenizers" / model)), monkeypatch)


def test_a_fast_encoder_that_is_wrong_about_the_log_is_given_up_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong(FastEncoder):
        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            return super().encode_batch([text.replace("Oslo", "Bergen") for text in texts])

    monkeypatch.setattr("tito_audit.tokens.tokenizer.FastEncoder", Wrong)
    log = ROOT / "fixtures" / "formats" / "generic.jsonl"
    scan = scan_rollouts(log, Settings(tokenizer=str(TOY), encoder="fastokens", jobs=1))
    list(scan)
    assert scan.summary.encoder == "tokenizers"
    assert any("disagreed with tokenizers at 'What is the weather in Oslo?" in n for n in scan.summary.notices)
