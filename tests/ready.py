"""The command in a process of its own, without the second that Python takes to start it.

`program()` starts a process that has loaded the command, and gives the words of a small program that asks it for a
fork: with the arguments, folder, environment and streams of that program, which ends as the fork ends. `make deep`
starts each command anew. Not for tests of signals, imports or other open files: these do not reach the fork.
"""

from __future__ import annotations

import marshal
import os
import socket
import sys

MARSHAL = 4
"""The version of what is sent; the program and the process are the same Python."""

if __name__ == "__main__" and sys.argv[1] != "serve":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        words = marshal.dumps((sys.argv[2:], os.getcwd(), dict(os.environ)), MARSHAL)  # noqa: PTH109  loads nothing
        socket.send_fds(connection, [len(words).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(words)
        answer = connection.recv(8)
    ended = int.from_bytes(answer, "big", signed=True) if answer else 70
    if ended < 0:
        import signal

        if -ended != signal.SIGKILL:
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)

import atexit  # noqa: E402  the program above needs none of these
import gc  # noqa: E402
import io  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from contextlib import redirect_stdout, suppress  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

from tests.tiers import DEEP  # noqa: E402

__all__ = ["forked", "program"]

ROOT = Path(__file__).resolve().parents[1]
LOGS = [str(ROOT / "fixtures" / "formats" / name) for name in ("generic.jsonl", "art_parquet.parquet")]
LOADED = (
    ("scan", *LOGS, "-t", str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")),
    ("list", "rules"),
)
"""Commands that load what others need as well."""


def program() -> list[str]:
    """The words that start the command as a process; arguments follow them."""
    if DEEP or not hasattr(socket, "send_fds"):
        return [sys.executable, "-m", "tito_audit"]
    return [sys.executable, "-I", "-S", str(Path(__file__)), _server(os.getpid())]


def forked(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run the command to its end in this process, a fork of one that has loaded it."""
    from tito_audit.cli import main

    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    sys.modules["__main__"].__package__ = "tito_audit"  # as `python -m tito_audit` has it
    sys.argv = [str(ROOT / "tito_audit" / "__main__.py"), *words]
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding=env.get("PYTHONIOENCODING", "utf-8"), closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


@cache
def _server(_pid: int) -> str:
    """The address of a process of this one, which ends when this one does."""
    folder = tempfile.mkdtemp(prefix="t.")
    address = f"{folder}/ready"
    words = [sys.executable, "-m", "tests.ready", "serve", address]
    # Its input is a pipe from this process, and so ends with it.
    serving = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert serving.stdout is not None
    assert serving.stdout.read(1) == b"."
    atexit.register(serving.communicate)
    return address


def _serve(address: str) -> None:
    """Fork for each program that asks, until the process that started this one has ended."""
    import select

    from tito_audit.cli import app

    for words in LOADED:
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            app(list(words))
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        os.write(1, b".")
        while listening.fileno() in select.select([listening.fileno(), 0], [], [])[0]:
            asking, _ = listening.accept()
            if not os.fork():
                listening.close()
                _attend(asking)
            asking.close()
    Path(address).unlink()
    Path(address).parent.rmdir()


def _attend(asking: socket.socket) -> NoReturn:
    """Run the command in a fork of its own, and answer how that ended."""
    size, streams, _, _ = socket.recv_fds(asking, 8, 3)
    wanted, data = int.from_bytes(size, "big"), b""
    while len(data) < wanted:
        data += asking.recv(wanted - len(data))
    words, folder, env = marshal.loads(data)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    process = os.fork()
    if not process:
        asking.close()
        os.chdir(folder)
        forked(words, env)
    for number in range(3):
        os.close(number)  # a reader at the other end sees the end of the command
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    asking.sendall(ended.to_bytes(8, "big", signed=True))
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[2])
