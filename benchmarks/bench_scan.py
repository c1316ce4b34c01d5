"""How fast a scan is, against what a framework would do to check the same log: `make bench`.

The frameworks' way renders and encodes the whole history anew for every turn with transformers
(`apply_chat_template`, then a full encode) and compares the ids with those recorded. It finds that a prompt
differs, not where, why, or in what was sampled. Its log is read before its clock starts; a scan's reading of
the log counts. Both see the same rollouts, in the same process, taking turns; loading tokenizers is apart.

Rollouts are those of `shared/rollouts` beside the checkout where there is such a folder, else the example
logs, repeated. A corpus of long conversations is built on top of them, since real ones are short.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # every tokenizer is a folder here
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
ROUNDS = 5
REPEATED = 60
LONG_ROLLOUTS, LONG_TURNS, LONG_WORDS = 6, 40, 400
_PACKAGES = ("tito-audit", "tokenizers", "transformers", "jinja2", "numpy", "orjson")


def main() -> None:
    """Print the machine, the versions and, for each corpus, both ways and their ratio."""
    print(f"{_machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in _PACKAGES))
    print(f"medians of {ROUNDS} alternating rounds in one process (slowest and fastest round in brackets)")
    with tempfile.TemporaryDirectory() as scratch:
        for name, log, tokenizer in _corpora(Path(scratch)):
            _compare(name, log, tokenizer)


def _corpora(scratch: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, log and tokenizer of each corpus."""
    found = sorted(path for path in (SHARED / "rollouts").glob("*") if path.is_dir())
    for folder in found:
        if (tokenizer := SHARED / "tokenizers" / folder.name).is_dir():
            yield folder.name, folder, tokenizer
    if not found:
        log = scratch / "examples.jsonl"
        log.write_bytes((ROOT / "fixtures" / "formats" / "nemo_gym.jsonl").read_bytes() * REPEATED)
        yield "example logs", log, TOY
    log = scratch / "long.jsonl"
    real = sorted((SHARED / "tokenizers").glob("qwen*"))
    tokenizer = real[0] if real else TOY
    log.write_text("".join(json.dumps(row) + "\n" for row in _long_rows(tokenizer)), encoding="utf-8")
    yield f"{LONG_TURNS} turns a rollout, built ({tokenizer.name})", log, tokenizer


def _long_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Conversations whose every prompt is what the template writes."""
    from tito_audit import load_renderer
    from tito_audit.record.message import as_message
    from tito_audit.tokens.load import load_tokenizer

    renderer, tokenizer = load_renderer(str(folder)), load_tokenizer(str(folder))
    texts = sorted((ROOT / "fixtures" / "tokenizers" / "text").glob("*.txt"))
    words = " ".join(path.read_text(encoding="utf-8") for path in texts).split(" ")
    for seed in range(LONG_ROLLOUTS):
        wires: list[dict[str, Any]] = []
        calls = []
        for turn in range(LONG_TURNS):
            at = (seed * 7919 + turn * 401) % (len(words) - LONG_WORDS)
            wires.append({"role": "user", "content": " ".join(words[at : at + LONG_WORDS // 2])})
            answer = " ".join(words[at + LONG_WORDS // 2 : at + LONG_WORDS]).strip()
            messages = [as_message(wire, "row") for wire in wires]
            prompt = renderer.render(messages, add_generation_prompt=True)
            ids = [*tokenizer.encode(answer).tolist(), *sorted(tokenizer.eos_ids)[:1]]
            calls.append({"prompt_token_ids": tokenizer.encode(prompt).tolist(), "generation_token_ids": ids})
            wires.append({"role": "assistant", "content": answer})
        yield {"messages": wires, "calls": calls}


def _compare(name: str, log: Path, folder: Path) -> None:
    from tito_audit import Settings, load_renderer, read_rollouts, scan_rollouts

    with _timed() as ours_starts:
        load_renderer(str(folder))
    with _timed() as theirs_starts:
        oracle = _oracle(folder)
    jobs = [_jobs(rollout) for rollout in read_rollouts(log)]
    settings = Settings(tokenizer=str(folder))
    ours, theirs = [], []
    for number in range(ROUNDS + 1):
        scan = scan_rollouts(log, settings)
        for _ in scan:
            pass
        with _timed() as took:
            different, refused = _frameworks_way(oracle, jobs)
        if number:  # the first round warms both up
            ours.append(scan.summary.seconds)
            theirs.append(took[0])
    summary = scan.summary
    turns = sum(len(one) for one in jobs)
    print(
        f"\n{name}: {summary.rollouts} rollouts, {turns} turns with a prompt to render, {summary.tokens:,} tokens "
        f"({summary.generated_tokens:,} generated)"
    )
    _line("tito-audit scan", ours, summary.tokens, ours_starts[0])
    _line("render and encode every turn", theirs, summary.tokens, theirs_starts[0])
    ratio = statistics.median(theirs) / statistics.median(ours)
    found = sum(count.error + count.warning + count.note for count in summary.findings.values())
    print(
        f"  the scan takes 1/{ratio:.2f} of the time"
        if ratio >= 1
        else f"  the scan takes {1 / ratio:.2f}x the time"
    )
    print(f"  found: {found} findings with place and cause; {different} prompts that differ, {refused} refused")


def _line(what: str, seconds: list[float], tokens: int, start: float) -> None:
    median = statistics.median(seconds)
    print(
        f"  {what:<30}{tokens / median:>10,.0f} tokens/s   {median:.3f} s "
        f"[{min(seconds):.3f} to {max(seconds):.3f}]   start-up {start:.2f} s"
    )


def _oracle(folder: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


def _jobs(rollout: Any) -> list[tuple[list[dict[str, Any]], Any, list[int]]]:
    """Messages, tools and recorded prompt of each turn whose prompt can be rendered."""
    chat = [_parsed(message.wire) for message in rollout.messages]
    tools = json.loads(json.dumps(list(rollout.tools))) or None
    return [
        (chat[: turn.message_index], tools, turn.prompt_ids.tolist())
        for turn in rollout.turns
        if turn.message_index and turn.prompt_ids is not None
    ]


def _parsed(wire: Mapping[str, Any]) -> dict[str, Any]:
    """The message as servers give it to a template: arguments of tool calls as objects."""
    message: dict[str, Any] = json.loads(json.dumps(dict(wire)))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                continue
    return message


def _frameworks_way(oracle: Any, jobs: list[list[tuple[list[dict[str, Any]], Any, list[int]]]]) -> tuple[int, int]:
    """Prompts that differ from what the template writes, and those that it refuses to write."""
    different = refused = 0
    for turns in jobs:
        for chat, tools, recorded in turns:
            try:
                text = oracle.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
            except Exception:  # a template raises what it likes
                refused += 1
                continue
            different += oracle.encode(text, add_special_tokens=False) != recorded
    return different, refused


@contextmanager
def _timed() -> Iterator[list[float]]:
    took: list[float] = []
    started = time.perf_counter()
    yield took
    took.append(time.perf_counter() - started)


def _machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ())
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {sys.platform}"


if __name__ == "__main__":
    main()
