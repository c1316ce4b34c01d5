"""What is kept of a chat template from one run to the next: the same is written with it and without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.test_render_fast import OWN, SHARED, TOYS, cases
from tests.tiers import examples, some
from tests.toy import fast_text, spans_fast
from tests.world import TOY
from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import as_messages
from tito_audit.render import facts
from tito_audit.render.facts import Facts, read_facts
from tito_audit.render.limits import Budget
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.render.sandbox import ChatEnvironment
from tito_audit.render.spans import render_spans
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT, Template
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

CHAT = as_messages([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "there"}], "m")
REAL = sorted(path for path in SHARED.glob("*/") if (path / "tokenizer.json").is_file())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache of a test's own."""
    place = tmp_path / "cache"
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(place))
    return place


def renderer_of(source: str | None = None, tokenizer: Path = TOY, **choices) -> tuple[Renderer, Template]:
    """A renderer as a run makes one, and its template."""
    renderer = make_renderer(load_tokenizer(str(tokenizer)), chat_template=source, **choices)
    return renderer, renderer.template(False)


def used(source: str | None = None, tokenizer: Path = TOY, chats=(CHAT,), **choices) -> Renderer:
    """The renderer of a run that used it for chats and kept what it learnt."""
    loaded = load_tokenizer(str(tokenizer))
    renderer = make_renderer(loaded, chat_template=source, **choices)
    for chat in chats:
        spans_fast(renderer, chat)
    loaded.save()
    return renderer


def ending(with_what: str) -> str:
    """A template that writes nothing but a generation prompt."""
    return "{% if add_generation_prompt %}{{ " + with_what + " }}{% endif %}"


def is_compiled(template: Template) -> bool:
    return "_reference" in vars(template)


def outcome(call, *values, **named):
    """What a call returns, or that it refused."""
    try:
        return call(*values, **named)
    except RenderError as error:
        return str(error)


def assert_the_same_is_written(source: str | None, tokenizer: Path, count: int) -> None:
    """With a template that is known and with one that is not."""
    loaded = load_tokenizer(str(tokenizer))
    cold = make_renderer(loaded, chat_template=source)
    dice = random.Random(f"{source} {tokenizer.name}")
    inputs = [cases(dice) for _ in range(count)]
    want = [outcome(spans_fast, cold, *case[:3]) for case in inputs]
    loaded.save()
    templates = load_tokenizer(str(tokenizer)).chat_templates if source is None else {"default": source}
    warm = make_renderer(load_tokenizer(str(tokenizer)), chat_template=source)
    compiled_before = [is_compiled(template) for template in warm.templates.values()]
    got = [outcome(spans_fast, warm, *case[:3]) for case in inputs]
    assert got == want
    assert compiled_before == [False] * len(warm.templates)
    for name, template in warm.templates.items():
        environment = ChatEnvironment(Budget(SIZE_LIMIT, TIME_LIMIT))
        assert template._facts == read_facts(environment.parse(templates[name]))[0]
    for messages, tools, kwargs, opens in inputs:
        options = {"add_generation_prompt": opens, "template_kwargs": kwargs}
        assert outcome(warm.render, messages, tools, **options) == outcome(cold.render, messages, tools, **options)
        whole = outcome(render_spans, warm, messages, tools, kwargs)
        assert whole == outcome(render_spans, cold, messages, tools, kwargs)


@pytest.mark.parametrize("name", OWN)
def test_a_template_that_is_known_writes_what_it_wrote_before(name):
    assert_the_same_is_written(OWN[name], TOY, examples(30, 60))


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_a_tokenizers_own_template_writes_what_it_wrote_before(name):
    assert_the_same_is_written(None, TOYS / name, examples(30, 60))


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason="no tokenizer folders are shared here")
@pytest.mark.parametrize("tokenizer", some(REAL[::-1], 1), ids=lambda path: path.name)
def test_a_published_template_writes_what_it_wrote_before(tokenizer):
    loaded = load_tokenizer(str(tokenizer))
    if not loaded.chat_templates:
        pytest.skip("it comes without a template")
    assert_the_same_is_written(None, tokenizer, examples(15, 25))


