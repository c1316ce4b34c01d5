"""What a log, a template or a command line must never do: end in a traceback, hang, or pass for clean.

What such logs and mistakes are answered with stands in `tests/transcripts/hostile.txt`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import command
from tests.ready import program
from tests.tiers import examples, some
from tests.world import CLEAN, ROOT, TOY

CALLS = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "()"}],
    "calls": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7, 8]}],
}
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% for k in range(90000) %}{% endfor %}" * 2
LOOP += "{% endfor %}" * 4
BIG = examples(8, 200) * 1024 * 1024
SUMMARY_KEYS = {"schema_version", "rollouts", "findings", "notices"}


def tito(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, which may neither raise an exception nor print a traceback."""
    code, out, err = command.run(*arguments)
    assert "Traceback" not in out + err
    return code, out, err


def apart(*arguments: object, timeout: float = 180, **environment: str) -> tuple[int, str, str]:
    """The same of the command in a process of its own, for what could bring a process down or make it hang."""
    done = subprocess.run(
        [*program(), *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment},
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def audited(
    log: Path, *options: object, by: Callable[..., tuple[int, str, str]] = tito
) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Exit code, findings and summary of a scan; stdout has to hold the report and nothing else."""
    code, out, err = by("scan", log, "-t", TOY, "--report", "json", *options)
    assert err == ""
    report = json.loads(out)
    assert report["summary"].keys() >= SUMMARY_KEYS
    return code, report["findings"], report["summary"]


def rows(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def unreadable(findings: list[dict[str, Any]]) -> dict[int, str]:
    return {finding["row"]: finding["message"] for finding in findings if finding["code"] == "REC001"}


def test_formats_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    fixtures = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[0] for path in fixtures))
    _, findings, summary = audited(log)
    assert len(summary["formats"]) == len(fixtures)
    assert not unreadable(findings)


def chat_template(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "chat.jinja"
    path.write_text(source, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("source", "says", "by"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate", tito),
        ("{{ nothing.of.this }}", "'nothing' is undefined", tito),
        ("{{ ''.__class__.__mro__ }}", "TPL211", tito),
        ("{{ 'x' * 10**12 }}", "TPL211", apart),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "TPL211", apart),
    ],
)
def test_a_template_that_fails_is_a_finding_of_every_rollout(
    tmp_path: Path, source: str, says: str, by: Callable[..., tuple[int, str, str]]
) -> None:
    log = rows(tmp_path / "log.jsonl", CALLS, CALLS)
    template = chat_template(tmp_path, source)
    code, findings, _ = audited(log, "--chat-template", template, by=by)
    failures = [finding for finding in findings if finding["code"] == "TPL211"]
    assert code == 0
    assert {finding["row"] for finding in failures} == {0, 1}
    assert says in f"{failures[0]['code']} {failures[0]['message']}"


def test_a_template_that_loops_costs_its_limit_once_however_long_the_log(tmp_path: Path) -> None:
    log = rows(tmp_path / "log.jsonl", *[CALLS] * 300)
    template = chat_template(tmp_path, LOOP)
    started = time.monotonic()
    _, findings, _ = audited(log, "--chat-template", template, "--template-seconds", 0.5, by=apart)
    assert time.monotonic() - started < 75, "half of what 300 rows would take"
    failures = [finding for finding in findings if finding["code"] == "TPL211"]
    assert len(failures) == 300
    assert "not finished after 0.5 seconds" in failures[-1]["message"]


def test_a_tokenizer_without_a_template_is_said_and_the_rest_is_audited(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((TOY / "tokenizer.json").read_bytes())
    code, out, err = tito("scan", rows(tmp_path / "log.jsonl", CALLS), "-t", folder, "--notes")
    assert (code, err) == (0, "")
    assert "has no chat template" in " ".join(out.split())
    assert "TOK101" in out


def big_row(log: Path) -> None:
    with log.open("w") as out:
        out.write(json.dumps(CLEAN)[:-1] + ', "text": "')
        out.writelines("x" * 1024 * 1024 for _ in range(BIG // 1024 // 1024))
        out.write('"}\n' + json.dumps(CLEAN) + "\n")


def big_garbage(log: Path) -> None:
    with log.open("w") as out:
        out.write('{"token_ids": [5')
        out.writelines(", 7" * 349_525 for _ in range(BIG // 1024 // 1024))
        out.write(", oops\n" + json.dumps(CLEAN) + "\n")


@pytest.mark.parametrize(("make", "broken"), some([(big_garbage, 1), (big_row, 0)], 1))
def test_a_line_of_many_megabytes_is_read_or_reported_and_the_next_is_audited(
    tmp_path: Path, make: Callable[[Path], None], broken: int
) -> None:
    log = tmp_path / "log.jsonl"
    make(log)
    # Quiet: a machine that is busy would show progress.
    _, findings, summary = audited(log, "--quiet", by=partial(apart, timeout=180))
    log.unlink()
    assert summary["rows_unreadable"] == len(unreadable(findings)) == broken
    assert summary["rollouts"] == 2 - broken


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("log.pkl", pickle.dumps([CLEAN]), "no pickle is ever loaded"),
        ("log.jsonl", pickle.dumps([CLEAN]), "no pickle is ever loaded"),
        ("log.jsonl", bytes(range(128, 256)) * 100, "binary"),
        ("log.jsonl", b"\x7fELF" + bytes(1000), "neither JSON nor a table"),
        ("log.parquet", b"PAR1" + bytes(100), "footer cannot be read"),
        ("log.jsonl", b"\x1f\x8b\x08" + bytes(20), "gzip"),
    ],
)
def test_a_file_of_another_kind_is_a_mistake_with_a_way_out(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    log = tmp_path / name
    log.write_bytes(data)
    code, out, err = tito("scan", log)
    assert (code, out) == (2, "")
    assert says in err


def test_a_parquet_file_cut_in_the_middle_is_a_mistake(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    log = tmp_path / "log.parquet"
    pq.write_table(pa.Table.from_pylist([CLEAN] * 200), log, row_group_size=10)
    assert audited(log)[2]["rollouts"] == 200
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2])
    code, out, err = tito("scan", log)
    assert (code, out) == (2, "")
    assert "The copy is incomplete" in err


def test_bytes_that_are_not_utf8_spoil_their_own_row_only(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    latin = json.dumps({**CLEAN, "text": "é"}, ensure_ascii=False).encode("latin-1")
    log.write_bytes(latin + b"\n" + json.dumps(CLEAN).encode() + b"\n")
    code, findings, summary = audited(log)
    assert code == 1
    assert "not UTF-8 at byte" in unreadable(findings)[0]
    assert summary["rollouts"] == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_a_mistake(tmp_path: Path) -> None:
    log = rows(tmp_path / "log.jsonl", CLEAN)
    log.chmod(0)
    code, out, err = tito("scan", log)
    assert (code, out) == (2, "")
    assert "cannot be read" in err


def test_a_name_that_no_folder_and_no_hub_knows_is_one_message(tmp_path: Path) -> None:
    # The client of the hub reads this when it is imported.
    log = rows(tmp_path / "log.jsonl", CLEAN)
    code, out, err = apart("scan", log, "-t", "nobody/no-such-model", HF_HUB_OFFLINE="1")
    assert (code, out) == (2, "")
    assert "nobody/no-such-model" in err


def test_odd_column_names_of_a_parquet_file_are_mapped(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"Toks": CLEAN["token_ids"], "in loss?": CLEAN["loss_mask"], "extra": {"lp": CLEAN["logprobs"]}}
    log = tmp_path / "log.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 3), log)
    options = ("--map", "token_ids=Toks", "--map", "loss_mask=in loss?", "--map", "logprobs=extra.lp")
    code, findings, summary = audited(log, *options)
    assert (code, summary["tokens"], summary["generated_tokens"]) == (0, 12, 6)
    assert {finding["severity"] for finding in findings} == {"note"}
