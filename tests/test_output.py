"""Logs written again: nothing changes but what was edited, and a file appears whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import crossed, examples, some
from tests.world import ROOT, zstd
from tito_audit.errors import SetupError, StorageError
from tito_audit.storage import RawRow, atomic, open_log, open_output
from tito_audit.storage.atomic import new_file
from tito_audit.storage.log import Log
from tito_audit.storage.output import TextOutput
from tito_audit.storage.streams import ByteStream, detect_compression

SHARED = ROOT.parent / "shared"
FIXTURES = sorted((ROOT / "fixtures" / "formats").glob("*.json*"))
ROLLOUTS = sorted((SHARED / "rollouts").glob("*/*.gz"))
BOM = b"\xef\xbb\xbf"

Rewrite = Callable[[RawRow], Sequence[Any] | None]
"""The rows to write in place of one; None keeps it."""


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def unpacked(path: Path) -> bytes:
    with path.open("rb") as raw:
        stream = ByteStream(raw, detect_compression(path.read_bytes()[:4]))
        data = b"".join(stream)
        stream.close()
    return data


def rewritten(source: Path, target: Path, rewrite: Rewrite, **options: Any) -> bytes:
    """What is in the target, decompressed, once each row went through `rewrite`."""
    log = open_log(source, keep_text=True, **options)
    with open_output(log, target, overwrite=False) as out:
        for raw in log:
            rows = rewrite(raw)
            if rows is None:
                out.keep(raw)
            else:
                out.replace(raw, rows)
        out.finish(log)
    return unpacked(target)


def copied(source: Path, target: Path, compression: Any = None) -> Log:
    """The log, written row by row without the shortcut for logs in which nothing changed."""
    log = open_log(source, keep_text=True)
    with new_file(target, overwrite=True) as file:
        out = TextOutput(file, log.kind, compression)
        for raw in log:
            out.keep(raw)
        out.finish(log)
    return log


# Raw text

LOGS = {
    "lines": b'{"a": 1}\n{"a": 2}\n',
    "no final newline": b'{"a": 1}\n{"a": 2}',
    "windows": BOM + b'{"a": 1}\r\n{"a": 2}\r\n',
    "blank lines": b'\n\n {"a": 1} \n\t\n\n{"a": 2}\n \n\n',
    "bad lines": b'{"a": 1}\nnonsense \xff \n[1]\n{"a": "\xff"}\n7\n{"a": 2}\n{"a": [1, 2',
    "empty": b"",
    "only blank": b"\n \r\n",
    "array": b'[{"a": 1}, {"a": 2}]',
    "array on lines": BOM + b'\r\n[\r\n  {"a": 1},\r\n  {"a": 2}\r\n]\r\n',
    "array with holes": b'[ {"a": 1},, {"a": oops} ,\n7 ]\n',
    "array not closed": b'[\n{"a": 1},\n{"a": 2},\n',
    "array cut off": b'[{"a": 1}, {"a": [1, "\\',
    "array and more": b'[{"a": 1}]\n{"a": 2} ]\n\n',
    "empty array": b" [ ]\n",
    "document": b'{\n  "a": [1, {"b": "}"}]\n}\n',
    "documents": b' {\n"a": 1\n}\n\n{\n"a": 2\n} {"a": 3}\n',
    "document cut off": b'{\n"a": 1\n}\n{\n"a": "',
}


PACKS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd}


@pytest.mark.parametrize(("name", "pack"), crossed(list(LOGS), list(PACKS)))
def test_leads_texts_and_tail_are_the_file(tmp_path, name, pack):
    data = LOGS[name]
    path = write(tmp_path / "log", PACKS[pack](data))
    log = open_log(path, keep_text=True)
    rows = list(log)
    assert b"".join(row.lead + (row.text or b"") for row in rows) + log.tail == data
    assert [(row.index, row.value, row.error) for row in rows] == [
        (row.index, row.value, row.error) for row in open_log(path)
    ]
    assert all(row.text is not None and row.text == row.text.strip() for row in rows)
    assert all(row.text is None and row.lead == b"" for row in open_log(path))


@settings(max_examples=examples(50, 200), deadline=None)
@given(st.lists(st.sampled_from([*b' \n\r,[]{}"\\:a1', *BOM]), max_size=40).map(bytes))
def test_any_bytes_whatever_are_kept(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.json"
    for start in (b"", b"{", b'[{"a": 1},', b'{\n"a": 1\n}', b'{"a": 1}\n'):
        write(path, start + data)
        log = open_log(path, keep_text=True)
        try:
            rows = list(log)
        except StorageError:
            continue
        assert b"".join(row.lead + (row.text or b"") for row in rows) + log.tail == start + data


def test_a_log_says_what_it_is(tmp_path):
    for name, kind in (("lines", "lines"), ("array", "array"), ("document", "values"), ("empty", "lines")):
        path = write(tmp_path / name, gzip.compress(LOGS[name]))
        assert (open_log(path).kind, open_log(path).compression) == (kind, "gzip")
    log = open_log(write(tmp_path / "plain", LOGS["lines"]))
    list(log)
    assert (log.kind, log.compression) == ("lines", None)


def test_a_row_that_is_too_long_has_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\n{"a": 1}\n{"a": "' + b"x" * 100 + b'"}\n{"a": 2}\n')
    rows = list(open_log(path, keep_text=True, max_row_bytes=50))
    assert [row.text for row in rows] == [b'{"a": 1}', None, b'{"a": 2}']
    assert [row.lead for row in rows] == [b"\n", b"\n", b"\n"]


# Nothing changed


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_every_example_log_goes_through_byte_for_byte(path, tmp_path):
    copied(path, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


@pytest.mark.shared
def test_the_shared_rollouts_go_through_byte_for_byte(tmp_path):
    if not ROLLOUTS:
        pytest.skip("the shared rollouts are not beside this checkout")
    for path in some(ROLLOUTS, 2):
        for compression in ("gzip", "zstd"):
            copied(path, tmp_path / "out", compression)
            assert unpacked(tmp_path / "out") == gzip.decompress(path.read_bytes())


@pytest.mark.parametrize("data", LOGS.values(), ids=LOGS)
def test_every_kind_of_log_goes_through_byte_for_byte(tmp_path, data):
    copied(write(tmp_path / "log", data), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.zst"])
def test_a_log_in_which_nothing_changed_is_copied(tmp_path, name):
    pack = {".gz": lambda data: gzip.compress(data, 1), ".zst": zstd}.get(Path(name).suffix, bytes)
    source = write(tmp_path / name, pack(LOGS["windows"]))
    target = tmp_path / f"out-{name}"
    log = open_log(source, keep_text=True)
    with open_output(log, target, overwrite=False) as out:
        for raw in log:
            out.replace(raw, [dict(raw.value or {})])
        out.finish(log)
    assert not out.changed
    assert target.read_bytes() == source.read_bytes()


# Rows changed


def as_rows(edit: Callable[[dict[str, Any]], Sequence[Any]], at: int) -> Rewrite:
    return lambda raw: edit(dict(raw.value or {})) if raw.index == at else None


def test_an_edit_of_one_row_leaves_every_other_byte(tmp_path):
    for path in (*(path for path in FIXTURES if path.suffix == ".jsonl"), *ROLLOUTS[:1]):
        lines = unpacked(path).split(b"\n")
        at = len(lines) // 2
        if not lines[at]:
            continue
        target = tmp_path / f"{path.name}.out"
        edited = rewritten(path, target, as_rows(lambda row: [{**row, "tito_audit": {"k": [1]}}], at)).split(b"\n")
        assert edited[:at] + edited[at + 1 :] == lines[:at] + lines[at + 1 :]
        assert json.loads(edited[at]) == {**json.loads(lines[at]), "tito_audit": {"k": [1]}}
        assert edited[at].startswith(lines[at][:-1])


CHANGES: dict[str, tuple[Rewrite, Callable[[list[int]], list[int]]]] = {
    "first out": (as_rows(lambda row: [], 0), lambda a: a[1:]),
    "second out": (as_rows(lambda row: [], 1), lambda a: a[:1] + a[2:]),
    "last out": (as_rows(lambda row: [], 2), lambda a: a[:-1]),
    "all out": (lambda raw: [], lambda a: []),
    "first forked": (as_rows(lambda row: [row, {"a": 7}, {"a": 8}], 0), lambda a: [a[0], 7, 8, *a[1:]]),
    "last forked": (as_rows(lambda row: [{"a": 7}, {"a": 8}], 2), lambda a: [*a[:2], 7, 8]),
    "one fork among rows left out": (lambda raw: [{"a": 7}, {"a": 8}] if raw.index == 1 else [], lambda a: [7, 8]),
}
LAYOUTS = {
    "lines": (b'{"a": 1}\n{"a": 2}\n{"a": 3}\n', b"", b"\n", b"\n"),
    "lines without an end": (b'{"a": 1}\n{"a": 2}\n{"a": 3}', b"", b"\n", b""),
    "windows lines": (BOM + b'{"a": 1}\r\n{"a": 2}\r\n{"a": 3}\r\n', BOM, b"\r\n", b"\r\n"),
    "array": (b'[{"a": 1}, {"a": 2}, {"a": 3}]', b"[", b", ", b"]"),
    "array on lines": (b'[\n  {"a": 1},\n  {"a": 2},\n  {"a": 3}\n]\n', b"[\n  ", b",\n  ", b"\n]\n"),
    "documents": (b'{\n"a": 1}\n{\n"a": 2}\n{\n"a": 3}\n', b"", b"\n", b"\n"),
}


@pytest.mark.parametrize(("case", "suffix"), crossed([*product(LAYOUTS, CHANGES)], ["", ".gz", ".zst"]), ids=str)
def test_rows_left_out_and_forks_are_laid_out_as_the_file_is(tmp_path, case, suffix):
    layout, change = case
    data, start, between, end = LAYOUTS[layout]
    rewrite, expected = CHANGES[change]
    edited = rewritten(write(tmp_path / "log", data), tmp_path / f"out{suffix}", rewrite)
    left = expected([1, 2, 3])
    row = '{{\n"a": {}}}' if between == b"\n" and b"{\n" in data else '{{"a": {}}}'
    if left or start.startswith(b"["):
        assert edited == start + between.join(row.format(a).encode() for a in left) + end
    else:
        assert edited in {b"", BOM}
    assert [raw.value for raw in open_log(tmp_path / f"out{suffix}")] == [{"a": a} for a in left]


def test_an_only_element_may_fork_or_go(tmp_path):
    for number, (data, forked, gone) in enumerate(
        (
            (b'[{"a": 1}]', b'[{"a": 7}, {"a": 8}]', b"[]"),
            (b'[{"a":1}]\n', b'[{"a":7},{"a":8}]\n', b"[]\n"),
            (b'[\n {"a": 1}\n]', b'[\n {"a": 7},\n {"a": 8}\n]', b"[\n \n]"),
            (b'{\n "a": 1\n}', b'{\n "a": 7\n}\n{\n "a": 8\n}', b""),
            (b'{"a": 1}\r\n', b'{"a": 7}\r\n{"a": 8}\r\n', b""),
        )
    ):
        source = write(tmp_path / f"{number}", data)
        fork = rewritten(source, tmp_path / f"{number}.fork", lambda raw: [{"a": 7}, {"a": 8}])
        assert fork == forked
        assert rewritten(source, tmp_path / f"{number}.gone", lambda raw: []) == gone


def test_what_follows_an_array_stays_behind_its_end(tmp_path):
    source = write(tmp_path / "log", b'[{"a": 1}\n]\nmore\n')
    edited = rewritten(source, tmp_path / "out", as_rows(lambda row: [], 0))
    assert edited == b"[\n]\nmore\n"


def test_a_row_that_cannot_be_read_is_kept_or_left_out(tmp_path):
    source = write(tmp_path / "log", LOGS["bad lines"])
    assert rewritten(source, tmp_path / "out", lambda raw: None if raw.value else []) == b'{"a": 1}\n{"a": 2}'
    changed = rewritten(source, tmp_path / "out2", as_rows(lambda row: [{"a": 9}], 0))
    assert changed == LOGS["bad lines"].replace(b'{"a": 1}', b'{"a": 9}')


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".jsonl", ""])
def test_the_suffix_of_the_target_chooses_the_compression_and_bytes_are_the_same_each_time(tmp_path, suffix):
    source = write(tmp_path / "log.jsonl.gz", gzip.compress(LOGS["lines"]))
    edit = as_rows(lambda row: [{"a": 9}], 0)
    contents = set()
    for number in range(2):
        target = tmp_path / f"{number}" / f"out{suffix}"
        target.parent.mkdir()
        assert rewritten(source, target, edit) == b'{"a": 9}\n{"a": 2}\n'
        contents.add(target.read_bytes())
        time.sleep(1.1 * (suffix == ".gz" and not number))
    (content,) = contents
    assert detect_compression(content[:4]) == {".gz": "gzip", ".zst": "zstd", "": "gzip"}.get(suffix)
    unchanged = tmp_path / f"same{suffix}"
    assert rewritten(source, unchanged, lambda raw: None) == LOGS["lines"]
    assert detect_compression(unchanged.read_bytes()[:4]) == detect_compression(content[:4])


def not_opened(error: type[Exception], says: str, log: Log, target: Path, *, overwrite: bool = False) -> None:
    """Assert that no output of a log is begun there."""
    with pytest.raises(error, match=says), open_output(log, target, overwrite=overwrite):
        raise AssertionError("not reached")


def no_file(says: str, target: Path, *, overwrite: bool = False) -> str:
    """What is said, in one line, where no file is begun."""
    with pytest.raises(StorageError, match=says) as raised, new_file(target, overwrite=overwrite):
        raise AssertionError("not reached")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_suffix_of_another_kind_is_refused(tmp_path):
    source, table = write(tmp_path / "log", LOGS["lines"]), tmp_path / "log.parquet"
    not_opened(SetupError, r"name it \.jsonl", open_log(source, keep_text=True), tmp_path / "out.parquet")
    pq.write_table(pa.table({"a": [1]}), table)
    for name in ("out.jsonl", "out.json.gz"):
        not_opened(SetupError, r"name it \.parquet", open_log(table), tmp_path / name)
    assert names(tmp_path) == ["log", "log.parquet"]


def test_parquet_in_which_nothing_changed_is_copied(tmp_path):
    source = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), source)
    log = open_log(source, keep_text=True)
    assert (log.kind, log.compression) == ("parquet", None)
    rewritten(source, tmp_path / "out.parquet", lambda raw: None)
    assert (tmp_path / "out.parquet").read_bytes() == source.read_bytes()


def test_rows_that_cannot_be_carried_over_stop_the_run(tmp_path):
    source = write(tmp_path / "log", b'{"a": 1}\n{"a": "' + b"x" * 100 + b'"}\n')
    with pytest.raises(StorageError, match=r"row 1 cannot be carried over.*Settings.max_row_bytes"):
        rewritten(source, tmp_path / "out", lambda raw: None, max_row_bytes=50)
    assert rewritten(source, tmp_path / "out", as_rows(lambda row: [], 1), max_row_bytes=50) == b'{"a": 1}\n'
    lines = b"".join(b'{"a": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(20000))
    for number, pack in enumerate((gzip.compress, zstd)):
        packed = pack(lines)
        broken = write(tmp_path / f"broken{number}", packed[: len(packed) // 2])
        with pytest.raises(StorageError, match="would lack the rows after it, so its file was not written"):
            rewritten(broken, tmp_path / f"out{number}", lambda raw: [] if raw.error else None)
    assert not list(tmp_path.glob("out[01]*"))


def test_an_output_that_was_not_finished_does_not_appear(tmp_path):
    log = open_log(write(tmp_path / "log", LOGS["lines"]), keep_text=True)
    with pytest.raises(RuntimeError, match="finished"), open_output(log, tmp_path / "out.gz", overwrite=False):
        pass
    not_opened(ValueError, "keep_text", open_log(log.path), tmp_path / "o")
    assert names(tmp_path) == ["log"]


# A file appears whole or not at all


@pytest.fixture(params=["with links", "without links"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of giving a file its name, as different systems allow it."""
    if request.param == "without links":

        def refuse(*args: Any, **options: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    return str(request.param)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path, way):
    with new_file(tmp_path / "out", overwrite=False) as out:
        out.write(b"whole")
        assert "out" not in names(tmp_path)
    assert (tmp_path / "out").read_bytes() == b"whole"
    assert names(tmp_path) == ["out"]
    with new_file(tmp_path / "out", overwrite=True) as out:
        out.write(b"new")
        assert (tmp_path / "out").read_bytes() == b"whole"
    assert (tmp_path / "out").read_bytes() == b"new"
    assert names(tmp_path) == ["out"]


