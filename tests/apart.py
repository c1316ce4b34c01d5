"""Calls of recorded conversations, each written as a row of its own, as servers, gateways and captures do.

Nothing here reads a log: what the command must find in the rows is what it finds in the whole conversations.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.command import run, written

__all__ = [
    "FORMS",
    "MODELS",
    "SHARED",
    "Call",
    "Form",
    "Found",
    "Placed",
    "Wire",
    "calls_of",
    "event",
    "found_in",
    "generic",
    "places_of",
    "recorded",
    "report_of",
    "spread",
    "whole",
]

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = ("smollm2", "gemma-3", "qwen2.5-coder")
SAID = ("messages", "tools")

Wire = dict[str, Any]
Conversation = Mapping[str, Any]
Found = dict[int, Counter[tuple[object, ...]]]
"""What is found in each conversation, by its number."""
Placed = Mapping[tuple[str, int], tuple[int, int]]
"""The conversation and the turn that is written at each (file, row)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a conversation."""

    conversation: int
    turn: int
    sent: Sequence[Wire]
    """() if the log has no messages; so it is with the answer."""
    answer: Wire | None
    tools: Sequence[Wire] | None
    record: Mapping[str, Any]
    """As it is recorded: `prompt_token_ids`, `generation_token_ids`, `generation_log_probs`, …"""

    @property
    def name(self) -> str:
        """The conversation as rows name it."""
        return f"conversation-{self.conversation}"

    @property
    def prompt(self) -> list[int]:
        """The ids of its prompt."""
        return list(self.record["prompt_token_ids"])

    @property
    def sampled(self) -> list[int]:
        """The ids that were sampled."""
        return list(self.record["generation_token_ids"])

    @property
    def seen(self) -> list[int]:
        """What a call that continues it begins with."""
        return self.prompt + self.sampled


@cache
def recorded(model: str) -> tuple[Wire, ...]:
    """The recorded conversations of a model, those that sent ids before those that sent messages."""
    logs = (SHARED / "rollouts" / model / f"{mode}.jsonl.gz" for mode in ("tito", "retok"))
    return tuple(json.loads(line) for log in logs for line in gzip.decompress(log.read_bytes()).splitlines())


def calls_of(conversations: Iterable[Conversation]) -> list[Call]:
    """All calls, conversation by conversation; the k-th answer among the messages is that of the k-th call."""
    calls = []
    for number, conversation in enumerate(conversations):
        messages = conversation.get("messages") or []
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, record in enumerate(conversation["calls"]):
            sent = messages[: answers[turn]] if messages else ()
            answer = messages[answers[turn]] if messages else None
            calls.append(Call(number, turn, sent, answer, conversation.get("tools"), record))
    return calls


# How a call looks in the row that holds it


def _scores(call: Call) -> list[Wire]:
    return [{"token": "", "logprob": value, "bytes": []} for value in call.record["generation_log_probs"]]


def _request(call: Call) -> Wire:
    return {"messages": list(call.sent), **({"tools": call.tools} if call.tools else {})}


def _chat_answer(call: Call) -> Wire:
    choice = {
        "index": 0,
        "message": call.answer,
        "token_ids": call.sampled,
        "logprobs": {"content": _scores(call)},
        "finish_reason": call.record["finish_reason"],
    }
    return {"object": "chat.completion", "choices": [choice], "prompt_token_ids": call.prompt}


def generic(call: Call) -> Wire:
    """Generic columns with the messages up to the answer."""
    assert call.answer is not None
    return {"messages": [*call.sent, call.answer], "tools": call.tools, **call.record}


def ids_only(call: Call) -> Wire:
    """Generic columns without messages."""
    return {name: call.record[name] for name in call.record if name not in ("text", "finish_reason")}


def chat(call: Call) -> Wire:
    """A request and vLLM's answer, with `return_token_ids`."""
    return {"request": _request(call) | {"return_token_ids": True}, "response": _chat_answer(call)}


def completions(call: Call) -> Wire:
    """A prompt of ids and vLLM's answer to it."""
    record = call.record
    scores = {"tokens": [""] * len(call.sampled), "token_logprobs": record["generation_log_probs"]}
    choice = {"index": 0, "text": record["text"], "token_ids": call.sampled, "logprobs": scores}
    choice |= {"finish_reason": record["finish_reason"], "prompt_token_ids": call.prompt}
    return {"request": {"prompt": call.prompt}, "response": {"object": "text_completion", "choices": [choice]}}


def sglang(call: Call) -> Wire:
    """`/generate` of SGLang: ids in, ids and triples out."""
    triples = zip(call.record["generation_log_probs"], call.sampled, strict=True)
    meta = {
        "finish_reason": {"type": call.record["finish_reason"]},
        "prompt_tokens": len(call.prompt),
        "completion_tokens": len(call.sampled),
        "output_token_logprobs": [[value, token, None] for value, token in triples],
    }
    answer = {"text": call.record["text"], "output_ids": call.sampled, "meta_info": meta}
    return {"request": {"input_ids": call.prompt}, "response": answer}


def gateway(call: Call) -> Wire:
    """A trace of rLLM's gateway, which numbers each call."""
    return {
        "trace_id": f"trace-{call.conversation}-{call.turn}",
        "messages": list(call.sent),
        "raw_request": {"tools": call.tools},
        "response_message": call.answer,
        "prompt_token_ids": call.prompt,
        "completion_token_ids": call.sampled,
        "logprobs": call.record["generation_log_probs"],
        "finish_reason": call.record["finish_reason"],
    }


