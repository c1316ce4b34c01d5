"""Chat templates: those of the tokenizers at hand, and those that a package publishes."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.template_oracle.chat import TOKENS, Template

ROOT = Path(__file__).resolve().parents[2]


def tokenizer_folders() -> list[Path]:
    """The real tokenizers that have a template; none where tests have none."""
    root = os.environ.get("TITO_AUDIT_TOKENIZERS")
    folders = sorted(Path(root).iterdir()) if root else []
    return [folder for folder in folders if _source(folder) is not None]


def _source(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    source = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    return source if isinstance(source, str) else None


def of_tokenizer(folder: Path) -> Template:
    """The template of a tokenizer, with its special tokens."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items()}
    source = _source(folder)
    assert source is not None
    return Template(source, {key: token for key, token in tokens.items() if isinstance(token, str)})


def frameworks() -> Path:
    """Where the Pythons with frameworks are."""
    return Path(os.environ.get("TITO_AUDIT_FRAMEWORKS", ROOT / ".cache" / "frameworks"))


def published_files() -> dict[str, Path]:
    """The templates in the package TRL, by name; read from its folder, so that nothing of it is imported."""
    files = frameworks().glob("templates/lib/python*/site-packages/trl/chat_templates/*.jinja")
    return {path.stem: path for path in sorted(files)}


def needed() -> dict[str, Path]:
    """`published_files`; the test is skipped where there are none."""
    files = published_files()
    if not files:
        absent = frameworks() / "templates.absent"
        why = absent.read_text().strip() if absent.exists() else "run tests/frameworks/install.sh"
        pytest.skip(f"no Python with the framework templates: {why}")
    return files


@cache
def published(name: str) -> Template:
    """A published template, with made-up special tokens."""
    return Template(needed()[name].read_text(encoding="utf-8"), TOKENS)