def test_a_known_template_is_compiled_when_it_is_run_and_not_before():
    first = used()
    renderer, template = renderer_of()
    assert spans_fast(renderer, CHAT) is not None
    assert not is_compiled(template)
    want = first.render(CHAT, add_generation_prompt=True)
    assert renderer.render(CHAT, add_generation_prompt=True) == want
    assert is_compiled(template)
    renderer, template = renderer_of()
    renderer.load()
    assert is_compiled(template)


BROKEN = ["{% if %}", "{{ 'x", "{% endfor %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ x | no_such }}"]


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_template_that_does_not_compile_is_refused_at_once_whatever_is_kept(source, folder, monkeypatch):
    used()
    errors = []
    for place in (folder, folder, "off"):
        monkeypatch.setenv("TITO_AUDIT_CACHE", str(place))
        with pytest.raises(SetupError, match="the chat template cannot be used") as raised:
            used(source)
        errors.append(str(raised.value))
    assert errors[0] == errors[1] == errors[2]


def test_a_template_is_known_under_its_own_limits_and_surroundings_only(monkeypatch):
    used()
    assert renderer_of()[1].is_known_to_compile
    assert not renderer_of(time_limit=5.0)[1].is_known_to_compile
    assert not renderer_of(size_limit=1000)[1].is_known_to_compile
    assert not renderer_of(OWN["jumps"])[1].is_known_to_compile
    assert not renderer_of(tokenizer=TOYS / "toy_metaspace")[1].is_known_to_compile
    for around in (lambda: "another version of something", lambda: None):
        monkeypatch.setattr(facts, "_hash_code", around)
        assert not renderer_of()[1].is_known_to_compile


def test_what_templates_are_read_with_is_told_by_files_and_versions(tmp_path, monkeypatch):
    names = {facts._hash_code.__wrapped__()}
    room = tmp_path / "render"
    here = Path(facts.__file__).parent
    for file in here.rglob("*.py"):
        copied = room / file.relative_to(here)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())
    monkeypatch.setattr(facts, "__file__", str(room / "facts.py"))
    assert {facts._hash_code.__wrapped__()} == names
    read_by = room / "fast" / "static_check.py"
    read_by.write_text(read_by.read_text() + "\n")
    names.add(facts._hash_code.__wrapped__())
    with monkeypatch.context() as patch:
        patch.setattr("sys.version", "another")
        names.add(facts._hash_code.__wrapped__())
    jinja = tmp_path / "jinja2"
    jinja.mkdir()
    (jinja / "__init__.py").write_text("__version__ = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "jinja2")
    names.add(facts._hash_code.__wrapped__())
    (jinja / "parser.py").write_text("")
    names.add(facts._hash_code.__wrapped__())
    assert len(names) == 5
    monkeypatch.setattr(facts, "find_spec", lambda _: None)
    assert facts._hash_code.__wrapped__() is None


@pytest.mark.parametrize(
    "note",
    [
        {"minijinja_safe": "yes"},
        {"minijinja_safe": 1},
        {"longest_constant": 0},
        {"longest_constant": True},
        {"joins_values": None},
        {"has_documents": 0},
        {"generation_prompt_variables": "enable_thinking"},
        {"generation_prompt_variables": [1]},
    ],
    ids=str,
)
def test_a_note_that_holds_something_else_is_as_good_as_none(note):
    loaded = used()
    name = loaded.template(False)._stored._name
    again = load_tokenizer(str(TOY))
    again.store.add_note(name, {**again.store.note(name), **note})
    again.save()
    renderer, template = renderer_of()
    assert not template.is_known_to_compile
    assert spans_fast(renderer, CHAT) == render_spans(renderer, CHAT)
    without = {key: value for key, value in again.store.note(name).items() if key not in note}
    again.store.add_note(name, without)
    again.save()
    assert renderer_of()[1].is_known_to_compile == ("generation_prompt_variables" in note)


def test_generation_prompts_are_kept_for_the_values_that_decide_them():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}" + ending("'<' ~ mode ~ '>'")
    modes = ["a", "1", 1, True, None, "", "ü", {"k": 1}, 1.5, 1 << 70]
    loaded = load_tokenizer(str(TOY))
    cold = make_renderer(loaded, chat_template=source).template(False)
    want = [cold.fixed_generation_prompt({"mode": mode}) for mode in modes] + [cold.fixed_generation_prompt({})]
    loaded.save()
    assert want == [f"<{mode}>" for mode in modes] + ["<>"]
    _, warm = renderer_of(source)
    scalars = [mode for mode in modes if type(mode) in (str, int, bool, type(None))]
    assert [warm.fixed_generation_prompt({"mode": mode}) for mode in scalars] == [f"<{mode}>" for mode in scalars]
    assert warm.fixed_generation_prompt({}) == "<>"
    assert not is_compiled(warm)
    assert [warm.fixed_generation_prompt({"mode": mode}) for mode in modes] + [
        warm.fixed_generation_prompt({})
    ] == want
    assert is_compiled(warm)  # for the values that are no keys


