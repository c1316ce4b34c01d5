"""A tokenizer or template that fails, through every door: a finding with its row, or one message.

What commands say of them stands in `tests/transcripts/definitions.txt`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run, written
from tests.serving import Scripted, asked, served
from tito_audit import BatchAuditor, Settings, audit_batch, scan_rollouts
from tito_audit.render.renderer import make_renderer
from tito_audit.run.auditor import UNENCODED
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.gateway import Gateway
from tito_audit.sessions.engine import Conversations
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

WORDS = ["0", "1", "2", "3", "<end>", "78"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
FAILS = "the tokenizer cannot encode a text of"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that knows four digits and has no token for the others."""
    place = tmp_path / "tokenizer"
    place.mkdir()
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "[UNK]"}
    parts = ("normalizer", "post_processor", "decoder", "truncation", "padding")
    end = {"id": 4, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    whole = {
        "version": "1.0",
        **dict.fromkeys(parts),
        "pre_tokenizer": {"type": "Digits", "individual_digits": True},
    }
    whole |= {"added_tokens": [{**end, "normalized": False}], "model": model}
    (place / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    (place / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return place


def row(question: str) -> dict[str, object]:
    """A call with one question, which was sampled without a fault."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "3"}]
    return {"messages": chat, "prompt_ids": [0, 1], "completion_ids": [3], "completion_logprobs": [-0.5]}


ROWS = [row("01"), row("789"), row("01")]


@pytest.mark.parametrize("options", [(), ("--jobs", "2"), ("--ignore", "REC001")])
def test_a_scan_names_the_row_and_goes_on(tmp_path: Path, folder: Path, options: tuple[str, ...]) -> None:
    log = written(tmp_path / "log.jsonl", ROWS)
    code, out, err = run("scan", log, "-t", folder, "--no-config", "-f", "json", *options)
    report = json.loads(out)
    unread = [finding for finding in report["findings"] if finding["code"] == "REC001"]
    assert err == ""
    assert report["summary"]["rollouts"] == 3
    assert report["summary"]["skipped"]["TOK101"]["because"] == UNENCODED
    if "REC001" not in options:
        assert [(finding["row"], finding["file"], finding["cause"]) for finding in unread] == [
            (1, str(log), UNENCODED)
        ]
        assert code == 1
        assert FAILS in unread[0]["message"]


def test_a_journal_gives_the_same_finding_again(tmp_path: Path, folder: Path) -> None:
    log, journal = written(tmp_path / "log.jsonl", ROWS), tmp_path / "journal"
    words = ("scan", log, "-t", folder, "--no-config", "-f", "jsonl", "--resume", "--journal", journal)
    first, again = run(*words), run(*words)
    assert FAILS in first[1]
    assert first[0] == again[0]
    assert first[1].splitlines()[:-1] == again[1].splitlines()[:-1]  # the last is the summary, with its seconds


def test_rows_in_memory_and_batches_have_the_finding_too(folder: Path) -> None:
    results = list(scan_rollouts(ROWS, Settings(tokenizer=str(folder))))
    unread = [[finding.code for finding in result.findings if finding.code == "REC001"] for result in results]
    assert unread[:3] == [[], ["REC001"], []]
    for audit in (audit_batch, BatchAuditor(tokenizer=str(folder)).audit):
        how = {"tokenizer": str(folder)} if audit is audit_batch else {}
        batch = audit(prompt_ids=[[0, 4], [0, 4]], completion_ids=[[3], [5]], logprobs=[[-0.5]] * 2, **how)
        assert batch.failing_rows.tolist() == [False, True]  # "78" becomes two digits
        assert FAILS in next(finding.hit.message for finding in batch.findings if finding.code == "REC001")


@pytest.mark.parametrize(("template", "says"), [(TEMPLATE, FAILS), (ENDLESS, "not finished after 0.2 seconds")])
def test_a_gateway_refuses_what_it_cannot_write_and_goes_on(
    tmp_path: Path, folder: Path, template: str, says: str
) -> None:
    tokenizer = load_tokenizer(str(folder))
    renderer = make_renderer(tokenizer, chat_template=template, time_limit=0.2)
    gateway = Gateway(
        Scripted(tokenizer, ["3"]),
        tokenizer,
        Conversations(tokenizer, renderer),
        CallLog(tmp_path / "log"),
        "toy",
    )
    with served(gateway) as address:
        for question, expected in (("789", 400), ("01", 200 if template is TEMPLATE else 400)):
            messages = [{"role": "user", "content": question}]
            status, answer = asked(address, "/v1/chat/completions", {"model": "toy", "messages": messages})
            assert status == expected, answer
            assert status == 200 or says in answer["error"]["message"]