def give_up(target: Path, error: type[BaseException]) -> None:
    with new_file(target, overwrite=True) as out:
        out.write(b"half" * 1_000_000)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, ValueError])
def test_nothing_is_left_of_a_file_that_was_given_up(tmp_path, way, error):
    old = write(tmp_path / "old", b"old")
    for target in (tmp_path / "out", old):
        with pytest.raises(error):
            give_up(target, error)
    assert names(tmp_path) == ["old"]
    assert old.read_bytes() == b"old"


def test_a_file_that_is_there_is_not_replaced_unasked(tmp_path, way):
    write(tmp_path / "out", b"old")
    no_file("the file exists, so nothing was written", tmp_path / "out")
    (tmp_path / "out").unlink()
    with pytest.raises(StorageError, match="exists"), new_file(tmp_path / "out", overwrite=False):
        write(tmp_path / "out", b"of somebody else")
    assert (tmp_path / "out").read_bytes() == b"of somebody else"
    assert names(tmp_path) == ["out"]


def test_permissions_are_those_of_the_replaced_file_or_of_the_mask(tmp_path, way):
    before = os.umask(0o027)
    try:
        for mode in (None, 0o604):
            if mode is not None:
                (tmp_path / "out").chmod(mode)
            with new_file(tmp_path / "out", overwrite=True) as out:
                out.write(b"x")
            assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == (mode or 0o640)
    finally:
        os.umask(before)


