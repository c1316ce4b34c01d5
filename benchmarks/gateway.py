"""`make bench-gateway`: what the gateway adds to a request, with 500 sessions and 200 requests in flight."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.measure import ROOT, TOY
from benchmarks.results import busy, heading
from benchmarks.tables import table
from tests.gateway.process import Process, gateway, stub
from tests.gateway.stub_upstream import MODEL

__all__ = ["Load", "Measured", "main", "page"]

PLAIN = ("--tool-parser", "none", "--reasoning-parser", "none")
METHOD = (
    "The upstream is a stub in a separate process that returns 16 tokens after a delay; the clients are a third "
    "process on the same cores. Each session runs turn after turn; its first message is nearly all of the prompt.",
    "*Added* is the time that a client waited, minus what the stub took for the same request, in ms: reading, "
    "rendering, encoding, HTTP in both directions, the log, and waiting for a processor, which clients, gateway "
    "and stub share.",
    "*Own clock* is what the gateway measures (`X-Tito-Overhead-Ms`): from the body of a request to its answer, "
    "without sending the request upstream and waiting for the response.",
    "*First* are first prompts, which are rendered and encoded completely; *next* are prompts that continue.",
    "*CPU* is the gateway's CPU time per request, first prompts included; *MB* is its memory per session.",
)


@dataclass(frozen=True)
class Load:
    """One way to load the gateway."""

    tokens: int
    """Approximate tokens of the first prompt."""
    sessions: int
    flying: int
    """Most requests in flight."""
    turns: int
    latency: float
    """Seconds that the stub takes per request."""
    api: str = "chat"
    """`chat`, `responses` or `messages`."""


@dataclass
class Measured:
    """Times and memory of a load."""

    load: Load
    first: list[float] = field(default_factory=list)
    """Seconds added to first prompts."""
    own_first: list[float] = field(default_factory=list)
    """The same, by the gateway's clock."""
    own_next: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    """Seconds added to each next turn."""
    cpu: float = 0.0
    """CPU seconds of the gateway per request."""
    held: float = 0.0
    """Bytes of the gateway's memory per session."""
    rate: float = 0.0
    """Requests a second."""
    most: int = 0
    """The most requests in flight at the stub."""

    @property
    def next(self) -> list[float]:
        """Seconds added to prompts that continue."""
        return [one for turn in self.turns for one in turn]


FULL = (
    Load(4_000, 20, 1, 10, 0.0),
    Load(4_000, 500, 200, 6, 4.0),
    Load(32_000, 6, 1, 6, 0.0),
    Load(32_000, 200, 100, 3, 20.0),
    Load(4_000, 4, 1, 50, 0.0),
)
EACH = Load(4_000, 40, 1, 10, 0.0)
"""What every API is asked, in turn, to compare them."""
ROUNDS = 3
QUICK = (Load(4_000, 6, 1, 5, 0.0), Load(4_000, 60, 40, 3, 2.0), Load(32_000, 2, 1, 3, 0.0))


def text_of(tokens: int, dice: random.Random) -> str:
    """Words of about this many tokens of the toy tokenizer."""
    known = (TOY.parent / "text" / "prose.txt").read_text(encoding="utf-8").split()
    return " ".join(dice.choices(known, k=int(tokens / 1.35)))


APIS: dict[str, tuple[str, str, str]] = {
    "chat": ("chat/completions", "messages", "max_tokens"),
    "responses": ("responses", "input", "max_output_tokens"),
    "messages": ("messages", "messages", "max_tokens"),
}
"""The path of each API, and its fields for the history and the longest answer."""


async def _ask(
    client: aiohttp.ClientSession, where: str, session: str, history: list[object], api: str
) -> tuple[float, float, list[object]]:
    """Seconds, seconds by the gateway's clock, and the answer as the client sends it back."""
    path, messages, longest = APIS[api]
    body = {"model": MODEL, messages: history, longest: 32}
    began = time.perf_counter()
    async with client.post(f"{where}/v1/{path}", json=body, headers={"X-Session-ID": session}) as answer:
        said = await answer.json()
    took = time.perf_counter() - began
    assert answer.status == 200, said
    own = float(answer.headers["X-Tito-Overhead-Ms"]) / 1000
    if api == "chat":
        return took, own, [{"role": "assistant", "content": said["choices"][0]["message"]["content"]}]
    return took, own, said["output"] if api == "responses" else [{"role": "assistant", "content": said["content"]}]


def _text(answer: object) -> str:
    """The text of an answer as a client sends it back."""
    assert isinstance(answer, dict)
    content = answer["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


async def _session(
    client: aiohttp.ClientSession, where: str, number: int, load: Load, gate: asyncio.Semaphore, start: float
) -> list[tuple[int, float, float, str]]:
    dice = random.Random(number)
    messages: list[object] = [{"role": "user", "content": text_of(load.tokens, dice)}]
    took = []
    await asyncio.sleep(start)
    for turn in range(load.turns):
        async with gate:
            seconds, own, said = await _ask(client, where, f"load-{number}", messages, load.api)
        took.append((turn, seconds, own, _text(said[0])[:8]))
        messages += [*said, {"role": "user", "content": f"And then? {turn}"}]
    return took


async def _all(load: Load, where: str) -> list[tuple[int, float, float, str]]:
    gate = asyncio.Semaphore(load.flying)
    # Clients do not start all at once, but over one latency.
    gap = load.latency / load.flying
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    ) as client:
        sessions = [
            _session(client, where, number, load, gate, (number % load.flying) * gap)
            for number in range(load.sessions)
        ]
        return [one for some in await asyncio.gather(*sessions) for one in some]


