"""Ten mistakes that newcomers make: what happened, why, and what to do, word for word.

`UPDATE_GOLDENS=1 pytest tests/test_mistakes.py` writes the files of `fixtures/mistakes/` again; read them aloud.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from tests.command import run, written
from tests.tables import stored

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
GOLDENS = FIXTURES / "mistakes"
ROW = {
    "tokens": [2001, 82, 1132, 316, 198, 692, 524, 259],
    "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1],
    "logprobs": [0.0, 0.0, 0.0, 0.0, -0.5, -0.25, -1.5, -0.125],
}
MISTAKES: dict[str, tuple[str, ...]] = stored(__file__, "MISTAKES")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a newcomer has it."""
    here = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(FIXTURES / "tokenizers" / "toy_bpe", here / "tokenizer")
    shutil.copytree(FIXTURES / "tokenizers" / "toy_metaspace", here / "other")
    rows = (FIXTURES / "formats" / "nemo_gym.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (here / "run.jsonl").write_text("".join(rows[:2]), encoding="utf-8")
    (here / "checkpoint").mkdir()
    (here / "checkpoint" / "config.json").write_text("{}", encoding="utf-8")
    (here / "run.csv").write_text('token_ids,loss_mask\n"[1, 2]","[0, 1]"\n', encoding="utf-8")
    (here / "run.pkl").write_bytes(pickle.dumps([ROW], protocol=4))
    (here / "mixed").mkdir()
    for name in ("README.md", "notes.txt", "old.csv", "batch.pkl", "tokenizer.json", "plot.png", "eval.log"):
        (here / "mixed" / name).write_text("{}", encoding="utf-8")
    written(here / "train.jsonl", [ROW])
    written(here / "mixed" / "train.jsonl", [ROW])
    (here / "empty.jsonl").touch()
    written(here / "text.jsonl", [{"prompt": "What is 2+2?", "completion": "It is 4", "score": 1.0}])
    return here


def page_of(arguments: tuple[str, ...], here: Path) -> str:
    """The command with its exit code, what it prints, and what it says on stderr; without times."""
    code, out, err = run(*arguments, env={"COLUMNS": "100"})
    parts = [
        f"$ tito-audit {' '.join(arguments)}",
        f"exit {code}",
        *([out] if out else []),
        *([err] if err else []),
    ]
    page = "\n".join(part.rstrip("\n") for part in parts) + "\n"
    return re.sub(r"[\d.]+ s(, [\d,]+ tokens/s)?$", "0.1 s", page.replace(str(here), "/here"), flags=re.M)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_happened_why_and_what_to_do(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    page, file = page_of(MISTAKES[name], place), GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text(page, encoding="utf-8", newline="")
    assert page == file.read_bytes().decode()


def test_every_answer_is_of_a_mistake_that_is_tried() -> None:
    assert sorted(file.stem for file in GOLDENS.iterdir()) == sorted(MISTAKES)
