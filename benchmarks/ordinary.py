"""Ordinary logs: what each further row costs a scan, beside one plain encode of its conversation.

`python -m benchmarks.ordinary LOG TOKENIZER ROWS SCRATCH` measures one kind of log and prints JSON.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from benchmarks import measure
from benchmarks.floors import floors
from benchmarks.stages import REST, ROW_STAGES, Clock, wrap
from benchmarks.tables import spread, table

if TYPE_CHECKING:
    from tito_audit.record.finding import Result

__all__ = ["LOGS", "Cost", "cost_of", "ordinary_section", "ordinary_study"]

Row = dict[str, Any]
END = "<|im_end|>"
_WARM = 4
"""The first one in so many rows are not measured: start-up and all that a log's first rows pay for."""
_SCANS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """A further row of one log."""

    log: str
    ids: float
    """Of its conversation, prompts counted once."""
    scan: float
    """CPU seconds."""
    encode: float
    """CPU seconds of one plain `tokenizers` encode of the conversation."""
    calls: float
    """Calls of Python functions."""
    findings: float
    stages: dict[str, float]
    """CPU seconds of the scan by stage, with clocks around its functions."""
    libraries: float | None
    """CPU seconds of the libraries alone: reading, rendering, encoding, comparing. None for recorded rollouts."""


