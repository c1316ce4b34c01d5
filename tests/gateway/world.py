"""A gateway before a stub, random agents before the gateway, and what is left of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gateway.agents import Agent, Call, Habits
from tests.gateway.process import Process, gateway, stub
from tests.gateway.proof import Proof, read_log
from tests.gateway.reference import Reference
from tests.gateway.stub_upstream import MODEL

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class World:
    """A tokenizer, how its model ends an answer, and what its template lets agents do."""

    name: str
    folder: Path
    end: str
    control: str
    habits: Habits = field(default_factory=Habits)
    words: tuple[str, ...] = ()
    """More words for `tito-audit serve`."""

    def __str__(self) -> str:
        return self.name


PARSERS = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
TOOLS_ONLY = ("--tool-parser", "hermes", "--reasoning-parser", "none")
TOY = World(
    "toy_bpe", ROOT / "fixtures" / "tokenizers" / "toy_bpe", "<|im_end|>", "<|im_start|>", words=TOOLS_ONLY
)
TOY_REASONING = replace(TOY, name="toy_bpe-reasoning", words=PARSERS)
TOY_UNPARSED = replace(TOY, name="toy_bpe-unparsed", words=("--tool-parser", "none", "--reasoning-parser", "none"))
TOYS = (TOY, TOY_REASONING, TOY_UNPARSED)
_PLAIN = Habits(system=0.5, tools=0, user_only=True, kwargs=({},))


def real(folder: Path) -> list[World]:
    """The real tokenizers of a folder, as far as they are there."""
    chatml = ("<|im_end|>", "<|im_start|>")
    families = {
        "qwen3": (*chatml, Habits(), PARSERS),
        "qwen2.5-coder": (*chatml, Habits(kwargs=({},)), PARSERS),
        "smollm2": (*chatml, _PLAIN, ("--reasoning-parser", "qwen3", "--tool-parser", "none")),
        "llama-3.1": ("<|eot_id|>", "<|reserved_special_token_3|>", _PLAIN, ("--tool-parser", "none")),
        "gemma-3": ("<end_of_turn>", "<unused5>", _PLAIN, ("--tool-parser", "none")),
        "deepseek-v3": ("<｜end▁of▁sentence｜>", "<｜fim▁hole｜>", _PLAIN, ("--tool-parser", "none")),
    }
    return [
        World(name, folder / name, end, control, habits, words)
        for name, (end, control, habits, words) in families.items()
        if (folder / name / "tokenizer.json").exists()
    ]


def agents(address: str, world: World, count: int, seed: int) -> list[Agent]:
    """Agents of every way to say which session a call is of."""
    sessions = [None if number % 3 == 2 else f"agent-{seed}-{number}" for number in range(count)]
    return [
        Agent(address, MODEL, random.Random(f"{seed}/{number}"), session, number % 3 == 1, world.habits)
        for number, session in enumerate(sessions)
    ]


async def drive(crowd: Sequence[Agent], steps: int) -> list[Call]:
    """All calls of agents that run at the same time."""
    await asyncio.gather(*(agent.run(steps) for agent in crowd))
    return [call for agent in crowd for call in agent.calls]


def proved(world: World, folder: Path, *, count: int, steps: int, seed: int, **knobs: Any) -> Proof:
    """The proof of a run of so many agents; the log is `log.jsonl` in the folder."""
    log = folder / "log.jsonl"
    with stub(world.folder, "--end", world.end, "--control", world.control, "--seed", seed, **knobs) as upstream:
        with gateway(f"vllm={upstream.address}", world.folder, log, *world.words) as server:
            calls = asyncio.run(drive(agents(server.address, world, count, seed), steps))
            assert server.stop() == 0, server_said(log)
        state = settled(upstream)
    return Proof(Reference(world.folder), read_log(log), state["requests"], calls)


def settled(upstream: Process) -> Any:
    """What the stub remembers; nothing runs there any more."""
    state = upstream.get("/stub/answers")
    assert state["running"] == 0, "generations go on that nobody waits for"
    return state


def server_said(log: Path) -> str:
    """What the gateway printed."""
    return log.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
