"""Loads a tokenizer from a folder or the hub.

`tokenizer.json` is taken literally, as samplers do that read the file themselves. transformers 5 rebuilds some
tokenizers from their class name and drops parts of the file: SmolLM2 declares `GPT2Tokenizer` and loses its
splitting of digits. So transformers loads only what has no `tokenizer.json`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from tito_audit.errors import TokenizerError
from tito_audit.settings.values import expand_user
from tito_audit.tokens.bounds import (
    DEFINITION_BYTES,
    MAX_ADDED_STATES,
    SETTINGS_BYTES,
    check_definition,
    check_file,
    check_tokens,
    read_file,
    read_template,
    reading_definition,
)
from tito_audit.tokens.cache import LazyBackend, StoredTokenizer, cache_folder, open_store
from tito_audit.tokens.hub import FILES, download_snapshot
from tito_audit.tokens.limited import (
    OutOfLimits,
    check_loads,
    convert_with_transformers,
    has_transformers,
    library_error,
    run_in_child,
    runs_in_child,
)
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    import tokenizers

_OTHER_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_CLASSIC_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_ID_GAP = 1 << 20
"""How far the highest id may be above twice the number of tokens."""
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(name_or_dir: str, *, trust_remote_code: bool = False, commit: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, or of a hub repository if no such folder exists; TokenizerError if neither works.

    A repository is `ORG/NAME`, or `ORG/NAME@REVISION` with a branch, tag or commit. With `commit` the name is
    always a repository, at that commit. Code in a folder runs only with `trust_remote_code`, and only if there is
    no `tokenizer.json`.
    """
    with reading_definition(name_or_dir):
        path = expand_user(name_or_dir)
        if commit is None and os.path.isfile(path):  # noqa: PTH113  pathlib's raises if the name is too long
            raise TokenizerError(
                f"{name_or_dir}: this is a file, and a tokenizer is a folder (tokenizer.json, "
                f"tokenizer_config.json).\nPass the folder it is in: {path.parent}"
            )
        if commit is None and os.path.isdir(path):  # noqa: PTH112
            tokenizer = _load_folder(path, name_or_dir, trust_remote_code)
            tokenizer.folder = path
            return tokenizer
        folder = download_snapshot(name_or_dir, commit)
        tokenizer = _load_folder(folder, name_or_dir, trust_remote_code)
        tokenizer.folder, tokenizer.commit = folder, folder.name
        return tokenizer


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """A hash of all files in a tokenizer's folder that it may be loaded from."""
    digest = sha256()
    folder = tokenizer.folder
    patterns = (*FILES, "*.py")
    files = {file for pattern in patterns for file in folder.glob(pattern)} if folder is not None else set()
    for file in sorted(file for file in files if file.is_file()):
        if file.stat().st_size > DEFINITION_BYTES:
            continue  # too large to be read as part of a tokenizer
        digest.update(f"{file.relative_to(folder or file)}\n".encode() + _hash_file(file))
    return digest.hexdigest()


def _load_folder(path: Path, name: str, trust_remote_code: bool) -> Tokenizer:
    if (path / "tokenizer.json").exists():
        return _load_json(path, name)
    has_code = _read_config(path).get("auto_map") is not None
    if not has_code and not any(next(path.glob(pattern), None) for pattern in _OTHER_VOCABULARIES):
        raise TokenizerError(
            f"{name}: no tokenizer.json here, nor any other vocabulary.\n"
            "Without a tokenizer nothing can be re-encoded and compared.\n"
            "Pass the folder that holds the model's tokenizer.json, usually the one with its config.json."
        )
    # transformers makes it in a child process, from SentencePiece or by the folder's own code.
    if not has_transformers():
        raise TokenizerError(
            f"{name}: no tokenizer.json here, only a vocabulary that transformers has to convert (transformers is "
            "not installed).\n"
            "Install it: pip install 'tito-audit[transformers]'\nOr pass a folder with a tokenizer.json."
        )
    for pattern in _OTHER_VOCABULARIES:
        for file in path.glob(pattern):
            check_file(file)
    try:
        parts = convert_with_transformers(path, code=trust_remote_code)
    except OutOfLimits as error:  # old formats and remote code raise anything
        raise TokenizerError(
            f"{name}: no tokenizer.json, and transformers cannot build one from the other files ({error}).\n"
            "Pass a folder with a tokenizer.json, or install what conversions need: "
            "pip install 'tito-audit[transformers]'.\n"
            "If the repository brings its own code and you trust it, allow remote code."
        ) from error
    if parts["definition"] is None:
        raise TokenizerError(
            f"{name}: {parts['kind']} is written in Python and has no fast form; its tokens cannot "
            "be compared with recorded ones.\nPass a folder with a tokenizer.json."
        )
    backend = _make_backend(path, parts["definition"].encode(), {}, {})
    return _make_tokenizer(name, path, backend, parts["special"], _parse_templates(parts["chat_template"], path))