class _Writer:
    """A tokenizer and its template, and what a sampler with them would log."""

    def __init__(self, folder: str) -> None:
        from tito_audit.render.renderer import make_renderer
        from tito_audit.tokens.load import load_tokenizer

        self._tokenizer = load_tokenizer(folder)
        self._renderer = make_renderer(self._tokenizer)
        self._dice = random.Random(7)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    def prompt(self, messages: list[Row], opens: bool = True) -> str:
        from tito_audit.record.message import as_messages

        return self._renderer.render(as_messages(messages, "messages"), add_generation_prompt=opens)

    def logprobs(self, count: int) -> list[float]:
        return [-round(self._dice.random() ** 4 * 3, 4) - 0.0001 for _ in range(count)]

    def call(self, prompt: list[int], sampled: list[int]) -> Row:
        return {
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": self.logprobs(len(sampled)),
        }

    def rendered_calls(self, messages: list[Row]) -> Row:
        """Each answer as a call whose prompt the template writes."""
        calls = [
            self.call(self.ids(self.prompt(messages[:number])), self.ids(message["content"] + END))
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return {"messages": messages, "calls": calls}

    def growing_calls(self, messages: list[Row], spelled: bool = False) -> Row:
        """Each answer as a call whose prompt repeats all text before it; `spelled`: sampled in other tokens."""
        calls, seen = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                seen += ("\n" if number else "") + self.prompt([message])
                continue
            answer = message["content"] + END
            sampled = self.ids(answer)
            if spelled:
                head, word = answer.partition("Answer")[0], "Answer"
                sampled = [
                    *self.ids(head),
                    *self.ids(word[:3]),
                    *self.ids(word[3:]),
                    *self.ids(answer[len(head + word) :]),
                ]
            calls.append(self.call(self.ids(seen), sampled))
            seen += answer
        return {"messages": messages, "calls": calls}

    def training_row(self, messages: list[Row]) -> Row:
        """Ids, mask and logprobs as they should be."""
        ids = self.ids(self.prompt(messages, opens=False))
        header, (end,) = self.ids("assistant\n"), self.ids(END)
        mask, inside = [0] * len(ids), False
        for at, token in enumerate(ids):
            mask[at] = int(inside)
            if inside and token == end:
                inside = False
            elif ids[max(0, at + 1 - len(header)) : at + 1] == header:
                inside = True
        values = [value if trained else 0.0 for value, trained in zip(self.logprobs(len(ids)), mask, strict=True)]
        return {"messages": messages, "token_ids": ids, "loss_mask": mask, "logprobs": values}


def _conversation(number: int, turns: int, words: int, reasoning: bool = False) -> list[Row]:
    messages = []
    for turn in range(turns):
        question = f"Question {turn} of row {number}, please. " * words
        answer = f"Answer {turn * 31 + number} and a bit more. " * words
        thought = f"<think>\nThey ask for {turn} in {number}.\n</think>\n\n" if reasoning else ""
        messages += [
            {"role": "user", "content": question.strip()},
            {"role": "assistant", "content": thought + answer.strip()},
        ]
    return messages


def _without_messages(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "messages"}


@cache
def _recorded(model: str) -> list[Row]:
    """Rollouts that a model really sampled, as they came and re-tokenized; [] if they are not at hand."""
    files = sorted((measure.SHARED / "rollouts" / model).glob("*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.open(file)]


def _rows_of(ids: int) -> Callable[[_Writer, int], Row]:
    turns = min(ids // 100, 30)
    return lambda writer, number: writer.training_row(_conversation(number, turns, ids // (23 * turns)))


def _rollouts_of(model: str) -> Callable[[_Writer, int], Row]:
    return lambda _writer, number: _recorded(model)[number]


LOGS: dict[str, tuple[str, Callable[[_Writer, int], Row]]] = {
    "clean": ("qwen2.5-coder", lambda writer, number: writer.rendered_calls(_conversation(number, 10, 16))),
    "notes": ("qwen3", lambda writer, number: writer.rendered_calls(_conversation(number, 10, 16))),
    "reasoning": ("qwen3", lambda writer, number: writer.growing_calls(_conversation(number, 3, 8, True))),
    "drift": ("qwen3", lambda writer, number: writer.growing_calls(_conversation(number, 3, 16), spelled=True)),
    "rows": ("qwen3", lambda writer, number: writer.training_row(_conversation(number, 3, 6))),
    "bare rows": (
        "qwen3",
        lambda writer, number: _without_messages(writer.training_row(_conversation(number, 3, 6))),
    ),
    **{f"rows of {ids:,} ids": ("qwen3", _rows_of(ids)) for ids in (300, 3_000, 30_000)},
    **{f"rollouts of {model}": (model, _rollouts_of(model)) for model in ("gemma-3", "smollm2", "qwen2.5-coder")},
}
"""By name, the tokenizer that a log needs, and how its rows are written."""
_MOST_IDS = 3_000_000
"""A log of long rows has fewer rows."""


def _conversation_ids(row: Row) -> list[int]:
    """The ids of a whole conversation, prompts counted once."""
    calls = row.get("calls")
    return [*calls[-1]["prompt_token_ids"], *calls[-1]["generation_token_ids"]] if calls else row["token_ids"]


def cost_of(log: str, folder: str, rows: int, scratch: Path) -> Cost:
    """What a row after the first ones of a log costs, in a process that has scanned the log before."""
    from tokenizers import Tokenizer

    from tito_audit.run.scan import Scan
    from tito_audit.settings.model import Settings

    writer, settings = _Writer(folder), Settings(tokenizer=folder, encoder="fastokens", jobs=1)
    written: list[Row] = []
    left = _MOST_IDS
    while len(written) < rows and left > 0:
        try:
            written.append(LOGS[log][1](writer, len(written)))
        except IndexError:  # a recorded log has no more
            break
        left -= len(_conversation_ids(written[-1]))
    rows = len(written)
    path = scratch / f"{log}-{rows}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")

    def further_rows() -> Iterator[Result]:
        """The results after the first ones of a scan."""
        results = iter(Scan([str(path)], settings))
        for _ in range(rows // _WARM):
            next(results)
        return results

    for _ in further_rows():  # pays for what is computed once
        pass
    scans = []
    for _ in range(_SCANS):
        results = further_rows()
        begin = time.process_time()
        counted = sum(1 for _ in results)
        scans.append((time.process_time() - begin) / counted)
    whole = [_conversation_ids(row) for row in written]
    reference = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    texts = [reference.decode(ids, skip_special_tokens=False) for ids in whole]
    begin = time.process_time()
    for text in texts:
        reference.encode(text, add_special_tokens=False)
    encode = (time.process_time() - begin) / rows
    calls, findings = 0, 0

    def count(_frame: FrameType, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "call"

    results = further_rows()
    sys.setprofile(count)
    try:
        for result in results:
            findings += sum(finding.times for finding in result.findings)
    finally:
        sys.setprofile(None)
    return Cost(
        log,
        ids=sum(map(len, whole)) / rows,
        scan=statistics.median(scans),
        encode=encode,
        calls=calls / counted,
        findings=findings / counted,
        stages=_stages(further_rows),
        libraries=None if log.startswith("rollouts") else sum(floors(path, Path(folder)).values()) / rows,
    )


def _stages(further_rows: Callable[[], Iterator[Result]]) -> dict[str, float]:
    """CPU seconds of a row by stage."""
    clock = Clock()
    unwrap = wrap(clock)
    try:
        results = further_rows()
        clock.switch(REST)
        clock.spent.clear()
        counted = sum(1 for _ in results)
        clock.switch(REST)
    finally:
        unwrap()
    return {stage: clock.spent[stage] / counted for stage in ROW_STAGES}


def ordinary_study(rows: int, rounds: int, scratch: Path, say: Callable[[str], None]) -> dict[str, list[Cost]]:
    """Each log in a process of its own, round by round; logs whose tokenizer is not here are left out."""
    scratch.mkdir(parents=True, exist_ok=True)
    costs: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        for log, (tokenizer, _) in LOGS.items():
            folder = measure.tokenizer_folder(tokenizer)
            if folder == measure.TOY or (log.startswith("rollouts") and not _recorded(tokenizer)):
                continue
            command = [sys.executable, "-m", "benchmarks.ordinary", log, str(folder), str(rows), str(scratch)]
            printed, *_ = measure.run(command)
            costs.setdefault(log, []).append(Cost(**json.loads(printed)))
            say(f"{log}: {1e3 * costs[log][-1].scan:.2f} ms a row")
    return costs


def ordinary_section(costs: dict[str, list[Cost]]) -> str:
    """The first table: what users have."""
    head = (
        "log",
        "ids a row",
        "findings a row",
        "scan, ms",
        "one encode, ms",
        "times one encode",
        "function calls",
    )
    rows: list[Sequence[object]] = []
    for log, rounds in costs.items():
        first = rounds[0]
        rows.append(
            (
                log,
                f"{first.ids:,.0f}",
                f"{first.findings:.1f}",
                spread([1e3 * cost.scan for cost in rounds], 2),
                spread([1e3 * cost.encode for cost in rounds], 2),
                spread([cost.encode / cost.scan for cost in rounds], 2),
                f"{statistics.median(cost.calls for cost in rounds):,.0f}",
            )
        )
    stages = [
        (log, *(_microseconds(cost.stages[stage] for cost in rounds) for stage in ROW_STAGES), _libraries(rounds))
        for log, rounds in costs.items()
    ]
    lines = [
        "## Ordinary logs",
        "",
        table(head, rows) if rows else "No real tokenizer is here, so they are left out.",
        "",
        "- CPU time of a row in one process, from the second quarter of the log on, so start-up does not count. "
        "*Times one encode*: one plain `tokenizers` encode of the conversation in the same process "
        "takes so many times the scan's time; above 1, the scan is faster than encoding the text once.",
        "- clean, notes: ten calls a row with recorded prompts. reasoning: three calls whose prompts keep the "
        "sampled reasoning. drift: three calls whose answers come back in other tokens. rows: ids, mask, logprobs "
        "and messages. bare rows: the same without messages. rollouts: what real models sampled, half of it with "
        "prompts that were re-tokenized.",
        "",
        "Where the time of a row goes, in CPU µs, with clocks around functions, which cost some time themselves:",
        "",
        table(("log", *ROW_STAGES, "libraries alone"), stages) if stages else "",
        "",
        "- *libraries alone*: orjson on the line, minijinja and fastokens once on the conversation (not for bare "
        "rows), numpy's comparison of the ids and of each prompt with what precedes it.",
        "",
    ]
    return "\n".join(lines)


def _libraries(rounds: Sequence[Cost]) -> str:
    measured = [cost.libraries for cost in rounds if cost.libraries is not None]
    return _microseconds(measured) if measured else ""


def _microseconds(seconds: Iterable[float]) -> str:
    return f"{1e6 * statistics.median(seconds):,.0f}"


if __name__ == "__main__":
    json.dump(asdict(cost_of(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))), sys.stdout)
