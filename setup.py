"""What pyproject.toml cannot say: the README as a package index shows it, and the addresses of the project.

An index shows the README without the files beside it, so its links must be whole addresses. This project has no
address of its own. Whoever publishes it sets TITO_AUDIT_ADDRESS=https://github.com/OWNER/tito-audit; without it,
links to files become plain words, and the package names no address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(
    r"`[^`\n]+`|(?P<picture>!?)\[(?P<label>(?:!\[[^\[\]]*\]\([^()\s]+\)|[^\[\]])*)\]\((?P<target>[^()\s]+)\)"
)
"""A link whose label may be a picture; or code, which may look like one."""
PICTURE = re.compile(r"<picture>.*?(?P<image><img\b[^>]*>).*?</picture>", re.DOTALL)
TAG = re.compile(
    r'(?P<before><(?:img|source|a)\b[^>]*?\b(?:src|srcset|href)=")(?P<target>[^"]+)(?P<after>"[^>]*>)'
)
ALT = re.compile(r'\balt="([^"]*)"')
WHOLE = ("https://", "http://", "mailto:", "#")
PICTURES = (".svg", ".png", ".gif", ".webp")


def long_description(text: str, version: str, address: str | None = None) -> str:
    """The README for an index: links to files as whole addresses, or as plain words if there is no address."""
    parts = BLOCK.split(text)  # every second one is a block of code, which stays as it is
    parts[::2] = [_linked(part, f"{address}/%s/v{version}/%s") if address else _plain(part) for part in parts[::2]]
    return "".join(parts)


def _linked(text: str, address: str) -> str:
    def there(target: str) -> str:
        kind = "raw" if target.partition("#")[0].endswith(PICTURES) else "blob"
        return target if target.startswith(WHOLE) else address % (kind, target.removeprefix("./"))

    def link(one: re.Match[str]) -> str:
        if one["target"] is None:
            return one[0]
        return f"{one['picture']}[{LINK.sub(link, one['label'])}]({there(one['target'])})"

    return TAG.sub(lambda one: one["before"] + there(one["target"]) + one["after"], LINK.sub(link, text))


def _plain(text: str) -> str:
    def words(one: re.Match[str]) -> str:
        if one["target"] is None or one["target"].startswith(WHOLE):
            return one[0]
        return LINK.sub(words, one["label"])

    def alt(tag: re.Match[str]) -> str:
        found = ALT.search(tag[0])
        return tag[0] if tag["target"].startswith(WHOLE) else found[1] if found else ""

    text = PICTURE.sub(lambda one: one["image"], text)
    text = re.sub(r'<a href="(?!https?:|mailto:|#)[^"]*">(.*?)</a>', r"\1", text, flags=re.DOTALL)
    return TAG.sub(alt, LINK.sub(words, text))


def urls(address: str | None) -> dict[str, str]:
    """The links beside the description; none without an address."""
    pages = {
        "Homepage": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Source": "",
        "Issues": "/issues",
    }
    return {name: f"{address}{page}" for name, page in pages.items()} if address else {}


def version() -> str:
    """The version, without importing the package: what it needs is not installed yet."""
    text = (HERE / "tito_audit" / "version.py").read_text(encoding="utf-8")
    return str(re.findall(r'^VERSION = "(.+)"$', text, re.MULTILINE)[0])


if __name__ == "__main__":
    from setuptools import setup

    place = os.environ.get("TITO_AUDIT_ADDRESS", "").rstrip("/") or None
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=long_description(readme, version(), place),
        long_description_content_type="text/markdown",
        project_urls=urls(place),
    )
