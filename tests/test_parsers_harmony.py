"""The parser of gpt-oss against openai-harmony, where a Python has it and the real vocabulary is here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.tables import stored
from tests.tiers import examples
from tito_audit.parser import Parsed, ParsedCall, ParseOptions, Reads
from tito_audit.parsers import parse_answer, parser_named
from tito_audit.tokens.load import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
PYTHON = ROOT / ".cache" / "vllm" / "bin" / "python"
ORDINARY = 199_998
"""Tokens of gpt-oss that are no control tokens: those of o200k_base."""
O200K = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""The digest of the file of o200k_base that the library asks for."""
MESSAGES = stored(__file__, "MESSAGES")
LAST = ("<|channel|>final<|message|>no end", "<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>cut")


def answers(count: int) -> list[str]:
    some = random.Random(11)
    texts = []
    for _ in range(count):
        messages = [some.choice(MESSAGES) for _ in range(some.randint(0, 4))]
        messages += [some.choice(LAST)] if some.random() < 0.5 or not messages else []
        texts.append("<|start|>assistant".join(messages))
    return texts


def as_parsed(messages: list[list[str | None]]) -> Parsed:
    """The messages of the library as a client gets them."""
    texts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = []
    for channel, recipient, text in messages:
        # The library takes a type without a space before it for a part of the address.
        name = (recipient or "").split("<|constrain|>")[0].strip()
        if name:
            calls.append(ParsedCall(name.removeprefix("functions."), text or ""))
        elif text:
            texts["analysis" if channel == "analysis" else "final"].append(text)
    return Parsed("\n".join(texts["final"]) or None, "\n".join(texts["analysis"]) or None, tuple(calls))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> dict[str, str]:
    """The environment in which the library finds the vocabulary, made of the tokenizer's own."""
    if not (SHARED / "gpt-oss" / "tokenizer.json").is_file() or not PYTHON.exists():
        pytest.skip("the tokenizer of gpt-oss or a Python with openai-harmony is not here")
    vocabulary = load_tokenizer(str(SHARED / "gpt-oss")).vocabulary
    ranks = "".join(f"{base64.b64encode(vocabulary.token_bytes(i)).decode()} {i}\n" for i in range(ORDINARY))
    assert hashlib.sha256(ranks.encode()).hexdigest() == O200K
    folder = tmp_path_factory.mktemp("encodings")
    (folder / "o200k_base.tiktoken").write_text(ranks, encoding="ascii")
    environment = {**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(folder)}
    if subprocess.run([PYTHON, "-c", "import openai_harmony"], env=environment, check=False).returncode:
        pytest.skip("openai-harmony is not here")
    return environment


def test_answers_are_read_as_the_library_reads_them(library: dict[str, str]) -> None:
    texts = answers(examples(200, 3000))
    ran = subprocess.run(
        [PYTHON, ROOT / "tests" / "harmony_oracle.py"],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env=library,
        check=True,
    )
    expected = json.loads(ran.stdout)
    parser = parser_named("openai", Reads.TOOLS)
    tools = ({"type": "function", "function": {"name": "get_weather"}},)
    for text, messages in zip(texts, expected, strict=True):
        assert messages is not None, text
        assert parse_answer(text, parser, parser, ParseOptions(tools)) == as_parsed(messages), text
