"""What all tests share: nothing that a run keeps on disk reaches another, or the cache of whoever runs them."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tests.tiers  # noqa: F401  (sets how many examples hypothesis tries)

if TYPE_CHECKING:
    from tests.vllm.server import VllmServer

os.environ["TITO_AUDIT_CACHE"] = "off"
os.environ.pop("COLUMNS", None)  # processes of pytest-xdist state a width; without one pages have 100 columns

# A shell starts what runs in the background deaf to Ctrl-C, and so would be each process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = frozenset(
    f"test_{name}.py"
    for name in ("agents", "gateway_kill", "ray", "resume", "torture", "torture_processes", "truth", "truth_rows")
)
"""Test files with single tests of several seconds."""

REAL = re.compile(r"\[.*(qwen|gemma|llama|deepseek|smollm|gpt-oss)")
"""Names of real tokenizers among the parameters of a test."""

gc.disable()  # until all tests are collected: next to nothing of what that makes is garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long starts first, so that no process is left with it at the end while the others wait.

    What loads real tokenizers comes last: a process that holds a gigabyte of them forks slowly.
    """
    items.sort(key=lambda item: (loads_real(item), item.path.name not in LONG))


def loads_real(item: pytest.Item) -> bool:
    """Whether a test is skipped where there are no real tokenizers, or names one."""
    reasons = (str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif"))
    return bool(
        item.get_closest_marker("shared")
        or any("checkout" in reason for reason in reasons)
        or REAL.search(item.name)
    )


def pytest_collection_finish() -> None:
    """Garbage is collected from now on, and rarely."""
    set_aside()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def set_aside() -> None:
    """What is loaded by now stays: the garbage collector never looks at it again.

    Where a template reaches a limit, all garbage is collected: half a second beside all that tests load.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def loaded_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """For all tests of a module: the same tokenizer and template are loaded once, whatever asks for them.

    Not in modules with `LOADS_ANEW = True`, whose tests are about loading, or change what they load.
    """
    set_aside()
    if getattr(request.module, "LOADS_ANEW", False):
        yield
        return
    from tests.command import loading_once, unchanged  # after what is set above

    with loading_once():
        yield
    assert unchanged(), "a test changed a tokenizer that others share"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, built once a process; skipped without torch."""
    pytest.importorskip("torch")
    from tests.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A real vLLM server with a tiny model, one for all processes of a run; skipped where none can be started.

    TITO_AUDIT_VLLM=required fails instead, TITO_AUDIT_VLLM=off skips at once; TITO_AUDIT_VLLM=/a/folder is where
    several runs share a server, which lives as long as one of them.
    """
    from tests.vllm.server import keep_log, missing, running

    setting = os.environ.get("TITO_AUDIT_VLLM", "")
    if reason := missing():
        outcome = pytest.fail if setting == "required" else pytest.skip
        outcome(f"no vLLM server: {reason}")
    base = tmp_path_factory.getbasetemp()
    ours = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    before = request.session.testsfailed
    with running(Path(setting) if setting.startswith("/") else ours / "vllm") as server:
        yield server
        if request.session.testsfailed > before:
            print(f"\nThe server's log: {keep_log(server)}", file=sys.stderr)
