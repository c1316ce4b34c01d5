"""`-` reads standard input, and finds in it what it finds in a file."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import run
from tests.ready import program
from tito_audit.errors import StorageError
from tito_audit.storage import find_logs, open_log
from tito_audit.storage.watch import standard_input

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
LOG = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"
PARQUET = ROOT / "fixtures" / "formats" / "art_parquet.parquet"
DATA = LOG.read_bytes()


def zstd(data: bytes) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


def timeless(text: str) -> str:
    """A report without its times and the name of the log."""
    return re.sub(r'[\d.]+ s(, [\d,]+ tokens/s)?|"seconds":[\d.e-]+', "", text.replace(str(LOG), "-"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_a_piped_log_gives_the_findings_of_the_file(pack: object) -> None:
    flags = ("-t", TOY, "-f", "jsonl", "--fail-on", "never")
    assert callable(pack)
    code, out, err = run("scan", "-", *flags, stdin=pack(DATA))
    of_file = run("scan", LOG, *flags)
    assert (code, timeless(out), err) == (0, timeless(of_file[1]), "")
    assert json.loads(out.splitlines()[0])["file"] == "-"


def test_a_piped_table_is_read_as_one() -> None:
    piped, of_file = (
        run("scan", name, "-f", "json", "--fail-on", "never", stdin=data)[1]
        for name, data in (("-", PARQUET.read_bytes()), (str(PARQUET), None))
    )
    assert timeless(piped) == timeless(of_file.replace(str(PARQUET), "-"))


def test_every_command_that_reads_a_log_reads_a_pipe(tmp_path: Path) -> None:
    for command in (("show", "-", "--row", "1", "-f", "json"), ("inspect", "-", "-f", "json"), ("identify", "-")):
        piped, of_file = (
            run(*command, "-t", TOY, stdin=DATA),
            run(*(LOG if word == "-" else word for word in command), "-t", TOY),
        )
        assert [timeless(text) for text in piped[1:]] == [timeless(text) for text in of_file[1:]]
        assert piped[0] == of_file[0]
    for name, log in (("piped", "-"), ("file", LOG)):
        run("repair", log, "-t", TOY, "-o", tmp_path / f"{name}.jsonl", stdin=DATA)
        run("convert", log, "--to", "rows", "--lossy", "-o", tmp_path / f"{name}-rows.jsonl", stdin=DATA)
    for kind in ("", "-rows"):
        assert (
            (tmp_path / f"piped{kind}.jsonl").read_bytes() == (tmp_path / f"file{kind}.jsonl").read_bytes() != b""
        )


@pytest.mark.parametrize("how", ["pipe", "file"])
def test_a_process_reads_its_own_standard_input_in_several_processes(how: str) -> None:
    command = [*program(), "scan", "-", "-t", str(TOY), "-f", "jsonl", "-j", "2"]
    with LOG.open("rb") as file:
        feed = {"stdin": file} if how == "file" else {"input": DATA}
        done = subprocess.run(command, capture_output=True, cwd=ROOT, **feed)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (1, b"")
    assert timeless(done.stdout.decode()) == timeless(run("scan", LOG, "-t", TOY, "-f", "jsonl")[1])


class Terminal(io.TextIOWrapper):
    """A terminal at which nobody types."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"never read")))
    with pytest.raises(StorageError, match="standard input is a terminal, so there is no log to read"):
        find_logs(["-"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(StorageError, match="standard input is closed"):
        find_logs(["-"])


def test_a_file_called_by_a_dash_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"of": "stdin"}\n')))
    (tmp_path / "-").write_text('{"of": "file"}\n', encoding="utf-8")
    assert [row.value for row in open_log(standard_input())] == [{"of": "stdin"}]
    assert [row.value for file in find_logs(["./-"]) for row in open_log(file)] == [{"of": "file"}]
    assert [str(file) for file in find_logs(["-"])] == ["-"]
