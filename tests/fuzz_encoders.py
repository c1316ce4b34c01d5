"""Texts on which encoders might differ, drawn at random: the same ones for the same seed."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from itertools import chain

from tito_audit.tokens.tokenizer import Tokenizer

FRAGMENTS = (
    "I'm", "YOU'RE", "it's", "he'LL", "we’ve", "'d", "''", "don't've", "'T", "x'S1",
    " the", "The", "THE", "iPhone", "camelCase", "HTTPServer", "_a", "__init__", "x1y2", "a-b", "e.g.",
    "0", "00", "007", "3.14", "1,000", "1e-9", "٣٤", "½", "Ⅳ", "²", "１２", "๑๒", "৪",
    "\n", "\r\n", "\r", "\t", " ", "  ", "\u00a0", "\u3000", "\u2009", "\u0085", "\u2028", "\u200b",
    "\ufeff", "\x1c",
    "e\u0301", "\u0301", "\u0323\u0307", "Å", "\u212b", "\u0958", "각", "\u1100\u1161", "ﬁ", "ǆ", "İ", "ß",
    "ẞ", "ſ",
    "中", "、", "。", "あ", "ー", "ｱ", "한", "ไ", "ก็", "नी", "ʼ", "ª", "º", "ـ", "ء",
    "🙂", "👨‍👩‍👧", "🇫🇷", "🏴\U000e0067\U000e007f", "✌🏿", "#️⃣", "\ufe0f", "\u200d", "\U0001f3fb",
    "<", ">", "|", "<|", "|>", "</", "/>", "{", "}", '"', "\\", "\\n", "//", "/*", "#", "=>", "!=", "...", "—",
    "…", "$", "€",
    "\ud83d", "\ude00", "\ud83d\ude00", "\ufffd", "\x00", "\x7f", "\x9f", "\U0010ffff", "\u2581", "Ġ", "Ċ",
    "<0x0A>",
)  # fmt: skip
BLOCKS = (
    (0x00, 0x80), (0x80, 0x250), (0x2B0, 0x370), (0x370, 0x530), (0x530, 0x700), (0x700, 0x980), (0x980, 0xE80),
    (0xE80, 0x1200), (0x1200, 0x1800), (0x1800, 0x1E00), (0x1E00, 0x2000), (0x2000, 0x2440), (0x2440, 0x2E80),
    (0x2E80, 0x3400), (0x4E00, 0xA000), (0xA000, 0xAC00), (0xAC00, 0xD7B0), (0xE000, 0xE200), (0xF900, 0x10000),
    (0x10000, 0x11800), (0x12000, 0x16000), (0x16000, 0x1B000), (0x1B000, 0x1F000), (0x1F000, 0x1FC00),
    (0x20000, 0x2A700), (0xE0000, 0xE0200),
)  # fmt: skip
LENGTHS = (1, 1, 2, 2, 3, 3, 4, 5, 7, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257)
FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class Drawn:
    """Random texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.random = random.Random(seed)
        vocabulary = tokenizer.vocabulary
        self.entries = [vocabulary.token_bytes(i) for i in range(vocabulary.size)]
        self.added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        special = [vocabulary.token_bytes(i).decode() for i in sorted(vocabulary.special_ids)]
        self.control = special[:8] + special[-8:]
        """Some that a chat could be written with."""
        self.kinds = (self.words, self.script, self.fragments, self.near_tokens, self.runs, self.other_form)

    def texts(self, count: int) -> list[str]:
        """So many texts, of every kind alike."""
        return [self.random.choice(self.kinds)() for _ in range(count)]

    def words(self) -> str:
        """Entries of the vocabulary side by side, cut into bytes here and there."""
        parts = self.random.choices(self.entries, k=self.random.randint(1, 14))
        data = b"".join(
            part[: self.random.randint(0, 4)] if self.random.random() < 0.15 else part for part in parts
        )
        return data.decode("utf-8", self.random.choice(["replace", "ignore"]))

    def script(self) -> str:
        """Any characters out of one to three parts of Unicode."""
        blocks = self.random.choices(BLOCKS, k=self.random.randint(1, 3))
        length = self.random.randint(1, 24)
        return "".join(chr(self.random.randrange(*self.random.choice(blocks))) for _ in range(length))

    def fragments(self) -> str:
        """What people, programs and broken programs write, in any order."""
        return "".join(self.random.choices(FRAGMENTS, k=self.random.randint(0, 12)))

    def near_tokens(self) -> str:
        """Added tokens, whole, cut off at either end, doubled, and in other letters."""
        parts = []
        for _ in range(self.random.randint(1, 5)):
            content = self.random.choice(self.added)
            cut = self.random.randint(0, len(content))
            forms = (content, content, content[cut:], content[:cut], content.upper(), f" {content}\n", content * 2)
            parts += [
                self.random.choice(forms),
                *self.random.choices(["", *FRAGMENTS], k=self.random.randint(0, 2)),
            ]
        return "".join(parts)

    def runs(self) -> str:
        """One thing many times, with something else at its ends."""
        start, middle, end = self.random.choices(FRAGMENTS, k=3)
        return start + middle * self.random.choice(LENGTHS) + end

    def other_form(self) -> str:
        """Another text in another form of Unicode, or in other letters."""
        text = self.random.choice(self.kinds[:5])()
        if self.random.random() < 0.3:
            return self.random.choice((str.upper, str.title, str.swapcase))(text)
        return unicodedata.normalize(self.random.choice(FORMS), text)

    def chats(self, count: int) -> list[str]:
        """Texts with control tokens between and around them."""
        return ["".join(chain.from_iterable(self._spliced())) for _ in range(count)]

    def _spliced(self) -> Iterator[tuple[str, ...]]:
        for text in self.texts(self.random.randint(1, 4)):
            at = self.random.randint(0, len(text))
            token, other = self.random.choices(self.control, k=2)
            forms = (
                (text, token),
                (token, text),
                (text[:at], token, text[at:]),
                (token, other, text),
                (text, token, "\n"),
            )
            yield self.random.choice(forms)

    def history(self) -> list[str]:
        """A chat that grows, is edited in the middle, cut short and grows again: one text for each state."""
        text, states = "", []
        for _ in range(self.random.randint(4, 10)):
            at = self.random.randint(0, len(text))
            more = "".join([*self.texts(2), self.random.choice(self.control)])
            edits = (
                text + more,
                text + more,
                text[:at] + more[:8] + text[at:],
                text[:at],
                text[at:],
                text + "\u0301",
            )
            text = self.random.choice(edits)
            states.append(text)
        return states
