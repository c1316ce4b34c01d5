"""Messages name flags on the command line, and arguments in a Python program."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.tables import stored, table
from tito_audit import GateSettings, RepairChoices, RepairSettings, Settings, SetupError, scan_rollouts
from tito_audit.settings.options import OPTIONS
from tito_audit.voice import for_reader, messages_name_flags, with_python_arguments

ROW = {"token_ids": [5, 6], "loss_mask": [0, 1], "logprobs": [0.0, -0.5]}
CLASSES = {each.__name__: each for each in (GateSettings, RepairChoices, RepairSettings, Settings)}
VALUES = stored(__file__, "VALUES")
"""By option: a value to pass; for others a text."""
FILLED = [
    option for option in OPTIONS if option.fills is not None and option.name not in ("max_rates", "required")
]


@pytest.mark.parametrize("option", FILLED, ids=lambda option: option.flag)
def test_every_flag_is_spoken_as_the_argument_that_does_the_same(option: Any) -> None:
    switch = option.takes is bool
    text = "" if switch else VALUES.get(option.name, "A_TEXT")
    flag = f"--no-{option.flag[2:]}" if switch and option.default is True else option.flag
    if flag == "--no-provenance":
        return  # no message names it
    value = option.default is not True if switch else text
    if not switch:
        kind = option.takes if isinstance(option.takes, type) else str
        value = option.read([kind(text)] if option.repeats else kind(text))
    words = with_python_arguments(f"Pass {flag} {text}".rstrip() + ".")
    assert words.startswith(f"Pass {option.fills.__name__}(")
    assert words.endswith(").")
    passed = eval(words[5:-1], CLASSES)
    assert passed == option.fills(**{option.name: value}) != option.fills()


@pytest.mark.parametrize(*table(__file__, "messages_in_python"))
def test_messages_in_python(message: str, words: str) -> None:
    assert with_python_arguments(message) == words
    assert with_python_arguments(words) == words, "spoken once, nothing is left to speak"
    with messages_name_flags():
        assert for_reader(message) == message
    assert for_reader(message) == words


def test_an_error_names_what_its_reader_passes(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"token_ids": [5, 6]}\n')
    with pytest.raises(SetupError) as raised:
        scan_rollouts([ROW], Settings(chat_template="x.jinja")).run()
    assert "Settings(chat_template=…) was given" in str(raised.value)
    assert 'Pass Settings(tokenizer="DIR") as well.' in str(raised.value)
    code, _, words = run("scan", log, "--chat-template", "x.jinja")
    assert code == 2
    assert "--chat-template was given" in words
    assert "Pass --tokenizer DIR as well." in words
    assert "Settings(" not in words


def test_notices_and_verdicts_name_arguments_in_python(tmp_path: Path) -> None:
    scan = scan_rollouts([ROW]).run()
    shown = [repr(scan), str(scan), unescape(scan._repr_html_())]
    assert all("Settings(tokenizer=" in words for words in shown)
    assert not any("--tokenizer" in words or "-t NAME" in words for words in shown)
    log = tmp_path / "run.jsonl"
    log.write_text('{"token_ids": [5, 6]}\n')
    _, page, _ = run("scan", log)
    assert "-t NAME" in page
    assert "Settings(" not in page


def test_a_notebook_shows_an_error_as_its_message_below_the_line_that_raised_it() -> None:
    hostile = "no/\x1b[2Jsuch\u202e.jsonl"
    try:
        scan_rollouts(hostile).run()
    except Exception as error:
        lines = error._render_traceback_()  # type: ignore[attr-defined]
    assert [Path(line.split('"')[1]).name for line in lines if line.startswith("  File")] == ["test_voice.py"]
    assert lines[-1].startswith("StorageError: no/")
    assert "\\x1b[2Jsuch\\u202e" in lines[-1]