def test_the_input_is_never_written_by_whatever_name(tmp_path):
    source = write(tmp_path / "log", LOGS["lines"])
    (tmp_path / "soft").symlink_to(source)
    os.link(source, tmp_path / "hard")
    log = open_log(source, keep_text=True)
    for target in (source, tmp_path / "soft", tmp_path / "hard", tmp_path / "." / "log"):
        for overwrite in (False, True):
            not_opened(StorageError, "the input is never written", log, target, overwrite=overwrite)
    assert source.read_bytes() == LOGS["lines"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "folder" / "real")
    for overwrite in (False, True):
        with new_file(tmp_path / "out", overwrite=overwrite) as out:
            out.write(b"x")
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "folder") == ["real"]


def test_what_cannot_be_a_file_is_refused_in_one_line(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, says in (
        (tmp_path, "this is a folder"),
        (tmp_path / "absent" / "out", "there is no folder"),
        (pipe, "not a regular file"),
        (Path("/dev/null"), "not a regular file"),
        (write(tmp_path / "file", b"") / "out", "file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        assert str(target) in no_file(says, target, overwrite=True)
    not_opened(SetupError, "pipe", Log(pipe, 1 << 20), tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    # Root writes everywhere, but for what is mounted so.
    with mounted(folder, "ro") if os.access(folder, os.W_OK) else nullcontext():
        no_file("cannot be written", folder / "out")


@contextmanager
def mounted(folder: Path, options: str = "size=64k") -> Iterator[None]:
    """A file system of its own in the folder; skipped where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_the_longest_name_is_written(tmp_path, way):
    target = tmp_path / ("é" * 127)
    with new_file(target, overwrite=False) as out:
        out.write(b"x")
    assert names(tmp_path) == [target.name]


def test_files_of_a_killed_run_do_not_disturb_a_later_one(tmp_path, way, monkeypatch):
    tokens = iter(["aaaa", "bbbb", "cccc", "dddd"])
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda size: next(tokens))
    for stale in (".out.0000.part", ".out.ffff.part"):
        write(tmp_path / stale, b"half")
    with new_file(tmp_path / "out", overwrite=False) as out:
        out.write(b"x")
    assert names(tmp_path) == [".out.0000.part", ".out.ffff.part", "out"]


KILLED = """
import os, sys
from pathlib import Path
from tito_audit.storage.atomic import new_file
with new_file(Path(sys.argv[1]), overwrite=True) as out:
    out.write(b"half" * 1_000_000)
    out.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_half_file_under_the_name(tmp_path, number):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"writing\n"
        run.send_signal(number)
        assert run.wait(60) != 0
    left = [re.sub(r"\w{8}", "X", name) for name in names(tmp_path)]
    assert left == ([] if number is signal.SIGTERM else [".out.X.part"])


def test_what_will_replace_a_private_file_is_private_while_it_is_written(tmp_path):
    write(tmp_path / "out", b"old").chmod(0o600)
    with new_file(tmp_path / "out", overwrite=True) as out:
        assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600] * 2
        out.write(b"x")


# Full disks


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A limit of 64 KiB on every file, which the system enforces as it does the end of a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("disk", [small_disk, mounted])
@pytest.mark.parametrize("suffix", some([".gz", "", ".zst"], 1))
@pytest.mark.parametrize("edited", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, disk, suffix, edited, way):
    line = b'{"a": "%s"}\n'
    source = write(tmp_path / "log", b"".join(line % os.urandom(200).hex().encode() for _ in range(1500)))
    folder = tmp_path / "disk"
    folder.mkdir()
    edit = as_rows(lambda row: [{"a": 9}], 0) if edited else lambda raw: None
    with disk(folder):
        with pytest.raises(StorageError, match=r"cannot be written .*; free some space") as raised:
            rewritten(source, folder / f"out{suffix}", edit)
        assert names(folder) == []
    assert "\n" not in str(raised.value)


def test_a_device_without_room_is_reported_at_the_last_flush(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    real = os.open

    def full(path: Any, flags: int, *rest: Any) -> int:
        fd = real(path, flags, *rest)
        if str(path).endswith(".part"):
            os.close(fd)
            fd = real("/dev/full", os.O_RDWR)
        return fd

    monkeypatch.setattr(os, "open", full)
    with (
        pytest.raises(StorageError, match="No space left on device"),
        new_file(tmp_path / "out", overwrite=False) as out,
    ):
        out.write(b"few bytes, which stay in the buffer until the end")
    assert names(tmp_path) == []
