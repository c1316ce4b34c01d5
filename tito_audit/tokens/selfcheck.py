"""Whether a fast encoder agrees with the reference, checked before it is trusted with a log.

The probes are what encoders have been seen to disagree on: scripts, characters that combine or are normalised,
multi-part emoji, digits, white space, contractions, control tokens spelled in full and in part, long words, and
words from the tokenizer's own vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from tito_audit.tokens.encoders import Encoder, ReferenceEncoder, on_one_processor, well_formed
from tito_audit.tokens.vocab import Vocabulary

_TEXTS = (
    "",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX!",
    "Grüße aus Köln, façade, smørbrød, żółć, ğıİ, ǅungla, ﬁn ﬄ, ſß",
    "Привет, мир. Ελληνικά κείμενο, ΣΊΣΥΦΟΣ. Հայերեն. ქართული.",
    "こんにちは世界。中文没有空格，也能分词。한국어 문장입니다. ㍿①Ⅷ½²",
    "مرحبا بالعالم ١٢٣ שלום עולם नमस्ते दुनिया १२३ தமிழ் ไทย ភាសាខ្មែរ አማርኛ བོད",
    "e\u0301a\u030ao\u0308 \u0928\u093c \u0958 q\u0307\u0323 \u1100\u1161\u11a8 \u212b \u2126 \u0344 \u0301start",
    "🎉 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ❤️ 1️⃣ 🫠\u200d\ufe0f\U000e0067",
    "1 12 123 1234 12345 1234567890123 3.14159 1,000,000 0xdeadBEEF 2025-11-21T08:30:00Z v1.2.3",
    " a  b   c    d\te\t\tf\n g\n\n h \n \n\n\ni\r\nj\r\r\n \t \n    ",
    "\u00a0a\u00a0\u00a0b\u2003c\u3000d\u2028e\u0085f\ufeffg\u200bh\n\n\u00a0\u00a0*",
    "I'm you'RE he'S they'LL we'd I'Ve 'tis o'clock rock'n'roll ’s x’ll 's'S 'd''m",
    'def f(x: int) -> dict[str, Any]:\n    return {"a": [x ** 2, None], \'b\': f"{x!r:>10}"}  # ok?\n',
    '{"name":"get_weather","arguments":{"city":"Paris","days":[1,2,3]},"x":null}\\n\\"\\u00e9\\"',
    "<html><body class='x'>&amp;</body></html> <<>> <|> <||> |> <｜｜> </s> <s> [INST] <0x0A> ▁▁a▁",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case a.b.c/d/e?f=g&h=i#j @user #tag $x %d",
    "a\ud83db \ud83d\ude00 \udc00\ud800 \udfff",
    "\x00\x01\x07\x1b[31m\x7f\x80\x9f\u0600\ufffd\uffff\U0010ffff\U000e0100",
    "!!!???... ---=== *** ~~~ ((([[[{{{ }}} ]]] ))) <<< >>> ;:,. \"'`",
    "a" * 700,
    "antidisestablishmentarianism" * 40,
    "ab1" * 200,
    "中" * 200 + "文" * 3,
    " " * 260 + "x",
    "\n" * 130 + " " * 17 + "\t" * 33 + "y",
    "=" * 129 + "-" * 65 + "#" * 33,
    "0" * 301,
    "e\u0301\u0323" * 90,
    "👍🏽" * 60,
)
_CONTROL_TOKENS = 48
"""How many control tokens are spelled out, at equal distances."""
_ENTRIES = 1024
"""How many entries of the vocabulary are joined to words."""


def probes(vocabulary: Vocabulary) -> list[str]:
    """Texts on which encoders differ if they differ at all, some made from the tokenizer's own words and control
    tokens."""
    return [*_TEXTS, *_control_texts(vocabulary), *_words(vocabulary)]


def disagreement(reference: ReferenceEncoder, fast: Encoder, texts: Sequence[str]) -> str | None:
    """Where the two differ on these texts, in words; None if they do not.

    It leaves no thread of either library behind, so a process may fork afterwards.
    """
    try:
        with on_one_processor():
            found = fast.encode_batch(texts)
    except Exception as error:  # it may raise anything
        return f"{fast.name} could not encode the texts of the self-check ({type(error).__name__}: {error})"
    for text, fast_ids, ids in zip(texts, found, reference.encode_alone(texts), strict=True):
        if not np.array_equal(fast_ids, ids):
            return f"{fast.name} disagreed with {reference.name} at {shown(text)}"
    return None


def shown(text: str) -> str:
    """A text as a message quotes it: on one line, shortened."""
    quoted = ascii(well_formed(text))
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


def _control_texts(vocabulary: Vocabulary) -> list[str]:
    """Control tokens whole, cut off, in upper case, and next to text and to each other."""
    ids = sorted(vocabulary.added_ids)
    contents = [vocabulary.token_bytes(i).decode() for i in ids[:: max(1, len(ids) // _CONTROL_TOKENS)]]
    whole = [f"a {content}b\n{content} {content}{content}'s" for content in contents]
    partly = [f"{content[:-1]} {content[1:]} {content.upper()} {content[:3]}" for content in contents[:8]]
    return [*whole, *partly, "".join(contents), " ".join(contents)]


def _words(vocabulary: Vocabulary) -> list[str]:
    """Entries from the whole vocabulary, joined as bytes into words that it never saw."""
    step = max(1, vocabulary.size // _ENTRIES)
    entries = iter([vocabulary.token_bytes(i) for i in range(step - 1, vocabulary.size, step)])
    texts = []
    while batch := list(islice(entries, 32)):
        texts.append(b"".join(batch).decode("utf-8", "replace"))
    return texts
