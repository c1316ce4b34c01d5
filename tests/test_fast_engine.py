"""The fast engine says what the reference engine says: the same findings, skips and counts, to the token.

The reference is `benchmarks/reference.py`: it renders with jinja2 alone and encodes whole texts with `tokenizers`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reference import by_reference, main, said
from tests.tiers import crossed, examples, some
from tests.world import ROOT, TOY
from tito_audit.record.arrays import Ids
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.tokens.encoders import FastEncoder

SHARED = ROOT.parent / "shared"
LOGS = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
MODELS = some(("smollm2", "gemma-3", "qwen2.5-coder"), 1)
needs_rollouts = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]


def check(log: Path, settings: Settings) -> None:
    wanted = list(by_reference(log, replace(settings, jobs=1)))
    for encoder, jobs in crossed(("tokenizers", "fastokens"), (1, 2)):
        scan = scan_rollouts(log, replace(settings, encoder=encoder, jobs=jobs))
        scan.chunk_bytes = 1 << 16
        assert list(said(scan)) == wanted, f"{encoder}, {jobs} jobs"
        assert encoder in str(scan.summary.encoder)


@pytest.mark.parametrize("log", some(LOGS, 2), ids=lambda log: log.stem)
def test_on_example_logs(log: Path) -> None:
    check(log, Settings(tokenizer=str(TOY)))


def sampled(model: str, mode: str) -> list[bytes]:
    """Lines of the log of a real model."""
    data = gzip.decompress((SHARED / "rollouts" / model / f"{mode}.jsonl.gz").read_bytes())
    return data.splitlines(keepends=True)[: examples(5, 10**6)]


@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", [pytest.param(model, marks=needs_rollouts) for model in MODELS])
def test_on_tokens_that_models_sampled(model: str, mode: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join(sampled(model, mode)))
    check(log, Settings(tokenizer=str(SHARED / "tokenizers" / model)))


@pytest.mark.parametrize("model", [pytest.param(model, marks=needs_rollouts) for model in MODELS])
def test_on_training_rows_with_and_without_messages(model: str, tmp_path: Path) -> None:
    rows = []
    for line in sampled(model, "retok"):
        row = json.loads(line)
        last = row["calls"][-1]
        ids = last["prompt_token_ids"] + last["generation_token_ids"]
        mask = [0] * len(last["prompt_token_ids"]) + [1] * len(last["generation_token_ids"])
        flat = {"token_ids": ids, "loss_mask": mask, "tools": row["tools"]}
        rows += [{**flat, "messages": row["messages"]}, flat]
    log = tmp_path / "rows.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(log, Settings(tokenizer=str(SHARED / "tokenizers" / model)))


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


def test_the_tool_that_compares_both_engines_tells_a_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = str(ROOT / "fixtures" / "formats" / "generic.jsonl")
    assert main([log, str(TOY)]) == 0
    assert "no difference" in capsys.readouterr().out
    monkeypatch.setattr("benchmarks.reference.by_reference", lambda *_: iter([("another",)]))
    assert main([log, str(TOY)]) == 1
    assert "rollout 0 differs" in capsys.readouterr().out
