"""The stub and the gateway as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVE = (sys.executable, "-m", "tito_audit", "serve")


@dataclass
class Process:
    """A server that runs, and where."""

    running: subprocess.Popen[bytes]
    address: str

    def get(self, path: str) -> Any:
        """What it answers, as JSON."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: object) -> Any:
        """What it answers to a body, as JSON."""
        asking = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asking, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def kill(self) -> None:
        """End it as a power cut would."""
        self.running.kill()
        self.running.wait()

    def stop(self, seconds: float = 90) -> int:
        """Ask it to end; its exit code."""
        self.running.send_signal(signal.SIGTERM)
        return self.running.wait(seconds)


@contextmanager
def stub(tokenizer: Path, *words: object, **knobs: object) -> Iterator[Process]:
    """The stand-in for a vLLM server."""
    command = [sys.executable, "-m", "tests.gateway.stub_upstream", "--tokenizer", tokenizer, *words]
    command += ["--knobs", json.dumps(knobs)]
    running = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        address = running.stdout.readline().decode().strip()
        assert address, "the stub did not start"
        yield Process(running, address)
    finally:
        running.kill()
        running.wait()
        if running.stdout:
            running.stdout.close()


@contextmanager
def gateway(
    upstream: str, tokenizer: Path, log: Path, *words: object, output: Path | None = None, **env: str
) -> Iterator[Process]:
    """`tito-audit serve` before that upstream; it is killed if it still runs at the end."""
    output = output or log.with_suffix(".out")
    command = [*SERVE, "--provider", upstream, "-t", tokenizer, "--log", log]
    command += ["--port", 0, *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TITO_AUDIT_")}
    with output.open("ab") as out:
        begin = out.tell()
        running = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, stdout=out, stderr=out, env={**environment, **env}
        )
    try:
        yield Process(running, _address(running, output, begin))
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        running.wait()


def _address(running: subprocess.Popen[bytes], output: Path, begin: int, seconds: float = 240) -> str:
    """Where the server says that it listens, in what it wrote after so many bytes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lines = output.read_bytes()[begin:].decode(errors="replace")
        if match := re.search(r"agents: OPENAI_BASE_URL=(\S+)/v1 ", lines):
            return match[1]
        if running.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"the gateway did not start: {output.read_text(errors='replace')}")
