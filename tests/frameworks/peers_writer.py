"""What miles appends for new messages, what chatlint says of templates, and which templates mistral-common writes:
`python peers_writer.py miles|chatlint|mistral ASKED`, as JSON, by the Python that has them.

ASKED is a JSON file. For miles: for each folder with a tokenizer, `class`, the name in `TITOTokenizerType`, and
`turns`, each with `messages` and `tools`, `answer`, how many messages were there before the new ones, and `seen`,
their ids. It prints for each turn the ids of `merge_tokens`, or null where that raises.

For chatlint: a list of files. It prints as `shapes` its conversations, by name, each with the messages of its
prompts and tools; and as `verdicts`, for each file and conversation, what `check_prefix_stability` says: `pass`,
`skip`, or the kind of its failure.

For mistral: a list of versions of its tokenizer. It prints for each the chat template, and the file of the
tokenizer.

miles needs torch and a server to be imported, so only its file is: it renders with the template environment of
`tests/template_oracle/chat.py`.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers

from tests.frameworks.templates_writer import instead, module, rendered

UTILS = "miles.utils.chat_template_utils"


class Tokenizer:
    """As much of a tokenizer as miles' classes call."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.source = config["chat_template"]
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


def apply_chat_template(messages: Any, *, tokenizer: Tokenizer, tokenize: bool, **arguments: Any) -> str:
    assert not tokenize
    return rendered(tokenizer.source, json.loads(json.dumps(messages)), **arguments)


@cache
def of_miles() -> ModuleType:
    """miles' module of its tokenizers, rendering with our environment."""
    (package,) = find_spec("miles").submodule_search_locations
    spec = spec_from_file_location("tito_tokenizer", Path(package, *UTILS.split(".")[1:], "tito_tokenizer.py"))
    loaded = module_from_spec(spec)
    sys.modules[spec.name] = loaded
    compares = type("TokenSeqComparator", (), {"collect_special_ids": staticmethod(lambda tokenizer: set())})
    stubs = {
        UTILS: module(UTILS),
        f"{UTILS}.template": module(
            f"{UTILS}.template",
            apply_chat_template=apply_chat_template,
            assert_messages_append_only_with_allowed_role=lambda *arguments: None,
        ),
        f"{UTILS}.token_seq_comparator": module(f"{UTILS}.token_seq_comparator", TokenSeqComparator=compares),
    }
    with instead(**{name.replace(".", "__"): stub for name, stub in stubs.items()}):
        spec.loader.exec_module(loaded)
    return loaded


def miles(entries: dict[str, Any]) -> dict[str, Any]:
    """Its ids for each turn of each folder."""
    answers = {}
    for folder, entry in entries.items():
        theirs = of_miles().get_tito_tokenizer(Tokenizer(Path(folder)), entry["class"])
        answers[folder] = [merged(theirs, **turn) for turn in entry["turns"]]
    return answers


def merged(theirs: Any, messages: list[Any], tools: list[Any], answer: int, seen: list[int]) -> list[int] | None:
    try:
        return list(theirs.merge_tokens(messages[:answer], messages, seen, tools or None))
    except Exception:
        return None


def chatlint(files: list[str]) -> dict[str, Any]:
    """Its conversations, and its verdicts."""
    shapes, render = import_module("chatlint.shapes").all_shapes(), import_module("chatlint.render")
    properties = import_module("chatlint.properties")

    def verdict(template: Any, shape: Any) -> str:
        result = properties.check_prefix_stability(template, shape)
        return str(result.metrics.get("kind", result.verdict))

    return {
        "shapes": {shape.name: {"prompts": shape.snapshots, "tools": shape.tools or []} for shape in shapes},
        "verdicts": {
            file: {shape.name: verdict(render.Template.from_path(file), shape) for shape in shapes}
            for file in files
        },
    }


MODELS = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
}
"""The tokenizers in mistral-common."""


def mistral(versions: list[str]) -> dict[str, Any]:
    """Its templates."""
    templates = import_module("mistral_common.integrations.chat_templates.chat_templates")
    (package,) = find_spec("mistral_common").submodule_search_locations
    files = {version: Path(package, "data", MODELS[version]) for version in versions}
    write = templates.convert_tokenizer_to_chat_template
    return {version: {"file": str(file), "template": write(file)} for version, file in files.items()}


def main(peer: str, path: str) -> None:
    entries = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps({"miles": miles, "chatlint": chatlint, "mistral": mistral}[peer](entries)))


if __name__ == "__main__":
    main(*sys.argv[1:])