def _load_json(path: Path, name: str) -> Tokenizer:
    """The tokenizer that `tokenizer.json` and its settings define, from the cache if it is stored there."""
    import tokenizers

    config = _read_config(path)
    # Like transformers, pass a template the classic names, every setting that ends in `_token`, and
    # `extra_special_tokens` if it is an object.
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key in _CLASSIC_TOKENS or key.endswith("_token")}
    if isinstance(extra, Mapping):
        named |= extra
    contents = {key: _token_text(value) for key, value in named.items()}
    special = {key: content for key, content in contents.items() if content is not None}
    templates = _read_templates(path, config)
    file = path / "tokenizer.json"
    check_file(file)
    if cache_folder() is None:
        backend = _make_backend(file, read_file(file, DEFINITION_BYTES), config, special)
        return _make_tokenizer(name, path, backend, special, templates)
    digest = _hash_file(file)

    @reading_definition(file)
    def load() -> tokenizers.Tokenizer:
        stored = store.definition if store is not None else None
        if stored is not None:
            return _make_backend(file, stored, config, special, checked=True)
        content = read_file(file, DEFINITION_BYTES)
        if sha256(content).digest() != digest:
            raise TokenizerError(
                f"{file}: the file changed while it was in use, so its ids may mean something else now.\n"
                "Run again once the folder no longer changes."
            )
        checked = store is not None and store.tables is not None
        return _make_backend(file, content, config, special, checked=checked)

    beside = [(name, read_file(path / name, SETTINGS_BYTES)) for name in _SETTINGS if (path / name).is_file()]
    store = open_store(tokenizers.__version__, [(file.name, digest), *beside])
    if store is None or store.tables is None:
        backend = load()
        # A slow tokenizer is checked in every run, so it is not stored.
        return _make_tokenizer(name, path, backend, special, templates, None if runs_in_child(backend) else store)
    tables = store.tables
    return Tokenizer(
        name=name,
        backend=cast("tokenizers.Tokenizer", LazyBackend(load, lambda: store.excerpts)),
        vocabulary=Vocabulary(tables.entries),
        special_tokens=special,
        chat_templates=templates,
        eos_ids=tables.eos_ids,
        bos_id=tables.bos_id,
        store=store,
    )


def _make_backend(
    file: Path, content: bytes, config: Mapping[str, Any], special: Mapping[str, str], *, checked: bool = False
) -> tokenizers.Tokenizer:
    """The library's tokenizer from the content of `tokenizer.json`, with the tokens of the settings.

    It encodes in a child process unless it is known to be fast; `checked`: an earlier run found that it is.
    """
    import tokenizers

    because = None
    if not checked:
        content, because = check_definition(content, file)
    try:
        if because is not None:
            check_loads(content.decode("utf-8"))
        backend = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # tokenizers raises plain Exception, whatever is wrong; or panics
        raise TokenizerError(
            f"{file}: this is not a tokenizer ({library_error(error)}).\nIt may be cut off, or a pointer that "
            "git-lfs left in place of the file.\nDownload it again (`git lfs pull` in a clone)."
        ) from error
    _add_missing_tokens(backend, config, special, file)
    backend.no_truncation()
    backend.no_padding()
    return backend if because is None else run_in_child(backend)


def _hash_file(file: Path) -> bytes:
    """The SHA-256 of a file, without reading all of it into memory."""
    try:
        with file.open("rb") as content:
            return file_digest(content, "sha256").digest()
    except OSError as error:
        raise TokenizerError(f"{file}: this tokenizer cannot be read ({error}).") from error