@pytest.mark.parametrize("what", ["dict", "range", "raise_exception"])
def test_a_generation_prompt_that_may_be_another_in_each_run_is_not_kept(what):
    source = ending(what)
    assert used(source).template(False).fixed_generation_prompt({}) not in (None, "")
    _, again = renderer_of(source)
    assert again._facts.generation_prompt_variables == (what,)
    again.fixed_generation_prompt({})
    assert is_compiled(again)


def test_not_more_generation_prompts_are_kept_than_there_is_room_for():
    source = ending("mode")
    loaded = load_tokenizer(str(TOY))
    cold = make_renderer(loaded, chat_template=source).template(False)
    for number in range(2 * facts._MAX_PROMPTS):
        assert cold.fixed_generation_prompt({"mode": f"{number}"}) == f"{number}"
    assert cold.fixed_generation_prompt({"mode": "x" * facts._MAX_STORED_LENGTH}) == "x" * facts._MAX_STORED_LENGTH
    loaded.save()
    name = cold._stored._name
    assert len(load_tokenizer(str(TOY)).store.note(name)["openers"]) == facts._MAX_STORED


def test_a_generation_prompt_that_cannot_be_written_is_tried_again_in_another_run():
    source = "{% for m in messages %}{% endfor %}" + ending("1 + mode")
    loaded = load_tokenizer(str(TOY))
    cold = make_renderer(loaded, chat_template=source).template(False)
    assert cold.fixed_generation_prompt({"mode": "x"}) == ""
    loaded.save()
    _, again = renderer_of(source)
    assert again.is_known_to_compile
    assert again.fixed_generation_prompt({"mode": "x"}) == ""
    assert is_compiled(again)


def test_a_template_that_only_just_compiles_is_compiled_at_once_in_every_run():
    def nested(depth: int) -> str:
        return "{{ " + "(" * depth + "1" + ")" * depth + " }}"

    def compiles(depth: int) -> bool:
        try:
            return renderer_of(nested(depth))[0] is not None
        except SetupError:
            return False

    most, least = 3000, 1
    while most - least > 1:
        middle = (most + least) // 2
        least, most = (middle, most) if compiles(middle) else (least, middle)
    for depth, is_kept in [(least - 2, False), (3, True)]:
        used(nested(depth))
        _, template = renderer_of(nested(depth))
        assert template.is_known_to_compile == is_kept
        assert template.run({}) == "1"


def test_a_known_template_that_cannot_be_compiled_after_all_is_refused_in_the_same_words(monkeypatch):
    used()
    renderer, _ = renderer_of()

    def fails(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(ChatEnvironment, "from_string", fails)
    with pytest.raises(SetupError) as late:
        renderer.render(CHAT, add_generation_prompt=False)
    monkeypatch.setenv("TITO_AUDIT_CACHE", "off")
    with pytest.raises(SetupError) as early:
        renderer_of()
    assert str(late.value) == str(early.value)


def test_a_template_that_minijinja_may_not_run_is_not_read_again():
    source = "{% for m in messages %}{{ m | pprint }}{% endfor %}"
    used(source)
    renderer, template = renderer_of(source)
    assert template.is_known_to_compile
    assert fast_text(renderer, CHAT) is None
    assert template._facts == Facts(False, 1, False, False, None)
    assert not is_compiled(template)