def measured(load: Load, tokenizer: Path) -> Measured:
    """Run one load on a fresh gateway."""
    with (
        tempfile.TemporaryDirectory() as folder,
        stub(tokenizer, latency=load.latency, load=True, remember=False) as upstream,
        gateway(f"vllm={upstream.address}", tokenizer, Path(folder) / "log.jsonl", *PLAIN) as server,
    ):
        asyncio.run(_all(Load(200, 4, 2, 2, 0.0), server.address))  # what is created only once
        before, cpu = _memory(server), _cpu(server)
        began = time.perf_counter()
        took = asyncio.run(_all(load, server.address))
        seconds_in_all = time.perf_counter() - began
        result = Measured(load, turns=[[] for _ in range(load.turns - 1)])
        result.rate = len(took) / seconds_in_all
        result.cpu = (_cpu(server) - cpu) / len(took)
        result.held = (_memory(server) - before) / load.sessions
        said = upstream.get("/stub/answers")
        result.most = said["most"]
        for turn, seconds, own, name in took:
            (result.own_next if turn else result.own_first).append(own)
            (result.turns[turn - 1] if turn else result.first).append(seconds - said["seconds"][name])
        return result


def _memory(server: Process) -> int:
    lines = Path(f"/proc/{server.running.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def _cpu(server: Process) -> float:
    """CPU seconds so far."""
    fields = Path(f"/proc/{server.running.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def page(studies: Sequence[Measured], tokenizer: Path, warning: str | None) -> str:
    """All measurements, as Markdown."""
    head = heading(tokenizer, warning, title="What the gateway adds to a request", command="make bench-gateway")
    parts = [head, "## How to read the table", "", *(f"- {line}" for line in METHOD), ""]
    titles = (
        *("tokens", "sessions", "in flight", "calls/s", "first: added", "p99", "own clock", "p99"),
        *("next: added", "p99", "own clock", "p99"),
        *("CPU ms", "MB a session"),
    )
    rows = [
        (
            f"{one.load.tokens:,}",
            one.load.sessions,
            one.most,
            f"{one.rate:.0f}",
            *_middle_and_tail(one.first),
            *_middle_and_tail(one.own_first),
            *_middle_and_tail(one.next),
            *_middle_and_tail(one.own_next),
            f"{one.cpu * 1000:.1f}",
            f"{one.held / (1 << 20):.2f}",
        )
        for one in studies
    ]
    parts += ["## Added to a request, in ms (median, and the slowest of a hundred)", "", table(titles, rows), ""]
    return "\n".join([*parts, *_growth(studies)])


def by_api(tokenizer: Path, load: Load, rounds: int) -> Sequence[str]:
    """What each API adds, as lines of the page: the same conversations, the APIs one after the other in rounds."""
    added: dict[str, Measured] = {}
    for _ in range(rounds):
        for api in APIS:
            result = measured(replace(load, api=api), tokenizer)
            whole = added.setdefault(api, Measured(result.load, turns=[]))
            whole.own_first += result.own_first
            whole.own_next += result.own_next
            whole.turns += result.turns
            whole.cpu += result.cpu / rounds
    chat = added["chat"]
    rows = []
    for api, each in added.items():
        clocks = [statistics.median(values) * 1000 for values in (each.own_first, each.own_next)]
        more = clocks[1] - statistics.median(chat.own_next) * 1000
        wall = statistics.median(each.next) * 1000
        rows.append((api, *(f"{value:.2f}" for value in (*clocks, wall, each.cpu * 1000)), f"{more:+.2f}"))
    titles = ("API", "first: own clock", "next: own clock", "next: added", "CPU ms", "own clock, more than chat")
    head = f"## By API, {load.tokens:,} tokens, one in flight, in ms (median)"
    return [head, "", table(titles, rows), ""]


def _middle_and_tail(values: Sequence[float]) -> tuple[str, str]:
    ranked = sorted(values)
    tail = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    return f"{statistics.median(ranked) * 1000:.1f}", f"{tail * 1000:.1f}"


def _growth(studies: Sequence[Measured]) -> list[str]:
    """How the cost grows with the turns of a session."""
    longest = max(studies, key=lambda one: one.load.turns)
    if longest.load.turns < 20:
        return []
    spans = [(1, 5), (20, 25), (longest.load.turns - 5, longest.load.turns)]
    rows = []
    for start, end in spans:
        values = [one for turn in longest.turns[start - 1 : end - 1] for one in turn]
        rows.append((f"{start} to {end - 1}", f"{statistics.median(values) * 1000:.1f}"))
    return ["## By the number of the turn, one in flight, in ms", "", table(("turn", "added, median"), rows), ""]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute; not written to GATEWAY.md")
    parser.add_argument("--tokenizer", type=Path, default=TOY, metavar="DIR", help="[default: the toy one]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="[default: benchmarks/GATEWAY.md]")
    asked = parser.parse_args(argv)
    quick = ROOT / "build" / "bench" / "GATEWAY.md"
    output = asked.output or (quick if asked.quick else Path(__file__).with_name("GATEWAY.md"))
    output.parent.mkdir(parents=True, exist_ok=True)
    warning, studies = busy(), []
    for load in QUICK if asked.quick else FULL:
        studies.append(measured(load, asked.tokenizer))
        print(page(studies[-1:], asked.tokenizer, warning).splitlines()[-4:], file=sys.stderr, flush=True)
        output.write_text(page(studies, asked.tokenizer, warning), encoding="utf-8")
    each = (replace(EACH, sessions=6), 1) if asked.quick else (EACH, ROUNDS)
    compared = "\n".join(by_api(asked.tokenizer, *each))
    print(compared, file=sys.stderr)
    output.write_text(page(studies, asked.tokenizer, warning) + "\n" + compared, encoding="utf-8")
    print(f"written to {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
