"""What frameworks say of chat templates: `python templates_writer.py ASKED`, by a Python that has trl, miles and
renderers.

Not a test: tests run it with another Python. ASKED is a JSON file: a list of chat templates as source. It prints
JSON:

    trl        for each template, what `is_chat_template_prefix_preserving` of TRL returns; null where it raises
    miles      for each template, which checks of miles' `run_all_checks` fail, of those it runs; as texts, by name
    renderers  for each family of renderers, what its renderer declares as `is_prefix_stable`; null where unknown

TRL and miles need torch and a server to be imported, so only the functions named here are taken from their files,
and they render with the template environment of `tests/template_oracle/chat.py`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.template_oracle.chat import Refusal, Template

JUDGE = "is_chat_template_prefix_preserving"
ROLES = {"tool": {"tool"}, "tool and user": {"tool", "user"}}


class Tokenizer:
    """As much of a tokenizer as TRL's function calls: each character is a token."""

    def __init__(self, source: str) -> None:
        self._template = Template(source)

    def apply_chat_template(
        self, messages: Any, tokenize: bool, return_dict: bool, add_generation_prompt: bool = False
    ) -> list[str]:
        try:
            return list(self._template.text(messages, opened=add_generation_prompt))
        except Refusal as refusal:
            raise refusal.__cause__ or refusal from None


def says_trl(sources: list[str]) -> list[bool | None]:
    """Its verdict on each template."""
    (package,) = find_spec("trl").submodule_search_locations
    tree = ast.parse((Path(package) / "chat_template_utils.py").read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == JUDGE)
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    names: dict[str, Any] = {"ProcessorMixin": ()}
    exec(compile(ast.Module([function], []), JUDGE, "exec"), names)

    def verdict(source: str) -> bool | None:
        try:
            return bool(names[JUDGE](Tokenizer(source)))
        except Exception:
            return None

    return [verdict(source) for source in sources]


@contextmanager
def instead(**modules: ModuleType) -> Iterator[None]:
    """With these modules in place of those of that name, `__` for a dot."""
    named = {name.replace("__", "."): module for name, module in modules.items()}
    before = {name: sys.modules.get(name) for name in named}
    sys.modules.update(named)
    yield
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def module(name: str, **contents: Any) -> ModuleType:
    built = ModuleType(name)
    vars(built).update(contents)
    return built


def rendered(
    source: str, messages: list[Any], add_generation_prompt: bool = True, tools: Any = None, **arguments: Any
) -> str:
    """What miles calls to render: arguments of tool calls parsed, no content as an empty text."""
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            message["content"] = message.get("content") or ""
            for call in message["tool_calls"]:
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    try:
        return _compiled(source).text(messages, tools, opened=add_generation_prompt, **arguments)
    except Refusal as refusal:
        raise ValueError(str(refusal)) from None


_KEPT: dict[str, Template] = {}


def _compiled(source: str) -> Template:
    if source not in _KEPT:
        _KEPT[source] = Template(source)
    return _KEPT[source]


def says_miles(sources: list[str]) -> list[dict[str, dict[str, str | None]]]:
    """For each template and the roles that may follow an answer: its checks by name, with what failed or null."""
    utils, tests = "miles.utils.chat_template_utils", "miles.utils.test_utils"
    with instead(
        **{
            utils.replace(".", "__"): module(utils),
            f"{utils}.template".replace(".", "__"): module(
                f"{utils}.template", apply_chat_template_from_str=rendered
            ),
            f"{tests}.mock_sglang_server".replace(".", "__"): module(
                f"{tests}.mock_sglang_server", ProcessFn=object, ProcessResult=object
            ),
        }
    ):
        from miles.utils.test_utils.chat_template_verify import run_all_checks

    return [
        {
            name: {
                check.case_name: None if check.passed else check.error or ""
                for check in run_all_checks(source, allowed_append_roles=roles, thinking="both")
            }
            for name, roles in ROLES.items()
        }
        for source in sources
    ]


def says_renderers() -> dict[str, bool | None]:
    """What each family's renderer declares, as it is configured when nobody says otherwise."""
    sys.modules.setdefault("openai_harmony", MagicMock())
    from renderers import base, configs

    base._populate_registry()
    return {
        name: _declared(kind, configs._config_class_for(name)) for name, kind in base.RENDERER_REGISTRY.items()
    }


def _declared(kind: Any, config: Any) -> bool | None:
    renderer = kind.__new__(kind)  # what it declares depends on its configuration alone
    renderer.config = config()
    try:
        return bool(renderer.is_prefix_stable)
    except Exception:
        return None


def main(path: str) -> None:
    sources = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps({"trl": says_trl(sources), "miles": says_miles(sources), "renderers": says_renderers()}))


if __name__ == "__main__":
    main(sys.argv[1])
