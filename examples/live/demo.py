"""`make live`: an agent on the gateway and on a plain server, scans of both logs, and what the drift costs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toy_model import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = Path(os.environ.get("LIVE_BUILD", "build/live"))
MODEL, CLEAN, PLAIN = BUILD / "model", BUILD / "gateway.jsonl", BUILD / "plain.jsonl"
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "COLUMNS": "120",
    "OMP_NUM_THREADS": "1",  # more threads do not help such a small model, and slow down a busy machine
}
CHECKS = ("-t", MODEL, "--select", "SEQ,TPL", "--worst", 0)
SCANNED = r"^\d+ (errors|notes) in|^code |^gate:"
PRICED = r"^tito-audit rescore|^What drift costs|^sampled, instead"
"""Blocks of output to show: findings of a scan, and what a model says about them."""
STARTS = 120
"""Timeout for the start of a server, in seconds."""


def say(text: str) -> None:
    """Print a line of explanation."""
    print(f"\n{text}\n", flush=True)


def tito_audit(*words: object, shows: str = "", codes: tuple[int, ...] = (0,)) -> None:
    """Run the command as a user types it, and print the blocks of its output that match `shows`."""
    typed = [str(word) for word in words]
    print(f"$ tito-audit {shlex.join(typed)}", flush=True)
    command = [sys.executable, "-m", "tito_audit", *typed]
    done = subprocess.run(command, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, check=False)
    blocks = [block for block in done.stdout.strip().split("\n\n") if re.search(shows, block)]
    print("\n\n".join(blocks))
    print(f"(exit code {done.returncode})", flush=True)
    if done.returncode not in codes:
        raise SystemExit(f"expected exit code {' or '.join(map(str, codes))}")


@contextmanager
def server(*command: object) -> Iterator[str]:
    """Run a server in a separate process; yields its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = [str(word).replace("{port}", str(port)) for word in command]
    with (BUILD / "server.log").open("w", encoding="utf-8") as said:
        running = subprocess.Popen([sys.executable, *words], env=os.environ | QUIET, stdout=said, stderr=said)
    try:
        _wait(running, f"http://127.0.0.1:{port}/v1/models")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(30)


def _wait(running: subprocess.Popen[bytes], address: str) -> None:
    until = time.monotonic() + STARTS
    while time.monotonic() < until and running.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"a server did not start: {(BUILD / 'server.log').read_text(encoding='utf-8')}")


def agent(base_url: str) -> None:
    """Run the agent on a server."""
    print("$ python examples/live/agent.py BASE_URL", flush=True)
    subprocess.run([sys.executable, str(HERE / "agent.py"), base_url], check=True, cwd=ROOT)


def main() -> None:
    """Run the whole demo."""
    BUILD.mkdir(parents=True, exist_ok=True)
    say("1. Training a toy model to look up the weather, with unusual tokens (half a minute, only once).")
    build(MODEL)
    for log in (CLEAN, PLAIN):
        log.unlink(missing_ok=True)

    say("2. An agent of six turns on the gateway. No prefix breaks (the notes: JSON with other spacing):")
    serve = ("serve", "--provider", f"hf={MODEL}", "-t", MODEL, "--log", CLEAN, "--reasoning-parser", "none")
    print(f"$ tito-audit {shlex.join(map(str, serve))} &", flush=True)
    with server("-m", "tito_audit", *serve, "--port", "{port}") as address:
        agent(address)
    tito_audit("scan", CLEAN, *CHECKS, shows=SCANNED)

    say("3. The same agent on a server that renders and tokenizes all messages again each turn. Prefixes break:")
    with server(HERE / "plain_server.py", MODEL, PLAIN, "{port}") as address:
        agent(address)
    tito_audit("scan", PLAIN, *CHECKS, shows=SCANNED, codes=(1,))

    say("4. What that drift costs, scored by the model:")
    tito_audit("rescore", PLAIN, "--provider", f"hf={MODEL}", "-t", MODEL, "--worst", 0, shows=PRICED)

    say("5. Look closer, or put the gateway in front of your own server (docs/record-clean-rollouts.md):")
    print(f"tito-audit show {PLAIN} --row 0 -t {MODEL}")
    print("tito-audit serve --provider vllm=http://127.0.0.1:8000 -t TOKENIZER --log rollouts.jsonl")


if __name__ == "__main__":
    main()
