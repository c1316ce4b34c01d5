"""What views and charts say of tokens that real models sampled, held to the logs themselves.

The oracle in this file reads the logs with the standard library, renders with jinja2 and encodes with
`tokenizers`. It shares no code with the audit, the bytes of tokens included.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
import tokenizers

from tests.tiers import some
from tito_audit.evidence.gather import gather
from tito_audit.record.finding import Where
from tito_audit.run.auditor import Loader
from tito_audit.run.check import check, explain_differences
from tito_audit.run.scan import read_rollouts
from tito_audit.settings.model import Settings
from tito_audit.viewer.measures import measure
from tito_audit.viewer.model import LOGPROB_EDGES, POSITION_EDGES, Measures, Swap, View, ViewSequence
from tito_audit.viewer.sequences import view_rollout

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = ("qwen2.5-coder", "gemma-3", "smollm2")
LOGS = some([(model, mode) for model in MODELS for mode in ("tito", "retok")], 2)
CUTS = ("TOK101", "TOK102", "TOK103")
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
    pytest.mark.parametrize(("model", "mode"), LOGS),
]


class Oracle:
    """A tokenizer and its chat template, without the audit."""

    def __init__(self, model: str) -> None:
        folder = SHARED / "tokenizers" / model
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        self._template = environment.from_string(config["chat_template"])
        self._bos = config.get("bos_token") or ""
        content = json.loads((folder / "tokenizer.json").read_text())
        self._spelled = byte_level() if content["decoder"]["type"] == "ByteLevel" else None
        self._added = {token["id"]: self._plain(token["content"]) for token in content["added_tokens"]}

    @cache  # noqa: B019
    def data(self, token: int) -> bytes:
        """The bytes that a token spells."""
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        if self._spelled is not None:
            return bytes(self._spelled[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return self._plain(piece)

    def is_added(self, token: int) -> bool:
        """Whether no text mixes across it."""
        return token in self._added

    def _plain(self, piece: str) -> bytes:
        return (piece if self._spelled is not None else piece.replace("▁", " ")).encode()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def rendered(self, row: dict[str, Any], count: int, *, opened: bool) -> str:
        """The template of the first messages, arguments of tool calls as objects."""
        messages = json.loads(json.dumps(row["messages"][:count]))
        for message in messages:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return self._template.render(
            messages=messages, tools=row["tools"], add_generation_prompt=opened, bos_token=self._bos
        )


def byte_level() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable Latin-1 stands for itself, the rest from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + at): byte for at, byte in enumerate(rest)}


@cache
def oracle(model: str) -> Oracle:
    return Oracle(model)


@cache
def rows(model: str, mode: str) -> list[dict[str, Any]]:
    with gzip.open(SHARED / "rollouts" / model / f"{mode}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class Said(NamedTuple):
    """What the audit says of one rollout: its view, and its counts where the rules CUTS alone tell of drift."""

    view: View
    measures: Measures


@cache
def observations(model: str, mode: str) -> list[Said]:
    engine, _ = Loader().load_auditor(Settings(tokenizer=str(SHARED / "tokenizers" / model)))
    out = []
    for rollout in read_rollouts(SHARED / "rollouts" / model / f"{mode}.jsonl.gz"):
        evidence = explain_differences(gather(rollout, engine.tokenizer, engine.renderer), engine.rules)
        findings, _ = check(evidence, engine.rules, engine.codes)
        cut = [finding for finding in findings if finding.code in CUTS]
        out.append(Said(view_rollout(evidence, findings), measure(evidence, cut)))
    assert len(out) == len(rows(model, mode))
    return out


def sequences(model: str, mode: str) -> Iterator[tuple[dict[str, Any], int, ViewSequence]]:
    """Every sequence of every view, with its row and turn."""
    for row, observed in zip(rows(model, mode), observations(model, mode), strict=True):
        assert observed.view.left_out == 0
        assert observed.view.messages == tuple(message["role"] for message in row["messages"])
        assert [(sequence.where, sequence.turn) for sequence in observed.view.sequences] == [
            (where, turn) for turn in range(len(row["calls"])) for where in (Where.PROMPT, Where.COMPLETION)
        ]
        for sequence in observed.view.sequences:
            assert sequence.turn is not None
            yield row, sequence.turn, sequence


def recorded(call: dict[str, Any], where: Where) -> list[int]:
    return call["prompt_token_ids" if where is Where.PROMPT else "generation_token_ids"]


def applied(ids: list[int], swaps: tuple[Swap, ...], wanted: Callable[[Swap], bool]) -> list[int]:
    """Recorded ids with what some swaps say stands in their place."""
    out, at = [], 0
    for swap in filter(wanted, swaps):
        assert swap.total == len(swap.ids)
        assert swap.before == swap.after == 0, "none of these logs drifts across a seam"
        out += [*ids[at : swap.start], *swap.ids]
        at = swap.end
    return out + ids[at:]


def test_tokens_bytes_and_logprobs_of_views_are_those_of_the_log(model: str, mode: str) -> None:
    for row, turn, sequence in sequences(model, mode):
        call = row["calls"][turn]
        ids = recorded(call, sequence.where)
        assert sequence.length == len(ids)
        for part in sequence.stretches:
            here = slice(part.start, part.start + len(part.ids))
            assert list(part.ids) == ids[here]
            assert part.data == tuple(oracle(model).data(token).hex() for token in part.ids)
            assert part.trained is None
            if sequence.where is Where.COMPLETION:
                assert part.logprobs == tuple(call["generation_log_probs"][here])
            else:
                assert part.logprobs is None


def test_what_stands_in_the_next_prompt_makes_an_answer_what_that_prompt_holds(model: str, mode: str) -> None:
    """Exactly the swaps of that name, applied to what was sampled, give what the next call was fed."""
    names = Counter[str]()
    for row, turn, sequence in sequences(model, mode):
        if sequence.where is not Where.COMPLETION or turn + 1 == len(row["calls"]):
            continue
        call, later = row["calls"][turn], row["calls"][turn + 1]["prompt_token_ids"]
        heard = applied(call["generation_token_ids"], sequence.swaps, lambda swap: swap.against == "next prompt")
        start = len(call["prompt_token_ids"])
        assert later[start : start + len(heard)] == heard, (row["id"], turn)
        names.update(swap.against for swap in sequence.swaps)
    assert (names["next prompt"] > 0) is (mode == "retok")


def test_what_was_seen_makes_a_prompt_what_the_call_before_it_saw_and_said(model: str, mode: str) -> None:
    broken = 0
    for row, turn, sequence in sequences(model, mode):
        if sequence.where is not Where.PROMPT:
            continue
        assert {swap.against for swap in sequence.swaps} <= {"what was seen"}
        if not turn:
            assert not sequence.swaps
            continue
        before, prompt = row["calls"][turn - 1], row["calls"][turn]["prompt_token_ids"]
        seen = before["prompt_token_ids"] + before["generation_token_ids"]
        assert applied(prompt, sequence.swaps, lambda _: True)[: len(seen)] == seen, (row["id"], turn)
        assert bool(sequence.swaps) is (prompt[: len(seen)] != seen)
        broken += bool(sequence.swaps)
    assert (broken > 0) is (mode == "retok")


def test_template_and_encoding_write_what_swaps_of_these_names_say(model: str, mode: str) -> None:
    """Where no later prompt holds an answer otherwise, all its swaps make it what its message is written as."""
    looked = 0
    for row, turn, sequence in sequences(model, mode):
        if sequence.where is not Where.COMPLETION or any(swap.against == "next prompt" for swap in sequence.swaps):
            continue
        call = row["calls"][turn]
        if model == "gemma-3" and "\ufffd" in call["text"]:
            continue  # its decoder writes that character once for each broken byte
        index = [at for at, message in enumerate(row["messages"]) if message["role"] == "assistant"][turn]
        opened = oracle(model).rendered(row, index, opened=True)
        whole = oracle(model).rendered(row, index + 1, opened=False)
        assert whole.startswith(opened)
        written = oracle(model).encode(whole)
        ends = [0, *accumulate(len(oracle(model).data(token)) for token in written)]
        wanted = written[ends.index(len(opened.encode())) :]
        heard = applied(call["generation_token_ids"], sequence.swaps, lambda _: True)
        assert wanted[: len(heard)] == heard, (row["id"], turn)
        looked += bool(sequence.swaps)
    assert looked


def test_what_a_sequence_is_said_to_be_the_same_as_writes_the_same_tokens(model: str, mode: str) -> None:
    tokenizer, looked = oracle(model), {Where.PROMPT: 0, Where.COMPLETION: 0}
    for row, turn, sequence in sequences(model, mode):
        if not sequence.same_as:
            continue
        assert not sequence.swaps
        call = row["calls"][turn]
        ids = recorded(call, sequence.where)
        if sequence.where is Where.PROMPT:
            assert sequence.same_as == "template"
            index = [at for at, message in enumerate(row["messages"]) if message["role"] == "assistant"][turn]
            assert tokenizer.encode(tokenizer.rendered(row, index, opened=True)) == ids, (row["id"], turn)
        else:
            assert sequence.same_as == "re-encoding"
            whole = call["prompt_token_ids"] + ids
            start = max(at for at in range(len(whole) - len(ids)) if tokenizer.is_added(whole[at]))
            text = b"".join(map(tokenizer.data, whole[start:])).decode()
            assert tokenizer.encode(text) == whole[start:], (row["id"], turn)
        looked[sequence.where] += 1
    assert all(looked.values()), looked


# What lies between two ends that both spellings have, by hand.


def cuts(model: str, ids: list[int], again: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of `ids` that `again` spells with other tokens."""
    data = oracle(model).data
    ends = {end: at for at, end in enumerate(accumulate((len(data(token)) for token in ids), initial=0))}
    others = {end: at for at, end in enumerate(accumulate((len(data(token)) for token in again), initial=0))}
    for first, last in pairwise(sorted(ends.keys() & others.keys())):
        if ids[ends[first] : ends[last]] != again[others[first] : others[last]]:
            yield ends[first], ends[last]