def capture(call: Call) -> Wire:
    """A line of NeMo-Gym's token capture."""
    columns = ids_only(call)
    return {"model_call_id": f"call-{call.conversation}-{call.turn}", "model": "", "output_items": [], **columns}


def event(call: Call) -> Wire:
    """A model request among Agent Lightning's events, which name their rollout."""
    data = {"request": _request(call), "response": _chat_answer(call), "http_status": 200, "status": "ok"}
    return {"event_type": "model_request", "rollout_id": call.name, "attempt_id": "a-0", "data": data}


def provider(call: Call) -> Wire:
    """A call of a token-in, token-out provider with its messages."""
    assert call.answer is not None
    record = call.record
    row = {"input_ids": call.prompt, "output_ids": call.sampled, "logprobs": record["generation_log_probs"]}
    row |= {"finish_reason": record["finish_reason"], "text": record["text"]}
    return {**row, "messages": [*call.sent, call.answer], "tools": call.tools}


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write a call as a row."""

    row: Callable[[Call], Wire]
    lacks: tuple[str, ...] = ()
    """What of a conversation its rows cannot hold."""
    key: str | None = None
    """The column by which its rows always name their conversation."""

    @property
    def name(self) -> str:
        """As tests call it."""
        return self.row.__name__

    @property
    def has_messages(self) -> bool:
        """Whether its rows say what was sent and answered."""
        return "messages" not in self.lacks


FORMS = (
    Form(generic),
    Form(chat),
    Form(gateway, lacks=("text",)),
    Form(event, lacks=("text",), key="rollout_id"),
    Form(provider),
    Form(completions, lacks=SAID),
    Form(sglang, lacks=SAID),
    Form(ids_only, lacks=(*SAID, "text", "finish_reason")),
    Form(capture, lacks=(*SAID, "text", "finish_reason")),
)


# Logs of whole conversations and of single calls


def whole(conversations: Iterable[Conversation], lacks: Sequence[str], path: Path) -> Path:
    """The conversations as rows with all their calls, without what is lacking."""

    def row(conversation: Conversation) -> Wire:
        texts = {name: conversation[name] for name in SAID if conversation.get(name) and name not in lacks}
        calls = [{key: value for key, value in call.items() if key not in lacks} for call in conversation["calls"]]
        return {**texts, "calls": calls}

    return written(path, map(row, conversations))


def spread(
    rows: Sequence[tuple[Call, Wire]], folder: Path, seed: int, *, files: int = 3, kind: str = "jsonl.gz"
) -> tuple[list[Path], Placed]:
    """Files with the rows in any order, and which call each row is."""
    rng = random.Random(seed)
    shuffled = rng.sample(list(rows), len(rows))
    dealt: list[list[tuple[Call, Wire]]] = [[] for _ in range(files)]
    for number, pair in enumerate(shuffled):
        # Each file has a row; the others go anywhere.
        dealt[number if number < files else rng.randrange(files)].append(pair)
    logs = [folder / f"calls-{number}.{kind}" for number in range(files)]
    for log, part in zip(logs, dealt, strict=True):
        _write(log, [row for _, row in part])
    return logs, places_of(logs, [[call for call, _ in part] for part in dealt])


def places_of(logs: Sequence[Path], calls: Sequence[Sequence[Call]]) -> Placed:
    """Which call is at which (file, row)."""
    return {
        (str(log), row): (call.conversation, call.turn)
        for log, part in zip(logs, calls, strict=True)
        for row, call in enumerate(part)
    }


def _write(log: Path, rows: Sequence[Wire]) -> None:
    if log.suffix == ".parquet":
        # Messages of several shapes do not fit into one column of Arrow, so tables hold them as JSON.
        texts = [{**row, **{name: json.dumps(row[name]) for name in SAID if row.get(name)}} for row in rows]
        pq.write_table(pa.Table.from_pylist(texts), log, row_group_size=7)
        return
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    log.write_bytes(gzip.compress(data, 1) if log.suffix == ".gz" else data)


# What the command finds in them


def report_of(*arguments: object) -> Wire:
    """The JSON report of a scan."""
    code, out, err = run("scan", *arguments, "-f", "json", "--no-config")
    assert code in (0, 1), err
    report: Wire = json.loads(out)
    return report


def found_in(report: Wire, placed: Placed, left_out: Collection[int] = (), *, exactly: bool = True) -> Found:
    """The findings of a report, conversation by conversation, without those that are left out.

    With `exactly`, a finding stands at the row of the call that it is about; else at any row of its conversation.
    """
    findings: Found = {}
    for finding in report["findings"]:
        conversation, turn = placed[finding["file"], finding["row"]]
        if conversation in left_out:
            continue
        finding_turn = finding["turn"] or 0
        if exactly and finding["turn"] is not None:
            assert turn == finding_turn, (
                f"{finding['code']} of turn {finding_turn} is reported at the row of turn {turn}"
            )
        findings.setdefault(conversation, Counter())[_facts(finding)] += 1
    return findings


def _facts(finding: Wire) -> tuple[object, ...]:
    """All that a finding says, but for its place and what follows from it."""
    sides = (json.dumps(finding[side]) for side in ("recorded", "canonical"))
    names = ("code", "severity", "cause", "where", "start", "end", "message")
    return (finding["turn"] or 0, *(finding[name] for name in names), *sides)
