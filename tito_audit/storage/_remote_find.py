"""The logs that a URL names: a file, a folder, or a pattern."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.storage._ranged import FIRST
from tito_audit.storage.remote import RemoteFile, know, remote_file
from tito_audit.unknown import close_names

_MAGIC = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"\d+")
_ALIKE = 8
"""So many files with the same name but for its digits are shards: if the first is a log, all are."""
_AT_ONCE = 16
"""Beginnings of files that are fetched at the same time."""
_FEW = 64
"""Of up to so many files as much is fetched as reading them needs first."""

Take = Callable[[Path], list[Path]]
"""The logs in a folder, in order."""


def remote_logs(url: str, take: Take) -> list[Path]:
    """The files that a URL names, as they are now; StorageError if there are none."""
    if url.endswith("://"):
        raise StorageError(f"{url}: this names no file. Name one, or a folder, after it.")
    path = remote_file(url)
    if _of_web(url):
        return [_of_server(path)]
    pattern = _MAGIC.search(url, url.index("://") + 3)
    why = "there is nothing below it."
    if not url.endswith("/"):
        try:
            path.refreshed()
            return [know(path)]
        except FileNotFoundError as error:
            why = str(error.strerror)
    if pattern is not None:
        return _of_pattern(url, pattern.start(), take)
    folder = _listed(RemoteFile(url.rstrip("/")))
    if not folder.below:
        raise StorageError(f"{folder}: {why}{_close_names(folder)}")
    return take(folder)


def remote_folder(url: str) -> RemoteFile | None:
    """The folder that a URL names, with all files below it; None if it names something else."""
    if _of_web(url) or _MAGIC.search(url, url.index("://") + 3):
        return None
    folder = remote_file(url.rstrip("/"))
    if folder.below is not None:
        return folder
    try:
        return None if folder.is_file() else _listed(folder)
    except StorageError:  # which find_logs reports
        return None


def walk(folder: RemoteFile) -> Iterator[tuple[RemoteFile, list[str], list[str]]]:
    """As `os.walk`, from one listing: each folder, and the names of the folders and files in it."""
    tree: dict[str, tuple[dict[str, None], list[str]]] = defaultdict(lambda: ({}, []))
    for file in (folder if folder.below is not None else _listed(folder)).below or ():
        tree[str(file.parent)][1].append(file.name)
        for one in file.parents:
            if one == folder:
                break
            tree[str(one.parent)][0][one.name] = None
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        folders, files = sorted(tree[str(here)][0]), sorted(tree[str(here)][1])
        yield here, folders, files
        waiting += [here / name for name in reversed(folders)]


def _listed(folder: RemoteFile) -> RemoteFile:
    """The folder with all files below it, which are known from now on."""
    folder.below = [know(file) for file in folder.files()]
    return know(folder)


def fetch_heads(files: Sequence[RemoteFile], size: int) -> None:
    """Fetch how files begin, many at a time.

    Of many files with the same name but for its digits, only the first is fetched; the others are `alike`.
    """
    groups: dict[tuple[str, str], list[RemoteFile]] = defaultdict(list)
    for file in files:
        groups[str(file.parent), _DIGITS.sub("0", file.name)].append(file)
    wanted = []
    for group in groups.values():
        wanted += group[:1] if len(group) >= _ALIKE else group
        for file in group[1:] if len(group) >= _ALIKE else ():
            file.alike = group[0]
    if len(wanted) > 1:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda file: _head(file, FIRST if len(wanted) <= _FEW else size), wanted))


def _head(file: RemoteFile, size: int) -> None:
    with file.open("rb", 0) as opened:
        opened.read(size)


def _of_server(path: RemoteFile) -> RemoteFile:
    if "*" in path.name:
        raise StorageError(f"{path}: a web server does not list its files. Name each file.")
    try:
        path.refreshed()
    except FileNotFoundError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    return know(path)


def _of_pattern(url: str, magic: int, take: Take) -> list[Path]:
    """The files that a pattern matches, and the logs in folders that it matches."""
    folder = RemoteFile(url[:magic].rpartition("/")[0])
    if len(folder.parts) < 2:
        raise StorageError(f"{url}: a pattern begins after the name of the bucket or the repository.")
    matches = re.compile(_translated(url)).fullmatch
    found: dict[str, list[Path]] = {}
    folders: dict[RemoteFile, list[RemoteFile]] = defaultdict(list)
    for file in _listed(folder).below or ():
        if matches(str(file)):
            found[str(file)] = [file]
        elif (above := next((one for one in file.parents if matches(str(one))), None)) is not None:
            folders[above].append(file)
    for one, below in folders.items():
        one.below = below
        found[str(one)] = take(one)
    logs = [log for name in sorted(found) for log in found[name]]
    if not logs:
        raise StorageError(f"{url}: no file matches. Quote the pattern, or look where it starts.")
    return logs


def _translated(url: str) -> str:
    """A pattern as a regular expression, with the rules of `glob`: no wildcard matches a leading dot."""
    scheme, _, rest = url.partition("://")
    parts = []
    for part in rest.split("/"):
        if part == "**":
            parts.append(r"(?:(?!\.)[^/]+/)*")
        else:
            parts.append((r"(?!\.)" if part[:1] in "*?[" else "") + _segment(part) + "/")
    joined = "".join(parts)
    # A pattern that ends in `**` matches files and folders at any depth.
    end = r"(?!\.)[^/]+" if rest.endswith("/**") else ""
    return re.escape(f"{scheme}://") + (joined + end if end else joined.removesuffix("/"))


def _segment(part: str) -> str:
    """One part of a pattern."""
    out, at = "", 0
    while at < len(part):
        char, at = part[at], at + 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := part.find("]", at + 1)) > 0:
            inner = part[at:end].replace("\\", r"\\")
            out += f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
            at = end + 1
        else:
            out += re.escape(char)
    return out


def _close_names(path: RemoteFile) -> str:
    close = close_names(path.name, sorted(path.parent.entries()))
    return f" Did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _of_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))