def bins(edges: tuple[float, ...], value: float) -> int:
    return sum(edge <= value for edge in edges) - 1


def test_charts_count_what_the_log_holds(model: str, mode: str) -> None:
    """Of turns whose text lost no bytes, each token by turn, position and logprob, drifted or not."""
    turns, positions, logprobs = Counter[Any](), Counter[Any](), Counter[Any]()
    values: dict[bool, list[float]] = {True: [], False: []}
    measures, lost = Measures(), 0
    for row, observed in zip(rows(model, mode), observations(model, mode), strict=True):
        counts = [Counter[Any](), Counter[Any](), Counter[Any]()]
        by_off: dict[bool, list[float]] = {True: [], False: []}
        exact = True
        for turn, call in enumerate(row["calls"]):
            ids, stops = call["generation_token_ids"], row["sampling"]["stop_token_ids"]
            text = ids[:-1] if ids and ids[-1] in stops else ids
            exact &= b"".join(map(oracle(model).data, text)) == call["text"].encode()
            again = oracle(model).encode(call["text"])
            drifted = {at for start, end in cuts(model, text, again) for at in range(start, end)}
            for at, logprob in enumerate(call["generation_log_probs"]):
                off = at in drifted
                counts[0][turn, off] += 1
                counts[1][bins(POSITION_EDGES, len(call["prompt_token_ids"]) + at), off] += 1
                counts[2][bins(LOGPROB_EDGES, logprob), off] += 1
                by_off[off].append(logprob)
        if not exact:
            lost += 1
            continue
        measures.add(observed.measures)
        for total, count in zip((turns, positions, logprobs), counts, strict=True):
            total.update(count)
        for off, more in by_off.items():
            values[off] += more
    for chart, expected in zip(
        (measures.by_turn, measures.by_position, measures.by_logprob), (turns, positions, logprobs), strict=True
    ):
        pairs = {(at, off): number for at, pair in enumerate(states(chart)) for off, number in enumerate(pair)}
        assert {key: number for key, number in pairs.items() if number} == dict(expected)
    assert measures.without_logprob.sum() == 0
    assert lost < len(rows(model, mode)) / 5
    assert measures.roles == {"assistant": (sum(turns.values()), 0)}
    assert statistics.mean(values[True]) < statistics.mean(values[False]) - 1, "drift sits in improbable tokens"


def states(counts: Any) -> list[list[int]]:
    """Of each bin, tokens that did not drift and those that did."""
    return [[row[0], sum(row[1:])] for row in counts.tolist()]
