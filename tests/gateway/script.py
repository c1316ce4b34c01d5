"""What the stub model says: reasoning, tool calls and odd spacing, in tokens that no tokenizer writes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

_PLAIN = "the weather in Paris is seven degrees and falling, Skinny said. tokenization Übergröße naïve 東京 🙂"
WORDS = (*_PLAIN.split(" "), "1234", "x_y=3.50", "don't", "", "two", "", "\n\n- item", "\n\t`code`", "</s>")
CITIES = ("Paris", "São Paulo", "東京", 'a "quoted" place', "New\nline", "back\\slash", "🙂")
OPENERS = ("Well, ", "So: ", "", "I think ", "Let me look. ", "  ", "\n")


@dataclass(frozen=True)
class Temper:
    """How often the stub model does what; each a probability."""

    split: float = 0.25
    """That a token is sampled as two smaller ones, which may be split again."""
    reasoning: float = 0.2
    no_reasoning: float = 0.15
    """That an answer without reasoning says so by an empty block, as Qwen3 does."""
    call: float = 0.4
    second_call: float = 0.25
    odd_json: float = 0.7
    broken_json: float = 0.05
    spelled_control: float = 0.05
    """That a control token is in the text, in plain tokens."""
    real_control: float = 0.04
    """That a control token which ends nothing is sampled amid the text."""


@dataclass(frozen=True)
class Answer:
    """What is sampled if nothing stops it: ids with a logprob each, the end token last."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class Script:
    """The stub model: the same prompt and seed give the same answer."""

    tokenizer: Tokenizer
    end: str
    """The token that ends an answer."""
    control: str
    """A control token that ends nothing."""
    temper: Temper = field(default_factory=Temper)
    seed: int = 0

    @classmethod
    def of(cls, folder: Path, end: str, control: str, temper: Temper | None = None, seed: int = 0) -> Script:
        """The stub model with the tokenizer of a folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), end, control, temper or Temper(), seed)

    @cached_property
    def end_id(self) -> int:
        token = self.tokenizer.token_to_id(self.end)
        assert token is not None, f"{self.end} is no token"
        return int(token)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab(with_added_tokens=False))

    @cached_property
    def pieces(self) -> dict[int, str]:
        """The plain entries, by id; control tokens are never split."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: piece for piece, number in self.vocabulary.items() if number not in added}

    def answer(self, prompt: Sequence[int], index: int, seed: int | None) -> Answer:
        """The answer to a prompt, decided by its ids, the choice and the request's seed."""
        key = f"{self.seed}/{index}/{seed}/" + ",".join(map(str, prompt))
        dice = random.Random(hashlib.sha256(key.encode()).digest())
        ids = [*self._sampled(dice, self._text(dice)), self.end_id]
        return Answer(tuple(ids), tuple(round(-dice.expovariate(1.5), 6) for _ in ids))

    def _text(self, dice: random.Random) -> str:
        temper, parts = self.temper, []
        if dice.random() < temper.reasoning:
            parts.append(f"<think>\n{self._words(dice, 12)}\n</think>\n\n")
        elif dice.random() < temper.no_reasoning:
            parts.append("<think>\n\n</think>\n\n")
        called = dice.random() < temper.call
        parts.append(dice.choice(OPENERS) + self._words(dice, 3 if called else 20))
        if dice.random() < temper.spelled_control:
            parts.append(f" writes \x00{self.end}\x00 here ")
        if called:
            parts.append("\n" + _call(dice, temper))
            if dice.random() < temper.second_call:
                parts.append("\n" + _call(dice, temper))
        return "".join(parts)

    def _words(self, dice: random.Random, most: int) -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))

    def _sampled(self, dice: random.Random, text: str) -> list[int]:
        """The text in random tokens; between NUL characters stands what is written in plain tokens."""
        ids: list[int] = []
        for number, part in enumerate(text.split("\x00")):
            for piece in [part] if number % 2 == 0 else list(part):
                ids.extend(self.tokenizer.encode(piece, add_special_tokens=False).ids)
        split = [small for token in ids for small in self._split(dice, token)]
        if dice.random() < self.temper.real_control:
            split.insert(dice.randrange(len(split) + 1), self.tokenizer.token_to_id(self.control))
        return split

    def _split(self, dice: random.Random, token: int) -> list[int]:
        """A token, or tokens that spell it."""
        piece = self.pieces.get(token, "")
        if len(piece) < 2 or dice.random() > self.temper.split:
            return [token]
        cuts = [
            at for at in range(1, len(piece)) if piece[:at] in self.vocabulary and piece[at:] in self.vocabulary
        ]
        if not cuts:
            return [token]
        at = dice.choice(cuts)
        halves = (self.vocabulary[piece[:at]], self.vocabulary[piece[at:]])
        return [small for half in halves for small in self._split(dice, half)]


def _call(dice: random.Random, temper: Temper) -> str:
    """A tool call as a model writes it: JSON with any spacing."""
    arguments: dict[str, object] = {"city": dice.choice(CITIES)}
    if dice.random() < 0.5:
        arguments["days"] = dice.choice([1, 2.0, 1e3, -0.5, 12345678901234567890])
    if dice.random() < 0.3:
        arguments["detail"] = {"units": ["C", None, True], "empty": {}}
    odd = dice.random() < temper.odd_json
    separators = (dice.choice([", ", ",", " , ", ",\n  "]), dice.choice([": ", ":", " : "])) if odd else None
    value = {"name": dice.choice(["weather", "forecast"]), "arguments": arguments}
    text = json.dumps(value, ensure_ascii=dice.random() < 0.3, separators=separators)
    if dice.random() < temper.broken_json:
        text = text[: dice.randrange(1, len(text))]
    around = dice.choice(["\n", "\n", "", " "]) if odd else "\n"
    return f"<tool_call>{around}{text}{around}</tool_call>"
