"""Conversations as agents make them: retries, branches, sub-agents, summaries, edits, rows written twice.

Each call has one logprob above zero, its number: so findings say which calls were read as one conversation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from tests.apart import Call, Wire

__all__ = ["TOY", "Family", "Grower", "Linked", "families"]

TOY = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers" / "toy_bpe"
FIRST = 1000
"""The number of the first call."""
END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Linked:
    """A call, and what its row shows of where it belongs."""

    number: int
    call: Call
    parent: Linked | None
    """The call that its prompt shows it to follow; None if nothing does."""
    how: str

    @property
    def root(self) -> Linked:
        """The first call that it follows, call after call."""
        return self if self.parent is None else self.parent.root


@dataclass(slots=True)
class Family:
    """The calls that were made in one conversation."""

    name: str
    calls: list[Linked] = field(default_factory=list)

    @property
    def ambiguous(self) -> bool:
        """Whether its first call is there twice, so that nothing says which of them was continued."""
        return any(call.how == "first row again" for call in self.calls)


@cache
def encode(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOY / "tokenizer.json"))


def written_out(messages: Sequence[Wire]) -> str:
    """The prompt that the toy's template writes."""
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}{END}\n" for message in messages)
    return text + OPENING


class Grower:
    """Grows conversations out of one seed."""

    def __init__(self, seed: int, *, drift: float = 0.5) -> None:
        self._rng = random.Random(seed)
        self._numbers = count(FIRST)
        self._drift = drift
        self._first: list[list[Wire]] = []

    def family(self, number: int, size: int, *, lost: bool = True) -> Family:
        """A conversation of about so many calls; with `lost`, some whose rows do not show where they belong."""
        rng, family = self._rng, Family(f"family-{number}")
        if self._first and rng.random() < 0.4:
            sent = rng.choice(self._first)  # a sample of the same prompt
        else:
            system = [{"role": "system", "content": f"You are {self._words(3)}."}] if rng.random() < 0.7 else []
            sent = [*system, {"role": "user", "content": self._words(6)}]
            self._first.append(sent)
        family.calls.append(self._call(family, number, sent, None, None, "first"))
        ways = [self._goes_on, self._goes_on, self._goes_on, self._again, self._edited, self._twice]
        ways += [self._other_agent, self._summary] if lost else []
        for _ in range(size - 1):
            call = rng.choice(ways)(family, number, rng.choice(family.calls[-3:]))
            if call is not None:
                family.calls.append(call)
        return family

    # What a conversation does next

    def _goes_on(self, family: Family, number: int, last: Linked) -> Linked | None:
        """The next message, or another one for a call that was already continued."""
        assert last.call.answer is not None
        sent = [*last.call.sent, last.call.answer, {"role": "user", "content": self._words(5)}]
        return self._call(family, number, sent, self._prompt(last, sent), last, "goes on")

    def _again(self, family: Family, number: int, last: Linked) -> Linked | None:
        """The same prompt answered again; of a first call that is another sample, which shows no relation."""
        if last.parent is None:
            return None
        return self._call(family, number, last.call.sent, last.call.prompt, last.parent, "again")

    def _edited(self, family: Family, number: int, last: Linked) -> Linked | None:
        """The last message but one was rewritten by hand: what came before it still shows what it follows."""
        if last.parent is None or last.call.answer is None:
            return None
        sent = [*last.call.sent[:-1], {"role": "user", "content": self._words(5)}, last.call.answer]
        sent = [*sent, {"role": "user", "content": self._words(4)}]
        return self._call(family, number, sent, self._prompt(last.parent, sent), last.parent, "edited")

    def _twice(self, family: Family, number: int, last: Linked) -> Linked | None:
        """The row of a call once more."""
        if any(call.how == "first row again" for call in family.calls) and last.parent is None:
            return None
        relation = "row again" if last.parent is not None else "first row again"
        return Linked(last.number, last.call, last.parent, relation)

    def _other_agent(self, family: Family, number: int, last: Linked) -> Linked | None:
        """A sub-agent, with a system prompt of its own."""
        system = {"role": "system", "content": f"Help with {self._words(4)}."}
        sent = [system, {"role": "user", "content": self._words(5)}]
        return self._call(family, number, sent, None, None, "other agent")

    def _summary(self, family: Family, number: int, last: Linked) -> Linked | None:
        """A summary in place of what was said."""
        system = [message for message in last.call.sent[:1] if message["role"] == "system"]
        sent = [*system, {"role": "user", "content": f"So far: {self._words(8)}"}]
        return self._call(family, number, sent, None, None, "summary")

    # Tokens

    def _call(
        self,
        family: Family,
        number: int,
        sent: Sequence[Wire],
        prompt: Sequence[int] | None,
        parent: Linked | None,
        how: str,
    ) -> Linked:
        answer, serial = self._words(8), next(self._numbers)
        sampled = [*self._sampled(answer), *encode(END)]
        scores = [-0.5] * len(sampled)
        scores[self._rng.randrange(1, len(scores))] = float(serial)
        record = {
            "prompt_token_ids": list(encode(written_out(sent)) if prompt is None else prompt),
            "generation_token_ids": sampled,
            "generation_log_probs": scores,
            "finish_reason": "stop",
            "text": answer,
        }
        message = {"role": "assistant", "content": answer}
        return Linked(serial, Call(number, len(family.calls), sent, message, None, record), parent, how)

    def _prompt(self, last: Linked, sent: Sequence[Wire]) -> Sequence[int]:
        """The ids of a prompt that follows a call: those seen before, or all of them encoded again."""
        if self._rng.random() < self._drift:
            return encode(written_out(sent))
        seen = written_out(last.call.sent) + str((last.call.answer or {})["content"]) + END
        return [*last.call.seen, *encode(written_out(sent)[len(seen) :])]

    def _sampled(self, answer: str) -> list[int]:
        """Ids of the text, about half the time not those that it encodes to."""
        ids = list(encode(answer))
        for _ in range(self._rng.randrange(3)):
            at = self._rng.randrange(len(ids))
            text = _tokenizer().decode([ids[at]])
            if len(text) > 1:
                cut = self._rng.randrange(1, len(text))
                ids[at : at + 1] = [*encode(text[:cut]), *encode(text[cut:])]
        return ids

    def _words(self, most: int) -> str:
        rng = self._rng
        letters = "abcdefghiklmnoprstuvw"
        words = (
            "".join(rng.choice(letters) for _ in range(rng.randrange(2, 8)))
            for _ in range(rng.randrange(3, most + 3))
        )
        return " ".join(words)


def families(seed: int, many: int, **options: float | bool) -> list[Family]:
    """Conversations of one to twelve calls."""
    grower, rng = Grower(seed), random.Random(seed)
    return [grower.family(number, rng.randrange(1, 13), **options) for number in range(many)]  # type: ignore[arg-type]
