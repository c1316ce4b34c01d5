"""Words of a shell in commands that a person pastes: read back to the letter, harmless where they are shown."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_audit.record.rollout import Place
from tito_audit.summary import Summary
from tito_audit.terminal.escape import inert, shell_word, visible
from tito_audit.terminal.place import show_command

NAMES = (
    "run.jsonl",
    "a b.jsonl",
    "it's.jsonl",
    "$(touch x).jsonl",
    "line\nbreak.jsonl",
    "esc\x1b[2J.jsonl",
    "turn\u202eed.jsonl",
    "##[error]x.jsonl",
    "né.jsonl",
    "raw\udcff.jsonl",
    "back\\slash\x07.jsonl",
    "z\u0301\u0301\u0301\u0301\u0301\u0301\u0301.jsonl",
)


def read_back(words: list[str]) -> list[bytes]:
    """What bash takes the words for."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True)
    return done.stdout.split(b"\0")[:-1]


def test_a_shell_reads_every_name_back_to_the_letter() -> None:
    assert read_back([shell_word(name) for name in NAMES]) == [os.fsencode(name) for name in NAMES]


@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=50)
)
def test_a_shell_reads_any_text_back_and_nothing_of_it_acts(texts: list[str]) -> None:
    words = [shell_word(text) for text in texts]
    assert read_back(words) == [text.encode() for text in texts]
    assert all(inert(visible(word)) == word for word in words)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_that_a_report_proposes_names_the_file_itself(name: str) -> None:
    command = show_command(Place(name, 3), Summary())
    word = command.removeprefix("tito-audit show ").removesuffix(" --row 3")
    assert read_back([word]) == [os.fsencode(name)]