def _make_tokenizer(
    name: str,
    path: Path,
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    templates: Mapping[str, str],
    store: StoredTokenizer | None = None,
) -> Tokenizer:
    bos = special.get("bos_token")
    vocabulary = Vocabulary(backend)
    entries = vocabulary.entries
    if int(entries.known.sum()) < backend.get_vocab_size(with_added_tokens=True) or len(entries.far_ids):
        _check_highest_id(backend, path)
    eos = special.get("eos_token")
    ids = [backend.token_to_id(eos)] if eos is not None else []
    stated = _read_object(path / "generation_config.json").get("eos_token_id")
    ids += stated if isinstance(stated, list) else [stated]
    return Tokenizer(
        name=name,
        backend=backend,
        vocabulary=vocabulary,
        special_tokens=special,
        chat_templates=templates,
        eos_ids=tuple(dict.fromkeys(i for i in ids if type(i) is int)),
        bos_id=backend.token_to_id(bos) if bos is not None else None,
        store=store,
    )


def _check_highest_id(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Raise TokenizerError for ids so high that tables of them would fill the memory."""
    count = backend.get_vocab_size(with_added_tokens=True)
    highest = max(backend.get_vocab(with_added_tokens=True).values())
    if highest > count * 2 + _MAX_ID_GAP:
        raise TokenizerError(
            f"{path}: an id of {highest:,} among {count:,} tokens.\n"
            "No model has so many. The file is damaged: download the tokenizer again."
        )


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json if it is of the old kind; {} without either."""
    config = _read_object(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = config | _read_object(path / "special_tokens_map.json")
    return config


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file."""
    try:
        value = orjson.loads(read_file(file, SETTINGS_BYTES))
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError as error:
        raise TokenizerError(
            f"{file}: cannot be read ({error}).\nIt names the special tokens and often holds the chat "
            "template.\nDownload it again, or fix the JSON."
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds no JSON object, so it is not a tokenizer's settings.")
    return value


def _token_text(value: object) -> str | None:
    """The text of a special token, which may be stated as a string or as an object; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], file: Path
) -> None:
    """Add the tokens that only the settings name, in the order of transformers."""
    import tokenizers

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, Mapping) else ()
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    others = listed if isinstance(listed, list) else []
    wanted: dict[str, tokenizers.AddedToken] = {}
    for value in (
        *(value for _, value in sorted(entries, key=lambda entry: entry[0].zfill(12))),
        *(config.get(key, text) for key, text in special.items()),
        *others,
    ):
        content = _token_text(value)
        if content is None or content in present or content in wanted:
            continue
        flags = {"special": True}
        if isinstance(value, Mapping):
            flags = {key: bool(value[key]) for key in _TOKEN_FLAGS if key in value}
        token = tokenizers.AddedToken(content, **flags)
        if content in special.values():
            token.special = True
        wanted[content] = token
    if wanted:
        _check_highest_id(backend, file)  # at the highest number the library searches forever for a free id
        check_tokens((*present, *wanted), file, MAX_ADDED_STATES)
        backend.add_tokens(list(wanted.values()))


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; template files replace those of the settings."""
    templates: dict[str, str] = {}
    default = path / "chat_template.jinja"
    try:
        if default.exists():
            templates["default"] = read_template(default)
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            templates[file.name.removesuffix(".jinja")] = read_template(file)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path}: a chat template cannot be read ({error}).\nThe messages are rendered with it."
        ) from error
    return templates or _parse_templates(config.get("chat_template"), path)


def _parse_templates(value: object, where: Path) -> dict[str, str]:
    """Chat templates by name from a `chat_template` setting: a text, a list of {name, template}, or an object."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, Mapping):
        named = {key: text for key, text in value.items() if isinstance(key, str) and isinstance(text, str)}
        if len(named) == len(value):
            return named
    raise TokenizerError(
        f"{where}: `chat_template` is neither text nor named texts, so no messages can be rendered.\n"
        "Fix tokenizer_config.json, or pass a template file with --chat-template."
    )
