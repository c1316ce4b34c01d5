"""Rollouts built from a seed: what a benchmark scans, of any length, without a file to ship.

Conversations mix prose, code, JSON tool calls and results, Chinese and emoji. Prompts and answers are what the
template writes; one sampled token in 2,000 is then spelled by other tokens, as models do, and a share of the
rows gets a fault (a merge in the training row, a mask or logprobs that slid).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Shape", "rollouts", "write_jsonl", "write_parquet"]

ROOT = Path(__file__).resolve().parents[1]
NON_CANONICAL = 0.0005
_CHINESE = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经十三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形相全表间样与关各重新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者最立代想已通并提直题党程展五果料象员革位入常文总次品式活设及管特件长求老头基资边流路级少图山统接知较将组见计别她手角期根论运农指几九区强放决西被干做必战先回则任取据处队南给色光门即保治北造百规热领七海口东导器压志世金增争济阶油思术极交受联什认六共权收证改清己美再采转更单风切打白教速花带安场身车例真务具万每目至达走积示议声报斗完类八离华名确才科张信马节话米整空元况今集温传土许步群广石记需段研界拉林律叫且究观越织装影算低持音众书布复容儿须际商非验连断深难近矿千周委素技备半办青省列习响约支般史感劳便团往酸历市克何除消构府称太准精值号率族维划选标写存候毛亲快效斯院查江型眼王按格养易置派层片始却专状育厂京识适属圆包火住调满县局照参红细引听该铁价严"
_EMOJI = "🙂🚀🔥🎉🤖✅❌📦🧪💡🌍👩‍💻"
_TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command and return what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How long rollouts are and how many of them have a fault."""

    turns: int = 10
    words: int = 330
    """Words of a message, about."""
    faulty: float = 0.12
    seed: int = 0


