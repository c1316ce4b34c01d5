"""`python -m tests.truth.tokenizers`: logs of each of the seven tokenizers, scanned with each.

With its own tokenizer a log is clean. With another, what is said first is that it does not fit (REC007), and
little else is said. Where two write the same tokens for all rows, nothing can be told and nothing is said.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from .forms import write_rows
from .source import SHARED
from .tool import Said, scan

__all__ = ["NAMES", "Pair", "broken", "log_of", "pair", "writes_the_same"]

NAMES = ("qwen2.5-coder", "qwen3", "llama-3.1", "gemma-3", "deepseek-v3", "smollm2", "gpt-oss")
ENDS = {
    "qwen2.5-coder": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama-3.1": "<|eot_id|>",
    "gemma-3": "<end_of_turn>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "smollm2": "<|im_end|>",
    "gpt-oss": "",
}
ROWS = 20
OTHERS = 10
"""Findings that may stand beside the one of the whole log."""
Messages = list[dict[str, str]]
Json = dict[str, Any]

_ASKED = (
    "What is 17 * 23?",
    "Write a Python function that reverses a list.",
    "Translate 'good morning' into Japanese, French and Arabic.",
    "Which city is the capital of Australia?",
    "Give me three uses of a paper clip 📎.",
    "Fix the bug:\n```python\nfor i in range(10)\n    print(i)\n```",
    "Résumé or resume: which one is right?",
)
_SAID = (
    "17 * 23 is 391: 17 * 20 = 340, and 17 * 3 = 51.",
    "Here it is:\n\n```python\ndef reverse(items):\n    return items[::-1]\n```",
    "おはようございます, bonjour, صباح الخير.",
    "Canberra is the capital; Sydney is the largest city.",
    "1. Hold paper 📄\n2. Open a SIM tray\n3. Reset a router",
    "A colon is missing behind `range(10)`; the rest is fine.",
    "Both are used. “Résumé” keeps its accents more often in print.",
)


@dataclass(frozen=True)
class Pair:
    """What a scan said of the log of one tokenizer, read with another."""

    log: str
    read_with: str
    scanned: Said
    same: bool
    """Whether both write the same tokens for every row."""
    kin: bool
    """Whether the one decodes what the other wrote to the same text, so that templates alone differ."""


@cache
def _tokenizer(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json"))


@cache
def _config(name: str) -> Json:
    config: Json = json.loads((SHARED / "tokenizers" / name / "tokenizer_config.json").read_text())
    return config


def _refuse(message: str) -> None:
    raise ValueError(message)


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(_config(name)["chat_template"])


def rendered(name: str, messages: Messages, *, opened: bool) -> str:
    """The text of a conversation; `opened`: with the header of the next answer."""
    if name == "gpt-oss":
        return _harmony(messages, opened=opened)
    bos = _config(name).get("bos_token") or ""
    bos = bos["content"] if isinstance(bos, dict) else bos
    return _template(name).render(messages=messages, add_generation_prompt=opened, bos_token=bos)


def _harmony(messages: Messages, *, opened: bool) -> str:
    """The text of gpt-oss, by hand: its folder has no template."""
    parts = []
    for at, message in enumerate(messages):
        answer = message["role"] == "assistant"
        channel = "<|channel|>final" if answer else ""
        end = "<|return|>" if answer and at == len(messages) - 1 else "<|end|>"
        parts.append(f"<|start|>{message['role']}{channel}<|message|>{message['content']}{end}")
    return "".join(parts) + ("<|start|>assistant" if opened else "")


def conversations(seed: int = 7) -> list[Messages]:
    """Conversations of one to four turns, with a system prompt or without."""
    dice = random.Random(seed)
    drawn = []
    for number in range(ROWS):
        messages = [{"role": "system", "content": "You are a careful assistant."}] if number % 3 else []
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(_ASKED))
            messages.append({"role": "user", "content": _ASKED[at]})
            messages.append({"role": "assistant", "content": f"{_SAID[at]} ({number})"})
        drawn.append(messages)
    return drawn


def row(name: str, messages: Messages) -> Json:
    """A training row: every answer with its end token is trained."""
    text, dice = rendered(name, messages, opened=False), random.Random(len(messages))
    encoded = _tokenizer(name).encode(text, add_special_tokens=False)
    spans = list(_answers(name, messages, text))
    mask = [int(any(start <= at < end for start, end in spans)) for at, _ in encoded.offsets]
    values = [-round(dice.expovariate(1.5), 6) - 1e-6 if on else 0.0 for on in mask]
    return {"messages": messages, "token_ids": encoded.ids, "loss_mask": mask, "logprobs": values}


def _answers(name: str, messages: Messages, text: str) -> Iterator[tuple[int, int]]:
    """Where the answers stand in the text, from behind their headers to behind their ends."""
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            head = rendered(name, messages[:at], opened=True)
            assert text.startswith(head)
            body = text.index(message["content"], len(head)) + len(message["content"])
            end = ENDS[name] or ("<|return|>" if at == len(messages) - 1 else "<|end|>")
            assert text.startswith(end, body)
            yield len(head), body + len(end)


@cache
def log_of(name: str) -> list[Json]:
    """The rows of one tokenizer."""
    return [row(name, messages) for messages in conversations()]


def writes_the_same(log: str, other: str) -> bool:
    """Whether another tokenizer and its template write the rows as they are."""
    return all(
        here["token_ids"] == there["token_ids"] for here, there in zip(log_of(log), log_of(other), strict=True)
    )


def _reads_the_same(log: str, other: str) -> bool:
    """Whether another tokenizer decodes all rows to the texts that they were made of."""
    return all(
        _tokenizer(other).decode(record["token_ids"], skip_special_tokens=False)
        == _tokenizer(log).decode(record["token_ids"], skip_special_tokens=False)
        for record in log_of(log)
    )


def pair(log: str, read_with: str, folder: Path) -> Pair:
    """What a scan says of the log of one tokenizer, read with another."""
    path = folder / f"{log}.jsonl"
    write_rows(path, log_of(log))
    scanned = scan([path], read_with, folder / f"{log}-{read_with}.json")
    return Pair(log, read_with, scanned, writes_the_same(log, read_with), _reads_the_same(log, read_with))


def broken(reading: Pair) -> Iterator[str]:
    """What was said that is not right."""
    findings = reading.scanned.report["findings"]
    loud = [finding for finding in findings if finding["severity"] != "note"]
    first = findings[0] if findings else {"code": "nothing", "severity": ""}
    named = first["code"] == "REC007" and first["severity"] == "error"
    if reading.log == reading.read_with or reading.same:
        yield from (f"loud on its own log: {finding['code']} {finding['cause']}" for finding in loud)
        return
    if reading.kin and not any(finding["code"] == "REC007" for finding in findings):
        # Nothing but the template differs: its causes say so as well as REC007 does.
        yield from (f"not of the template: {finding['code']}" for finding in loud if finding["code"][:3] != "TPL")
        if not loud:
            yield "another template, and nothing said"
        return
    if not named:
        yield f"first is {first['severity']} {first['code']}, not error REC007"
    if reading.scanned.exit != 1:
        yield f"exit {reading.scanned.exit}"
    if len(findings) - named > OTHERS:
        yield f"{len(findings) - named} other findings"


def main() -> int:
    """Scan every log with every tokenizer; 1 when anything is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth.tokenizers", description=__doc__)
    parser.add_argument("--names", default=",".join(NAMES))
    names = parser.parse_args().names.split(",")
    if not (SHARED / "tokenizers").is_dir():
        sys.exit(f"no {SHARED / 'tokenizers'}: the real tokenizers are not beside this checkout")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for log in names:
            for read_with in names:
                reading = pair(log, read_with, Path(folder))
                faults = sorted(set(broken(reading)))
                wrong += bool(faults)
                kind = "own" if log == read_with else "same" if reading.same else "kin" if reading.kin else ""
                summary = f"{len(reading.scanned.report['findings'])} findings, exit {reading.scanned.exit}"
                print(f"{log:14}{read_with:14}{kind:5}{summary:26}{'; '.join(faults[:4]) or 'right'}", flush=True)
    print(f"{wrong} of {len(names) ** 2} pairs are not right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
