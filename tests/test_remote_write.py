"""Writing to buckets and to the hub: the same bytes as on disk, and a file appears whole or not at all."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.remote.model_hub import ModelHub
from tests.remote.s3 import S3Server
from tests.remote.server import Fault
from tests.tables import stored, table
from tests.tiers import DEEP, some
from tests.world import ROOT, TOY
from tito_audit.errors import StorageError
from tito_audit.storage import _store
from tito_audit.storage.atomic import new_file, output_path, path_identity, upload
from tito_audit.storage.remote import RemoteFile

LOG = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"
REPAIR = ("-t", TOY, "--select", "SEQ,TOK,TPL", "--quiet")
XML = "<Error><Code>{}</Code><Message>said</Message></Error>"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """The server, empty, named by the environment; temporary files are in `tmp`, and tries follow each other."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    empty(server)
    server.forget()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(_store, "PAUSE", 0.0)
    return server


def empty(server: S3Server) -> None:
    """Delete all objects."""
    for key in list(server.keys()):
        server.client.delete_object(Bucket=server.bucket, Key=key)


def refused(*arguments: object) -> str:
    """The message of a command that refuses, in one line."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), out + err
    return err.strip().removeprefix("tito-audit: ")


def assert_nothing_left(tmp_path: Path) -> None:
    assert list((tmp_path / "tmp").iterdir()) == []


def uploads(server: S3Server) -> list[Any]:
    """The uploads in parts that were begun and not ended."""
    return list(server.client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", ()))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of logs of several kinds, and the repaired folder beside it."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("logs")
    (folder / "in" / "more").mkdir(parents=True)
    shutil.copy(LOG, folder / "in" / "a.jsonl")
    (folder / "in" / "more" / "b.jsonl.gz").write_bytes(gzip.compress(LOG.read_bytes(), mtime=0))
    rows = [json.loads(line) for line in (ROOT / "fixtures" / "formats" / "slime.jsonl").read_text().splitlines()]
    names = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "reward")
    flat = [{name: row.get(name) for name in names} for row in rows]
    parquet.write_table(pa.Table.from_pylist(flat), folder / "in" / "c.parquet")
    code, _, err = run("repair", folder / "in", "-o", folder / "out", *REPAIR)
    assert (code in (0, 1), err) == (True, "")
    return folder


def test_a_repaired_folder_has_the_bytes_that_it_has_on_disk(logs: Path, s3: S3Server, tmp_path: Path) -> None:
    url = s3.upload(logs / "in", "run")
    names = sorted(path.relative_to(logs / "out") for path in (logs / "out").rglob("*") if path.is_file())
    assert len(names) == 3
    for source, target in ((url, f"s3://{s3.bucket}/repaired"), (logs / "in", f"s3://{s3.bucket}/from-disk")):
        code, _, err = run("repair", source, "-o", target, *REPAIR)
        assert (code in (0, 1), err) == (True, "")
        below = target.removeprefix(f"s3://{s3.bucket}/")
        for name in names:
            assert s3.get(f"{below}/{name.as_posix()}") == (logs / "out" / name).read_bytes()
    code, _, err = run("repair", url, "-o", tmp_path / "down", *REPAIR)
    assert (code in (0, 1), err) == (True, "")
    for name in names:
        assert (tmp_path / "down" / name).read_bytes() == (logs / "out" / name).read_bytes()
    assert_nothing_left(tmp_path)


def test_a_file_that_exists_is_refused_at_once_and_overwritten_with_force(s3: S3Server, tmp_path: Path) -> None:
    url = s3.put("a.jsonl", LOG.read_bytes())
    target = f"s3://{s3.bucket}/out.jsonl"
    s3.put("out.jsonl", b"mine")
    message = refused("repair", url, "-o", target, *REPAIR)
    assert message.startswith(f"{target}: the file exists, so nothing was written")
    assert "\n" not in message
    assert s3.requests("^GET /logs/a.jsonl") == [], "the log is not even read"
    assert s3.get("out.jsonl") == b"mine"
    assert run("repair", url, "-o", target, *REPAIR, "--force")[0] == 0
    assert run("repair", LOG, "-o", tmp_path / "local.jsonl", *REPAIR)[0] == 0
    assert s3.get("out.jsonl") == (tmp_path / "local.jsonl").read_bytes()
    assert run("scan", target, "-t", TOY, "--select", "SEQ", "--quiet")[0] == 0, "the new file is read"


def test_many_targets_are_looked_up_by_one_listing(s3: S3Server, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(12):
        shutil.copy(LOG, folder / f"{number:02}.jsonl")
    s3.put("out/07.jsonl", b"mine")
    s3.forget()
    message = refused("repair", folder, "-o", f"s3://{s3.bucket}/out", *REPAIR)
    assert message.startswith(f"s3://{s3.bucket}/out/07.jsonl: the file exists")
    assert len(s3.requests("^(GET|HEAD)")) < 8
    assert s3.keys() == ["out/07.jsonl"]


def test_the_input_is_never_written_whatever_it_is_called(s3: S3Server) -> None:
    url = s3.put("run/a.jsonl", LOG.read_bytes())
    for name in (url, f"s3://{s3.bucket}//run/a.jsonl", f"s3a://{s3.bucket}/run/a.jsonl"):
        assert "a log is never overwritten" in refused("repair", url, "-o", name, *REPAIR, "--force")
        assert "a log is never overwritten" in refused("convert", url, "--to", "calls", "-o", name, "--force")
    assert "never overwritten" in refused("scan", url, "-t", TOY, "--report", f"json={url}")
    assert s3.get("run/a.jsonl") == LOG.read_bytes()
    same = {"hf://datasets/o/n/a", "hf://datasets/o/n@main/a", "hf://datasets/o//n/a"}
    assert len({path_identity(output_path(name)) for name in same}) == 1
    assert path_identity("gcs://b/k") == path_identity(RemoteFile("gs://b//k"))
    assert path_identity("hf://datasets/o/n@v1/a") != path_identity("hf://datasets/o/n/a")


def test_what_cannot_be_written_is_one_line(s3: S3Server, tmp_path: Path) -> None:
    for name, says in stored(__file__, "UNWRITTEN").items():
        message = refused("repair", LOG, "-o", name, *REPAIR)
        assert says in message, message
        assert "\n" not in message
        report = refused("scan", LOG, "-t", TOY, "--report", f"json={name}")
        assert report.startswith("--report: ")
        assert says in report
    assert s3.keys() == []
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(*table(__file__, "an_upload_that_is_refused_leaves_nothing"))
def test_an_upload_that_is_refused_leaves_nothing(
    status: int, code: str, says: str, s3: S3Server, tmp_path: Path
) -> None:
    s3.fail(Fault("^PUT", status=status, body=XML.format(code), times=-1))
    target = f"s3://{s3.bucket}/out.jsonl"
    message = refused("repair", LOG, "-o", target, *REPAIR)
    assert message.startswith(f"{target}: nothing was written: ")
    assert says in message
    assert "\n" not in message
    assert "testing" not in message, "no key of the credentials is shown"
    assert len(s3.requests("^PUT")) <= 2 * _store.TRIES
    s3.forget()
    assert s3.keys() == []
    assert_nothing_left(tmp_path)


def test_a_lost_answer_and_passing_failures_are_no_failure(s3: S3Server) -> None:
    # The store took the file, but its answer never came: the next try finds the name taken, by the same bytes.
    s3.fail(Fault("^PUT", drop=0, headers=(("Content-Length", "9"),)), Fault("^PUT", status=503, times=2))
    place = output_path(f"s3://{s3.bucket}/a.jsonl")
    with new_file(place, overwrite=False) as out:
        out.write(b"content")
    assert s3.get("a.jsonl") == b"content"
    # A store that knows no conditions.
    s3.fail(Fault("^PUT", status=501, body=XML.format("NotImplemented")))
    with new_file(output_path(f"s3://{s3.bucket}/b.jsonl"), overwrite=False) as out:
        out.write(b"other")
    assert s3.get("b.jsonl") == b"other"


def test_a_file_that_appears_meanwhile_is_not_overwritten(s3: S3Server, tmp_path: Path) -> None:
    place = output_path(f"s3://{s3.bucket}/a.jsonl")
    refusal = pytest.raises(StorageError, match="the file exists, so nothing was written")
    with refusal, new_file(place, overwrite=False) as out:
        s3.put("a.jsonl", b"theirs")
        out.write(b"mine")
    assert s3.get("a.jsonl") == b"theirs"
    other = output_path(f"s3://{s3.bucket}/b.jsonl")
    with pytest.raises(ZeroDivisionError), new_file(other, overwrite=False) as out:
        out.write(b"%d" % (1 // 0))
    assert s3.keys() == ["a.jsonl"]
    assert_nothing_left(tmp_path)


def test_a_large_file_is_sent_in_parts_and_a_failure_ends_its_upload(s3: S3Server, tmp_path: Path) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(_store.S3Store, "upload_options", {"chunksize": 5 << 20, "max_concurrency": 2})
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (12 << 12))
    place = RemoteFile(f"s3://{s3.bucket}/large.bin")
    s3.fail(Fault("partNumber=2", status=403, body=XML.format("AccessDenied"), times=-1))
    with pytest.raises(StorageError, match="may not write it"):
        upload(large, place, overwrite=False)
    assert (s3.keys(), uploads(s3)) == ([], [])
    s3.forget()
    upload(large, place, overwrite=False)
    monkeypatch.undo()
    assert s3.get("large.bin") == large.read_bytes()
    parts = {re.search(r"partNumber=(\d+)", request.query)[1] for request in s3.requests("partNumber=")}
    assert parts == {"1", "2", "3"}
    assert uploads(s3) == []


def test_reports_baselines_conversions_and_the_quarantine_go_to_a_store(s3: S3Server, tmp_path: Path) -> None:
    url, out = s3.put("a.jsonl", LOG.read_bytes()), f"s3://{s3.bucket}/out"
    words = ("scan", url, "-t", TOY, "--quiet")
    reports = ("--report", f"json={out}/report.json", "--report", f"html={out}/report.html")
    assert run(*words, *reports, "--baseline", f"{out}/known.json", "--update-baseline")[0] == 0
    assert json.loads(s3.get("out/report.json"))["summary"]["files"] == [url]
    about = s3.client.head_object(Bucket=s3.bucket, Key="out/report.html")
    assert about["ContentType"] == "text/html; charset=utf-8"
    assert {entry["file"] for entry in json.loads(s3.get("out/known.json"))["findings"]} == {url}
    assert run(*words, "--baseline", f"{out}/known.json")[0] == 0, "all errors are known"
    drop = ("--with", "drop", "--unsafe", "--quiet", "-t", TOY)
    assert run("repair", url, "-o", f"{out}/kept.jsonl", *drop, "--quarantine", f"{out}/moved.jsonl")[0] == 0
    local = ("-o", tmp_path / "kept.jsonl", "--quarantine", tmp_path / "moved.jsonl")
    assert run("repair", LOG, *local, *drop)[0] == 0
    assert s3.get("out/kept.jsonl") == (tmp_path / "kept.jsonl").read_bytes()
    assert (
        s3.get("out/moved.jsonl").replace(url.encode(), str(LOG).encode())
        == (tmp_path / "moved.jsonl").read_bytes()
    )
    words = ("convert", url, "--to", "calls", "--lossy", "--quiet", "-o")
    assert run(*words, f"{out}/calls.parquet")[0] == run(*words, tmp_path / "calls.parquet")[0]
    assert s3.get("out/calls.parquet") == (tmp_path / "calls.parquet").read_bytes()
    assert_nothing_left(tmp_path)


# A run that is killed


WRITING = ("PUT", "POST")
MOMENTS = [
    *((WRITING, number, when) for number in (1, 2, 3) for when in ("during", "before", "after")),
    *((("GET", "HEAD", *WRITING), number, ("before", "after")[number % 2]) for number in range(1, 18)),
]


@pytest.mark.parametrize("moment", MOMENTS if DEEP else [MOMENTS[0], MOMENTS[5]])
def test_a_killed_run_leaves_whole_files_only(
    moment: tuple[tuple[str, ...], int, str], logs: Path, s3: S3Server, tmp_path: Path
) -> None:
    target = f"s3://{s3.bucket}/killed"
    assert killed(moment, "repair", logs / "in", "-o", target, *REPAIR) == -signal.SIGKILL
    for key in list(s3.keys()):
        assert s3.get(key) == (logs / "out" / key.removeprefix("killed/")).read_bytes()
    assert_nothing_left(tmp_path)
    assert run("repair", logs / "in", "-o", target, *REPAIR, "--force")[0] in (0, 1)
    assert len(s3.keys()) == 3


@pytest.mark.parametrize("when", some(("after", "before", "during"), 1))
def test_a_killed_run_is_resumed_into_the_store(when: str, logs: Path, s3: S3Server, tmp_path: Path) -> None:
    place = ("--jobs", "1", "--resume", "--journal", tmp_path / "run.journal")
    words = ("repair", logs / "in", "-o", f"s3://{s3.bucket}/killed", *REPAIR, *place)
    assert killed((WRITING, 2, when), *words) == -signal.SIGKILL
    s3.forget()
    code, _, err = run(*words)
    assert (code in (0, 1), err) == (True, "")
    assert s3.requests("^PUT .*/a.jsonl") == [], "the first file is not sent again"
    for key in list(s3.keys()):
        assert s3.get(key) == (logs / "out" / key.removeprefix("killed/")).read_bytes()
    assert len(s3.keys()) == 3
    s3.forget()
    assert run(*words)[0] == code
    assert s3.requests("^PUT") == []
    s3.put("killed/a.jsonl", b"theirs")
    assert "the file exists" in refused(*words), "what others wrote is not replaced"


def killed(moment: tuple[tuple[str, ...], int, str], *words: object) -> int:
    """How a command ends that is killed at some moment."""
    child = os.fork()
    if not child:
        kill_at(*moment)
        try:
            run(*words)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(methods: tuple[str, ...], number: int, when: str) -> None:
    """Nothing; from now on this process dies by SIGKILL at the request of this number of these methods."""
    from aiobotocore.httpsession import AIOHTTPSession

    send, count = AIOHTTPSession.send, 0

    async def counted(self: Any, request: Any) -> Any:
        nonlocal count
        count += request.method in methods
        due = count == number and request.method in methods
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if due and when == "during":
            asyncio.get_running_loop().call_later(0.001, os.kill, os.getpid(), signal.SIGKILL)
        answer = await send(self, request)
        if due and when == "during":
            await asyncio.sleep(60)  # the answer came before the signal
        if due and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    AIOHTTPSession.send = counted


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub with a data set `org/runs` in which we may write."""
    with ModelHub(tmp_path / "hub") as running:
        running.commit("org/runs", {"a.jsonl": LOG.read_bytes(), "README.md": b"# Runs"})
        for name, value in running.writer.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(_store, "PAUSE", 0.0)
        yield running


@pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")  # of the hub's own client
def test_a_data_set_of_the_hub_gets_one_commit_for_each_file(
    hub: ModelHub, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, before = "hf://datasets/org/runs", hub.head("org/runs")
    done = run("repair", f"{name}/a.jsonl", "-o", f"{name}/fixed/a.jsonl", *REPAIR)
    assert done == (0, "", ""), done
    assert hub.files("org/runs")["fixed/a.jsonl"] == (logs / "out" / "a.jsonl").read_bytes()
    assert hub.files("org/runs")["a.jsonl"] == LOG.read_bytes()
    assert len(list((hub.folder / "org" / "runs").iterdir())) == 3, "two commits and the branches"
    assert hub.head("org/runs") != before
    message = refused("repair", f"{name}/a.jsonl", "-o", f"{name}@main/fixed/a.jsonl", *REPAIR)
    assert "the file exists, so nothing was written" in message
    assert "never overwritten" in refused("repair", f"{name}/a.jsonl", "-o", f"{name}@main/a.jsonl", *REPAIR)
    # Somebody else commits while ours is sent: it is sent again, onto theirs.
    hub.fail(Fault("^POST .*/commit/", status=412, times=1))
    small = written(tmp_path / "small.jsonl", [json.loads(LOG.read_text().splitlines()[0])])
    assert run("repair", small, "-o", f"{name}/fixed/small.jsonl", *REPAIR)[0] in (0, 1)
    assert len(hub.requests("^POST .*/commit/")) == 3
    assert "fixed/small.jsonl" in hub.files("org/runs")
    absent = refused("repair", small, "-o", "hf://datasets/org/absent/a.jsonl", *REPAIR)
    assert "there is no" in absent
    assert "\n" not in absent
    hub.fail(Fault("^POST .*/commit/", status=403, times=-1))
    message = refused("repair", small, "-o", f"{name}/fixed/refused.jsonl", *REPAIR)
    assert "may not write it (403)" in message
    assert "\n" not in message
    assert "fixed/refused.jsonl" not in hub.files("org/runs")