def rollouts(folder: Path, shape: Shape, tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of about `tokens` tokens in all: messages, tools, token_ids, loss_mask, logprobs."""
    builder = _Builder(folder, shape)
    made = number = 0
    while made < tokens:
        row = builder.row(number)
        made += len(row["token_ids"])
        number += 1
        yield row


def write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """The number of tokens written, one row a line."""
    import orjson

    tokens = 0
    with path.open("wb") as out:
        for row in rows:
            out.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
            tokens += len(row["token_ids"])
    return tokens


def write_parquet(rows: Iterator[dict[str, Any]], path: Path, *, group: int = 256) -> int:
    """The number of tokens written; messages and tools as JSON strings, as most exports have them."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [
            ("id", pa.string()),
            ("messages", pa.string()),
            ("tools", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
        ]
    )
    tokens = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        held: list[dict[str, Any]] = []
        for row in rows:
            tokens += len(row["token_ids"])
            held.append({**row, "messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])})
            if len(held) == group:
                writer.write_table(pa.Table.from_pylist(held, schema), row_group_size=group)
                held.clear()
        if held:
            writer.write_table(pa.Table.from_pylist(held, schema), row_group_size=group)
    return tokens


class _Builder:
    def __init__(self, folder: Path, shape: Shape) -> None:
        from tito_audit import Settings, load_renderer
        from tito_audit.tokens.load import load_tokenizer

        self.shape = shape
        self.renderer = load_renderer(str(folder), Settings())
        self.tokenizer = load_tokenizer(str(folder))
        vocabulary = self.tokenizer.vocabulary
        pieces = {vocabulary.piece(i).strip() for i in range(0, vocabulary.size, 3)}
        self.words = sorted(word for word in pieces if word.isascii() and word.isalpha() and len(word) > 1)

    def row(self, number: int) -> dict[str, Any]:
        dice = random.Random(f"{self.shape.seed}/{number}")
        messages = self._messages(dice)
        from tito_audit.record.message import as_messages, as_tools
        from tito_audit.render.spans import spans

        tools = [_TOOL]
        rendering = spans(self.renderer, as_messages(messages, "row"), as_tools(tools, "row"))
        ids = self.tokenizer.encode(rendering.text)
        ends = np.cumsum(self.tokenizer.vocabulary.byte_lengths(ids))
        mask = np.zeros(len(ids), np.int8)
        for found in rendering.sampled.values():
            assert found is not None
            first, last = (len(rendering.text[:at].encode()) for at in found)
            mask[np.searchsorted(ends, first, "right") : np.searchsorted(ends, last, "left") + 1] = 1
        faulty = dice.random() < self.shape.faulty
        if faulty:
            ids, mask = self._respelled(ids, mask, dice)
        draw = np.random.default_rng(dice.getrandbits(32))
        logprobs = np.where(mask == 1, -np.round(draw.exponential(0.4, len(ids)), 4) - 1e-4, 0.0)
        if faulty and dice.random() < 0.5:
            mask = np.roll(mask, 1)
        return {
            "id": f"{self.shape.seed}-{number}",
            "messages": messages,
            "tools": tools,
            "token_ids": ids.astype(np.int32),
            "loss_mask": mask.astype(np.int8),
            "logprobs": logprobs,
        }

    def _respelled(self, ids: Any, mask: Any, dice: random.Random) -> tuple[Any, Any]:
        """Some sampled tokens split into two that spell the same."""
        vocabulary = self.tokenizer.vocabulary
        spots = [i for i in np.flatnonzero(mask) if dice.random() < NON_CANONICAL]
        for at in reversed(spots):
            data = vocabulary.token_bytes(int(ids[at]))
            for cut in range(1, len(data)):
                left, right = vocabulary.ids_of_bytes(data[:cut]), vocabulary.ids_of_bytes(data[cut:])
                if left and right:
                    ids = np.concatenate([ids[:at], [left[0], right[0]], ids[at + 1 :]])
                    mask = np.concatenate([mask[:at], [1, 1], mask[at + 1 :]])
                    break
        return ids, mask

    def _messages(self, dice: random.Random) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._prose(dice, 40)}]
        messages.append({"role": "user", "content": self._text(dice)})
        for turn in range(self.shape.turns):
            last = turn == self.shape.turns - 1
            if last or dice.random() < 0.4:
                messages.append({"role": "assistant", "content": self._text(dice)})
                if not last:
                    messages.append({"role": "user", "content": self._text(dice)})
                continue
            call = {"name": "run", "arguments": json.dumps({"command": self._prose(dice, 12)})}
            messages.append(
                {
                    "role": "assistant",
                    "content": self._prose(dice, self.shape.words // 3),
                    "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": self._text(dice)})
        return messages

    def _text(self, dice: random.Random) -> str:
        size = max(8, int(dice.gauss(self.shape.words, self.shape.words / 4)))
        kind = dice.random()
        if kind < 0.55:
            return self._prose(dice, size)
        if kind < 0.8:
            return self._code(dice, size // 6)
        if kind < 0.9:
            return json.dumps(
                {self._word(dice): [dice.randrange(10**6), self._prose(dice, 9)] for _ in range(size // 14)},
                indent=2,
            )
        return "".join(dice.choices(_CHINESE, k=size)) + dice.choice(_EMOJI) + self._prose(dice, size // 4)

    def _word(self, dice: random.Random) -> str:
        return dice.choice(self.words)

    def _prose(self, dice: random.Random, size: int) -> str:
        words = dice.choices(self.words, k=size)
        for i in range(7, len(words), 11):
            words[i] += dice.choice([".", ",", ";", "?", "!\n", ".\n\n", f" {dice.randrange(10**5)}", " 🙂"])
        return " ".join(words).strip()

    def _code(self, dice: random.Random, lines: int) -> str:
        out = ["```python"]
        for _ in range(lines):
            name = "".join(c for c in self._word(dice).lower() if c.isalnum()) or "x"
            out.append(
                f"{'    ' * dice.randrange(4)}{name}_{dice.randrange(99)} = {name}({dice.randrange(9999)}, '{self._word(dice)}')"
            )
        return "\n".join([*out, "```"])
