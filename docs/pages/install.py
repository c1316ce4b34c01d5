"""Tables of what an installation takes, out of the file that `make sizes` writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pages.words import table

__all__ = ["EXTRAS", "install_extras", "install_measured", "install_sizes"]

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {
    "transformers": "tokenizers without `tokenizer.json` (`tokenizer.model`, `*.tiktoken`, `merges.txt`)",
    "serve": "[the gateway](serve.md), managed servers, `rescore` with a vLLM, SGLang or TRL server",
    "s3": "logs in S3 and compatible servers (`s3://`)",
    "gs": "logs in Google Cloud Storage (`gs://`)",
    "az": "logs in Azure Blob Storage (`az://`)",
    "remote": "all three of these stores; `hf://` and `https://` need no extra",
    "ray": "[a scan or repair on a cluster](ray.md): `--engine ray`, `tito_audit.ray`",
    "torch": "logs in Torch files (`.pt`)",
    "hf": "a model in process (`--provider hf=PATH`): torch and transformers",
}
"""What users install beside the core, and what for."""
DEVELOPERS = {"bench", "dev", "docs"}
"""Extras of those who work on the project."""
PURPOSE = {
    "pyarrow": "Parquet, Arrow and `.zst` files",
    "numpy": "token ids as arrays",
    "tokenizers": "the reference encoder",
    "hf-xet": "downloads for `-t org/model`; `huggingface_hub` needs it",
    "fastokens": "the fast encoder",
    "tito-audit": "this project",
    "Pygments": "`rich` needs it",
    "huggingface_hub": "`-t org/model`; `tokenizers` needs it",
}
"""What the large packages are for."""
LARGE = 5_000_000


def install_sizes() -> str:
    """What the core takes, package by package."""
    core = _measured()["core"]
    large = sorted((name for name, size in core.items() if size >= LARGE), key=lambda name: -core[name])
    rows = [(f"`{name}`", PURPOSE[name], _mb(core[name])) for name in large]
    rest = [size for name, size in core.items() if name not in large]
    others = (f"{len(rest)} others", "templates, pages in the terminal, the command line", _mb(sum(rest)))
    return table(("package", "for", "MB"), [*rows, others, ("**all**", "", f"**{_mb(sum(core.values()))}**")])


def install_extras() -> str:
    """What each extra is for, and what it adds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = project["optional-dependencies"].keys() - DEVELOPERS
    adds = _measured()["extras"]
    rows = [(f"`{name}`", EXTRAS[name], _mb(adds[name])) for name in sorted(names, key=list(EXTRAS).index)]
    return table(("extra", "for", "adds MB"), rows)


def install_measured() -> str:
    """When and where the sizes were measured."""
    found = _measured()
    torch = f";\ntorch is its CPU build, `{found['torch']}`" if found["torch"] else ""
    return f"Measured by `make sizes` on {found['on']}, compiled modules included{torch}.\n"


def _measured() -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs" / "install-size.json").read_text(encoding="utf-8")))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f}"
