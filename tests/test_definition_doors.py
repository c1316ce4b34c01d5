"""A tokenizer or template that fails, through every door: a finding with its row, or one message."""

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


def test_a_repair_leaves_the_row_as_it_is(tmp_path: Path, folder: Path) -> None:
    log, out = written(tmp_path / "log.jsonl", ROWS), tmp_path / "out.jsonl"
    code, page, err = run("repair", log, "-t", folder, "--no-config", "-o", out)
    assert code == 1, page + err
    assert "REC001" in page
    assert out.read_bytes().splitlines()[1] == log.read_bytes().splitlines()[1]


@pytest.mark.parametrize(
    ("options", "uncompared"), [(("--select", "TOK"), 1), (("--ignore", "REC001"), 1), (("--select", "SEQ"), 0)]
)
def test_a_scan_and_a_repair_count_the_same_rows_as_uncompared(
    tmp_path: Path, folder: Path, options: tuple[str, ...], uncompared: int
) -> None:
    log, out = written(tmp_path / "log.jsonl", ROWS), tmp_path / "out.jsonl"
    words = (log, "-t", folder, "--no-config", "-f", "json", *options)
    scan = json.loads(run("scan", *words)[1])["summary"]
    repair = json.loads(run("repair", *words, "-o", out)[1])
    assert scan["uncompared"] == repair["before"]["uncompared"] == repair["after"]["uncompared"] == uncompared


def test_rows_in_memory_and_batches_have_the_finding_too(folder: Path) -> None:
    results = list(scan_rollouts(ROWS, Settings(tokenizer=str(folder))))
    assert [
        [finding.code for finding in result.findings if finding.code == "REC001"] for result in results[:3]
    ] == [
        [],
        ["REC001"],
        [],
    ]
    for audit in (audit_batch, BatchAuditor(tokenizer=str(folder)).audit):
        how = {"tokenizer": str(folder)} if audit is audit_batch else {}
        batch = audit(prompt_ids=[[0, 4], [0, 4]], completion_ids=[[3], [5]], logprobs=[[-0.5]] * 2, **how)
        assert batch.failing_rows.tolist() == [False, True]  # "78" becomes two digits
        assert FAILS in next(finding.hit.message for finding in batch.findings if finding.code == "REC001")


LOOKING = [
    ("show", "LOG", "1"),
    ("identify", "LOG"),
    ("inspect", "LOG"),
    ("convert", "LOG", "--to", "rows", "-o", "OUT"),
]
BROKEN = [
    *((words, broken) for words in (*LOOKING, ("template",)) for broken in ("words", "definition")),
    *((words, "template") for words in LOOKING),
]


@pytest.mark.parametrize(("words", "broken"), BROKEN)
def test_other_commands_end_with_one_message_at_most(
    tmp_path: Path, folder: Path, words: tuple[str, ...], broken: str
) -> None:
    if broken == "template":
        (folder / "chat_template.jinja").write_text(ENDLESS.replace("99999", "9999"), encoding="utf-8")
        (tmp_path / "tito-audit.toml").write_text("template-seconds = 0.2\n", encoding="utf-8")
    if broken == "definition":
        (folder / "tokenizer.json").write_text('{"model": ' + "[" * 5000, encoding="utf-8")
    log = written(tmp_path / "log.jsonl", ROWS[1:])
    places: dict[str, object] = {"LOG": log, "OUT": tmp_path / "out.jsonl"}
    config = ("--config", tmp_path / "tito-audit.toml") if broken == "template" else ("--no-config",)
    code, out, err = run(*(places.get(word, word) for word in words), "-t", folder, *config)
    assert code in (0, 1, 2)
    assert "Traceback" not in out + err
    assert "bug in tito-audit" not in err
    assert err.count("tito-audit: ") <= 1


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
