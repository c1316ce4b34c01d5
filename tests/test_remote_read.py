"""Remote logs: the same findings as on disk, few bytes fetched, and one clear line for whatever goes wrong.

A real S3-compatible store that checks signatures, a hub and a web server answer, each in a process of its own.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.command import run, written
from tests.remote.hub import TOKEN, HubServer
from tests.remote.s3 import S3Server
from tests.remote.server import Fault, Server
from tests.remote.web import WebServer
from tests.tables import table
from tests.tiers import DEEP, crossed, some
from tests.world import json_lines
from tito_audit.errors import StorageError
from tito_audit.storage import _store, _store_web, find_logs, remote, skipped_files
from tito_audit.storage._store import status_from_info
from tito_audit.storage.remote import RangedFile, RemoteFile
from tito_audit.storage.watch import path_from_name

pytest.importorskip("moto")
pytest.importorskip("s3fs")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "formats"
deep = pytest.mark.skipif(not DEEP, reason="runs in make deep")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server(strict=True) as server:
        yield server


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the web server serves."""
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[WebServer]:
    with WebServer(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(s3: S3Server, hub: HubServer, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of the stores, no memory of earlier requests, and no long pauses."""
    for name, value in {**s3.env, **hub.env}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(_store, "PAUSE", 0.01)
    for server in (s3, hub, web):
        server.forget()


def training_rows(count: int, size: int = 6, start: int = 0, padding: int = 0) -> list[dict[str, Any]]:
    """Rows with what a trainer reads, and so much beside it; every seventh has one logprob too few."""
    return [
        {
            "token_ids": [100 * number + place for place in range(size)],
            "loss_mask": [0, *[1] * (size - 1)],
            "logprobs": [0.0, *[-0.5] * (size - 1 - (number % 7 == 0))],
            **({"padding": "x" * padding} if padding else {}),
        }
        for number in range(start, start + count)
    ]


def audited(place: str | Path, *flags: object) -> dict[str, Any]:
    """The JSON report of a log, which is named the same wherever it is."""
    code, out, err = run("scan", place, "--report", "json", *flags)
    assert code in (0, 1), err
    report: dict[str, Any] = json.loads(out.replace(str(place), "LOG"))
    del report["summary"]["seconds"]
    return report


def refused(*arguments: object) -> str:
    """What the command says when it cannot read a log: one line and no traceback."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), (code, out, err)
    message = err.removeprefix("tito-audit: ").strip()
    assert "\n" not in message, message
    assert "Traceback" not in message
    return message


# The same findings


@pytest.mark.parametrize("jobs", some([2, 1], 1))
def test_a_folder_in_a_bucket_is_audited_as_the_same_folder_on_disk(
    s3: S3Server, tmp_path: Path, jobs: int
) -> None:
    for name in sorted(path.name for path in FIXTURES.iterdir() if path.is_file())[:: 1 if DEEP else 8]:
        shutil.copy(FIXTURES / name, tmp_path)
    (tmp_path / ".hidden").mkdir()
    written(tmp_path / ".hidden" / "log.jsonl", training_rows(1))
    (tmp_path / "report.json").write_text('{"summary":{"schema_version":1}}')
    (tmp_path / "notes.md").write_text("not a log")
    # Large enough for a second process.
    written(tmp_path / "many.jsonl", training_rows(40, padding=400_000) if jobs == 2 else training_rows(100))
    url = s3.upload(tmp_path, f"same{jobs}")
    assert audited(url, "--jobs", jobs) == audited(tmp_path, "--jobs", 1)
    assert [file.name for file in skipped_files([url])] == [file.name for file in skipped_files([str(tmp_path)])]


KINDS = ["log.parquet", "log.arrows", "log.json", "log.arrow", "log.jsonl.gz"]
WAYS: list[tuple[object, ...]] = [(), ("--jobs", 2), ("--limit", 9), ("--sample", 0.3)]


@pytest.mark.parametrize(("name", "flags"), crossed(KINDS, WAYS))
def test_every_kind_of_file_reads_the_same_from_the_hub(
    hub: HubServer, tmp_path: Path, name: str, flags: tuple[object, ...]
) -> None:
    rows = training_rows(300)
    table, file = pa.Table.from_pylist(rows), tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(table, file, row_group_size=50)
    elif name.endswith(("arrow", "arrows")):
        opened = pa.ipc.new_file if name.endswith("arrow") else pa.ipc.new_stream
        with opened(file, table.schema) as out:
            out.write_table(table, max_chunksize=40)
    elif name.endswith("gz"):
        with pa.output_stream(file, compression="gzip") as out:
            out.write(json_lines(rows))
    else:
        file.write_text(json.dumps(rows))
    hub.commit(f"org/kinds-{name.replace('.', '-')}", {f"data/{name}": file.read_bytes()})
    url = f"hf://datasets/org/kinds-{name.replace('.', '-')}/data/{name}"
    assert audited(url, *flags) == audited(file, *flags)


def test_a_data_set_saved_in_a_bucket_reads_its_shards_in_the_order_of_its_rows(
    s3: S3Server, tmp_path: Path
) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(training_rows(20, start=20 * number))
        with pa.ipc.new_stream(tmp_path / name, table.schema) as out:
            out.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_info.json").write_text("{}")
    url = s3.upload(tmp_path, "saved")
    assert [file.name for file in find_logs([url])] == names
    assert audited(url) == audited(tmp_path)


# What is named


def test_globs_in_a_bucket_match_as_on_disk(s3: S3Server, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "b.txt", ".c.jsonl", "one/d.jsonl", "one/two/e.jsonl", "one/.f/g.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / name, training_rows(1))
    url = s3.upload(tmp_path, "globs")
    several = ("*.jsonl", "?.jsonl", "[ab].*", "[!a].*", "[^a]*", "o*", "**/two", "one/**", "*/*.jsonl")
    for pattern in (*several, "**/*.jsonl", "**/**/*.jsonl", "one/**/e.*", ".*", "**/.*", "o*/[t]*/*"):
        there = [str(file).removeprefix(url) for file in find_logs([f"{url}/{pattern}"])]
        here = [str(file).removeprefix(str(tmp_path)) for file in find_logs([f"{tmp_path}/{pattern}"])]
        assert there == here, pattern
    with pytest.raises(StorageError, match="no file matches"):
        find_logs([f"{url}/*.nothing"])


def test_a_listing_of_many_objects_costs_a_request_a_thousand(s3: S3Server) -> None:
    count = 2_500 if DEEP else 120
    for number in range(count):
        s3.put(f"many/shard-{number:05}.jsonl", b'{"token_ids":[1]}\n')
    s3.forget()
    files = find_logs(["s3://logs/many"])
    assert len(files) == count
    assert sum(file.stat().st_size for file in files) == 18 * count
    assert len(s3.requests()) <= 4 + count // 1000 + 1  # a probe of the name, the pages, and one beginning


def test_a_hub_revision_is_read_at_one_commit_while_others_are_pushed(hub: HubServer) -> None:
    first = hub.commit(
        "org/moving", {"a.jsonl": json_lines(training_rows(3)), "b.jsonl": json_lines(training_rows(2))}
    )
    files = find_logs(["hf://datasets/org/moving"])
    hub.commit("org/moving", {"a.jsonl": json_lines(training_rows(9))})
    assert [len(file.read_bytes().splitlines()) for file in files] == [3, 2]
    assert len(find_logs(["hf://datasets/org/moving"])) == 1
    assert len(find_logs([f"hf://datasets/org/moving@{first}"])) == 2


def test_a_signed_url_is_read_and_shown_without_its_signature(web: WebServer, folder: Path) -> None:
    written(folder / "signed.jsonl", training_rows(20))
    url = f"{web.url}/signed.jsonl?X-Amz-Signature=verysecret&X-Amz-Credential=alsosecret"
    code, out, err = run("scan", url.replace("://", "://me:password@"), "--report", "json")
    assert code == 1
    assert not {"verysecret", "alsosecret", "password"} & set(" ".join((out, err)).replace("=", " ").split())
    assert "secret" not in out + err
    assert "password" not in out + err
    assert all(request.query.startswith("X-Amz-Signature=verysecret") for request in web.requests())
    assert all(request.headers["authorization"].startswith("Basic ") for request in web.requests())


@pytest.mark.parametrize("url", ["s3://logs/a//b.jsonl", "hf://datasets/org/name@v1/data/a.jsonl"])
def test_a_remote_file_is_a_path_that_is_shown_as_its_url(url: str) -> None:
    path = path_from_name(url)
    assert isinstance(path, RemoteFile)
    assert pickle.loads(pickle.dumps(path)) == path
    assert (str(path), path.name, path.suffix) == (url, url.rpartition("/")[2], ".jsonl")
    assert str(path.parent / "c") == f"{url.rpartition('/')[0].rstrip('/')}/c"


def test_the_path_of_a_signed_url_keeps_what_it_does_not_show() -> None:
    hidden = RemoteFile("https://u:p@host/a.jsonl?sig=1")
    assert pickle.loads(pickle.dumps(hidden)).url == "https://u:p@host/a.jsonl?sig=1"
    assert (str(hidden), hidden.name) == ("https://host/a.jsonl?…", "a.jsonl")


def test_what_stores_say_of_a_file_has_one_form() -> None:
    assert status_from_info({"size": 3, "ETag": "x", "mtime": 2.5}).etag == "x"
    assert status_from_info({"size": 3, "mtime": 2.5}).st_mtime_ns == 2_500_000_000
    assert status_from_info({"size": None}).st_size == 0


# Bytes


def test_the_first_rows_of_a_huge_log_cost_few_bytes(web: WebServer, folder: Path) -> None:
    with (folder / "huge.jsonl").open("wb") as file:
        file.write(json_lines(training_rows(5_000)))
        file.truncate(100 << 30)
    for arguments in (("scan", "--limit", 10), ("show", "--row", 3, "--no-pager")):
        web.forget()
        code, _, err = run(arguments[0], f"{web.url}/huge.jsonl", *arguments[1:])
        assert code in (0, 1), err
        assert web.sent() < 4 << 20
        assert len(web.requests()) < 12


def test_columns_and_row_groups_that_nothing_reads_are_not_fetched(web: WebServer, folder: Path) -> None:
    rows = training_rows(400)
    images = pa.array([number.to_bytes(50_000) for number in range(len(rows))], pa.binary())
    table = pa.Table.from_pylist(rows).append_column("image", images)
    parquet.write_table(table, folder / "wide.parquet", row_group_size=50, compression="none")
    whole = (folder / "wide.parquet").stat().st_size
    assert whole > 20_000_000
    here = audited(folder / "wide.parquet")
    for jobs in some((2, 1), 1):
        web.forget()
        assert audited(f"{web.url}/wide.parquet", "--jobs", jobs) == here
        assert web.sent() < 400_000
        assert len(web.requests()) < 40
    web.forget()
    assert run("show", f"{web.url}/wide.parquet", "--row", 399, "--no-pager")[0] == 0
    assert web.sent() < 250_000


def test_one_row_of_a_large_row_group_fetches_pages_and_not_the_group(web: WebServer, folder: Path) -> None:
    noise = np.random.default_rng(0)
    ids = noise.integers(0, 1 << 30, (4_000, 1_000))
    table = pa.table({"token_ids": list(ids), "loss_mask": [[1] * 1_000] * 4_000})
    parquet.write_table(table, folder / "group.parquet", compression="none", use_dictionary=False)
    assert (folder / "group.parquet").stat().st_size > 32_000_000
    web.forget()
    assert run("scan", f"{web.url}/group.parquet", "--limit", 5)[0] in (0, 1)
    assert web.sent() < 8 << 20


def test_every_byte_of_a_log_is_fetched_about_once(s3: S3Server, tmp_path: Path) -> None:
    data = json_lines(training_rows(300, padding=20_000))
    assert len(data) > 4 << 20
    for jobs in some((2, 1), 1):
        url = s3.put(f"once/log-{jobs}.jsonl", data)
        s3.forget()
        audited(url, "--jobs", jobs)
        assert len(data) <= s3.sent("GET /logs/once") < 1.25 * len(data)
        assert len(s3.requests()) < 60


# What goes wrong in passing


@pytest.mark.parametrize("where", ["s3", "hub", "web"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("log.jsonl", skip=1, drop=70_000, times=-1),
        Fault("GET .*log.jsonl", skip=1, status=503, times=3),
        Fault("GET .*log.jsonl", skip=1, status=429, times=2, headers=(("Retry-After", "0"),)),
    ],
    ids=["dropped", "503", "429"],
)
def test_dropped_connections_and_busy_servers_are_outlasted(
    s3: S3Server, hub: HubServer, web: WebServer, folder: Path, where: str, fault: Fault
) -> None:
    data = json_lines(training_rows(6_000))
    name = f"faulty-{fault.status}"
    servers: dict[str, tuple[Server, str]] = {
        "s3": (s3, s3.put(f"{name}/log.jsonl", data)),
        "hub": (hub, f"hf://datasets/org/{name}/log.jsonl"),
        "web": (web, f"{web.url}/log.jsonl"),
    }
    hub.commit(f"org/{name}", {"log.jsonl": data})
    written(folder / "log.jsonl", training_rows(6_000))
    server, url = servers[where]
    (log,) = find_logs([url])
    server.fail(fault)
    assert log.read_bytes() == data
    assert server.requests()[-1].status < 400


def test_a_log_that_changes_while_it_is_read_is_refused(s3: S3Server, web: WebServer, folder: Path) -> None:
    written(folder / "moving.jsonl", training_rows(6_000))
    for url in (s3.put("moving/log.jsonl", json_lines(training_rows(6_000))), f"{web.url}/moving.jsonl"):
        (log,) = find_logs([url])
        with log.open() as opened:
            opened.read(1_000)
            s3.put("moving/log.jsonl", json_lines(training_rows(6_001)))
            written(folder / "moving.jsonl", training_rows(6_001))
            with pytest.raises(StorageError, match=r"moving.*the file was changed while it was read"):
                opened.read()


def test_a_server_without_ranges_is_read_once(folder: Path) -> None:
    written(folder / "whole.jsonl", training_rows(300, padding=20_000))
    with WebServer(folder, ranges=False) as server:
        url = f"{server.url}/whole.jsonl"
        assert audited(url, "--jobs", 2) == audited(folder / "whole.jsonl")
        assert server.sent() < 2.2 * (folder / "whole.jsonl").stat().st_size


# What stays wrong


@pytest.fixture(scope="module")
def stored_logs(s3: S3Server, hub: HubServer) -> None:
    """Logs in the bucket and in data sets of the hub, some of which are not for everyone."""
    row = json_lines(training_rows(1))
    s3.put("there/rollouts.jsonl", row)
    hub.commit("org/logs", {"data/train.jsonl": row})
    hub.commit("org/gated-logs", {"log.jsonl": row})
    hub.commit("org/private-logs", {"log.jsonl": row})


@pytest.mark.usefixtures("stored_logs")
@pytest.mark.parametrize(*table(__file__, "each_refusal_of_a_store_is_one_clear_line"))
def test_each_refusal_of_a_store_is_one_clear_line(
    url: str, env: dict[str, str], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    message = refused("scan", url)
    assert [words for words in says if words not in message] == []
    assert "wrong" not in message, "no key of the credentials is shown"


@pytest.mark.usefixtures("stored_logs")
def test_a_private_data_set_is_read_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run("scan", "hf://datasets/org/private-logs/log.jsonl")[0] == 1


def test_each_refusal_of_a_web_server_is_one_clear_line(web: WebServer, folder: Path) -> None:
    written(folder / "there.jsonl", training_rows(1))
    assert "there is no such file (404)" in refused("scan", f"{web.url}/gone.jsonl?sig=secret")
    assert "does not list its files" in refused("scan", f"{web.url}/*.jsonl")
    for status, words in ((403, "may not read it (403)"), (401, "(401)"), (500, "fails (500)")):
        web.fail(Fault(status=status, times=-1))
        message = refused("scan", f"{web.url}/there.jsonl?sig=secret")
        assert words in message
        assert "secret" not in message


@contextmanager
def serving(handle: Callable[[BaseRequestHandler], None]) -> Iterator[str]:
    """The address of a log on a server that handles each request so."""
    handler = type("Handler", (BaseRequestHandler,), {"handle": handle})
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/log.jsonl"
        server.shutdown()


def telling(answer: bytes, *, endless: bool = False) -> AbstractContextManager[str]:
    """A server that gives each request the same answer, and some of them a body without an end."""

    def handle(self: BaseRequestHandler) -> None:
        path = self.request.recv(1 << 16).split()[1]
        with suppress(OSError):
            self.request.sendall(answer if path == b"/log.jsonl" else WHOLE)
            while endless and path == b"/log.jsonl":
                self.request.sendall(bytes(1 << 16))

    return serving(handle)


ROWS = json_lines(training_rows(1))
WHOLE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(ROWS), ROWS)
"""The answer of a server without ranges."""


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("416 No\r\nContent-Length: 0", "does not say how long the file is"),
        ("206 Part\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/\xb2", "does not say how long the file is"),
        ("200 OK\r\nContent-Length: -5", "does not say how long the file is"),
        ("302 Found\r\nLocation: http://[::1:bad/\r\nContent-Length: 0", "redirects to what is no address"),
        ("302 Found\r\nLocation: file:///log.jsonl\r\nContent-Length: 0", "is not an address"),
        (f"200 OK\r\nX: {'a' * 70_000}", "the store fails (LineTooLong). Look at the address."),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_clear_line(head: str, words: str) -> None:
    with telling(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode("latin-1")) as url:
        assert words in refused("scan", url)


def test_a_body_without_an_end_is_not_read_to_its_end() -> None:
    for head in ("302 Found\r\nLocation: /whole.jsonl", "206 Part\r\nContent-Range: bytes 0-0/9"):
        with telling(f"HTTP/1.1 {head}\r\n\r\n".encode(), endless=True) as url:
            assert run("scan", url)[0] in (1, 2)


def test_an_empty_file_of_a_server_without_ranges_is_as_empty_as_on_disk(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").touch()
    with telling(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n") as url:
        assert audited(url) == audited(tmp_path / "log.jsonl")


def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store_web, "READ_SECONDS", 0.05)
    monkeypatch.setattr(_store, "TRIES", 2)
    monkeypatch.setattr(remote, "TRIES", 2)

    def handle(self: BaseRequestHandler) -> None:
        wanted = re.search(rb"bytes=(\d+)-", self.request.recv(1 << 16))
        head = b"HTTP/1.1 206 Part\r\nContent-Length: 9000\r\nContent-Range: bytes %d-/9000\r\n\r\n"
        with suppress(OSError):
            self.request.sendall(head % (int(wanted[1]) if wanted is not None else 0))
            for _ in range(9000):
                self.request.sendall(b" ")
                time.sleep(0.01)

    began = time.monotonic()
    with serving(handle) as url:
        assert "dropped" in refused("scan", url)
        assert time.monotonic() - began < 30


def test_a_store_that_ignores_ranges_is_refused() -> None:
    file = RangedFile("s3://logs/a", _store.RemoteStatus(9, etag="1"), lambda start, stop: b"123456789")
    file.seek(3)
    with pytest.raises(StorageError, match="more than it was asked for"):
        file.read(2)


def test_names_that_a_folder_cannot_hold_are_refused_and_not_left_out(s3: S3Server) -> None:
    s3.put("doubled/log.jsonl", ROWS)
    s3.put("doubled//log.jsonl", ROWS)
    assert "cannot be told from s3://logs/doubled/log.jsonl" in refused("scan", "s3://logs/doubled")
    assert run("scan", "s3://logs/doubled//log.jsonl")[0] == 1


def test_a_missing_driver_is_one_line_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    message = refused("scan", "gs://logs/a.jsonl")
    assert "gs:// needs gcsfs, which is not installed. Install it: pip install 'tito-audit[gs]'" in message


@pytest.mark.parametrize("where", ["hub", "web"])
def test_a_server_that_does_not_answer_is_not_waited_for(
    hub: HubServer, web: WebServer, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(_store_web, "READ_SECONDS", 0.1)
    monkeypatch.setattr(_store, "TRIES", 2)
    hub.commit("org/silent", {"log.jsonl": json_lines(training_rows(1))})
    written(folder / "silent.jsonl", training_rows(1))
    server: Server = hub if where == "hub" else web
    server.fail(Fault("silent", stall=0.5, times=-1))
    url = "hf://datasets/org/silent/log.jsonl" if where == "hub" else f"{web.url}/silent.jsonl"
    assert "does not answer in time" in refused("scan", url)


def test_overrides_and_baselines_name_remote_logs_by_their_urls(s3: S3Server, tmp_path: Path) -> None:
    url = s3.put("named/a/log.jsonl", json_lines(training_rows(20)))
    assert run("scan", url)[0] == 1
    (tmp_path / "tito-audit.toml").write_text(
        '[[overrides]]\npaths = ["s3://logs/named/*"]\nignore = ["LPR", "REC"]\n'
    )
    assert run("scan", url, "--config", tmp_path / "tito-audit.toml")[0] == 0
    assert run("scan", url, "--baseline", tmp_path / "known.json", "--update-baseline")[0] == 0
    assert f'"{url}"' in (tmp_path / "known.json").read_text()
    assert run("scan", url, "--baseline", tmp_path / "known.json")[0] == 0


@deep
def test_recorded_logs_of_frameworks_have_the_same_findings_in_a_bucket(s3: S3Server) -> None:
    rollouts = Path(__file__).parents[2] / "shared" / "rollouts"
    if not rollouts.is_dir():
        pytest.skip("there are no recorded logs beside the checkout")
    url = s3.upload(rollouts, "rollouts")
    here = audited(rollouts)
    for jobs in (1, 2):
        assert audited(url, "--jobs", jobs) == here
