"""Tokenizer files and chat templates from strangers: bounded in depth, size and time."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.command import run, written
from tests.tables import stored
from tests.test_render import CHAT, render
from tests.world import TOY
from tito_audit.errors import EncodeError, RenderError, SetupError, TokenizerError
from tito_audit.render import limits
from tito_audit.render.fast.render import NeedsReference
from tito_audit.render.limits import MAX_DEPTH, count_waste, is_too_slow, measure
from tito_audit.render.template import compile_template
from tito_audit.tokens import limited
from tito_audit.tokens.bounds import check_definition, count_prefixes
from tito_audit.tokens.limited import runs_in_child
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

LOADS_ANEW = True

TOYS = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers"


def changed(folder: Path, **parts: object) -> str:
    """A toy tokenizer with other parts."""
    whole = json.loads((TOY / "tokenizer.json").read_text(encoding="utf-8"))
    whole |= parts
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    return str(folder)


def split(*regexes: str) -> dict[str, object]:
    """A pre-tokenizer that splits by regexes, then into bytes."""
    steps: list[dict[str, object]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in regexes
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, last]}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_known_tokenizers_run_in_this_process(name: str) -> None:
    assert not runs_in_child(load_tokenizer(str(TOYS / name)).backend)


def test_a_tokenizer_that_is_not_known_gives_the_same_ids_in_a_process_of_its_own(tmp_path: Path) -> None:
    ordinary = load_tokenizer(str(TOY))
    before = json.loads((TOY / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]["pretokenizers"]
    regex = before[0]["pattern"]["Regex"]
    other = load_tokenizer(changed(tmp_path, pre_tokenizer=split(f"(?:{regex})")))
    assert runs_in_child(other.backend)
    texts = ["", "Hello  world's\n\n 123", "é中\ud83d", "<|im_start|>user\nhi<|im_end|>"]
    for text, ids in zip(texts, ordinary.encode_batch(texts), strict=True):
        assert np.array_equal(other.encode(text), ids)
        assert np.array_equal(other.encode_single_threaded([text])[0], ids)
    assert not other.use_fast()


@pytest.mark.parametrize(
    ("parts", "text", "reason"),
    [
        ({"pre_tokenizer": split(r"(a+)+$")}, "a" * 40 + "b", "retry-limit"),
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 60}}, "a", "memory|finished"),
    ],
)
def test_what_takes_for_ever_is_one_line(
    tmp_path: Path, parts: dict[str, object], text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "ENCODING_SECONDS", 0.5)
    folder = changed(tmp_path, **parts)
    with pytest.raises(TokenizerError, match=reason) as raised:
        load_tokenizer(folder).encode(text)
    assert "cannot encode a text of" in str(raised.value)


def test_a_limit_is_not_waited_for_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(changed(tmp_path, pre_tokenizer=split(r"(a+)+$")))
    with pytest.raises(EncodeError, match="retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    assert len(tokenizer.encode("Hello"))
    monkeypatch.setattr(limited, "_MAX_WASTED_SECONDS", 0.1)
    messages = [failure(tokenizer, "a" * 40 + "b" * number) for number in range(2, 9)]
    assert "it is not asked again after an earlier text: " in messages[-1]
    assert "not asked again" in failure(tokenizer, "Hello you")
    other = load_tokenizer(str(tmp_path))
    assert len(other.encode("Hello"))


def test_short_texts_that_all_take_long_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "_MAX_WASTED_SECONDS", 0.2)
    tokenizer = load_tokenizer(changed(tmp_path, normalizer={"type": "Prepend", "prepend": "a" * 500_000}))
    message = ""
    for number in range(30):
        with suppress(EncodeError):
            tokenizer.encode("b" * number)
            continue
        message = failure(tokenizer, "c")
        break
    assert "it is not asked again after an earlier text: short texts take too long" in message


def failure(tokenizer: Tokenizer, text: str) -> str:
    """Why it cannot encode a text."""
    with pytest.raises(EncodeError) as raised:
        tokenizer.encode(text)
    return str(raised.value)


def test_a_row_that_such_a_tokenizer_cannot_encode_is_a_finding(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a" * 40 + "b"}, {"role": "assistant", "content": "aaaa"}]
    row = {"messages": chat, "prompt_ids": [1, 2], "completion_ids": [3, 4]}
    log = written(tmp_path / "log.jsonl", [row])
    folder = changed(tmp_path, pre_tokenizer=split(r"(a+)+$"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    code, out, err = run("scan", str(log), "-t", folder, "--no-config")
    assert (code, err) == (1, ""), out + err
    assert "cannot encode a text of" in out
    assert "clean" not in out


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"added_tokens": [{"id": 2**31 - 1, "content": "<x>", "special": True}]}, "not a tokenizer|an id of"),
        ({"added_tokens": [{"id": 10**18, "content": "<x>", "special": True}]}, "not a tokenizer"),
        (
            {"added_tokens": [{"id": 5000, "content": "x" * 10_000, "special": True}]},
            "a token of 10,000 characters",
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 100}}, "has 100 steps"),
        ({"pre_tokenizer": split("(")}, "not a tokenizer"),
        ({"pre_tokenizer": 3}, "not a tokenizer"),
    ],
)
def test_what_no_tokenizer_needs_is_refused(tmp_path: Path, parts: dict[str, object], says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        load_tokenizer(changed(tmp_path, **parts))


def test_a_huge_id_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    whole = json.loads((TOY / "tokenizer.json").read_text(encoding="utf-8"))
    whole["model"]["vocab"]["a"] = 2**31 - 2
    with pytest.raises(TokenizerError, match="an id of"):
        load_tokenizer(changed(tmp_path, model=whole["model"]))


def test_a_huge_id_is_refused_before_tokens_of_the_settings_get_the_ids_after_it(tmp_path: Path) -> None:
    folder = changed(tmp_path, added_tokens=[{"id": 2**32 - 1, "content": "<x>", "special": True}])
    settings = {"added_tokens_decoder": {"7": {"content": "<y>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"not a tokenizer|an id of 4,294,967,295"):
        load_tokenizer(folder)


def different(count: int, length: int) -> list[str]:
    """Texts that do not begin alike."""
    return [f"{number:04}" + "x" * (length - 4) for number in range(count)]


def test_tokens_that_would_take_gigabytes_of_memory_are_refused(tmp_path: Path) -> None:
    added = [{"id": 5000 + i, "content": text, "special": True} for i, text in enumerate(different(100, 4000))]
    with pytest.raises(TokenizerError, match=r"added tokens that have .* different beginnings"):
        load_tokenizer(changed(tmp_path, added_tokens=added))
    folder = changed(tmp_path)
    decoder = {str(token["id"]): token for token in added}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder}), encoding="utf-8"
    )
    with pytest.raises(TokenizerError, match=r"added tokens that have .* different beginnings"):
        load_tokenizer(folder)
    (tmp_path / "tokenizer_config.json").unlink()
    pieces = [["a", -1.0], *([text, -1.0] for text in different(1000, 4000))]
    for model in ({"type": "Unigram", "vocab": pieces, "unk_id": 0}, {"unk_id": 0, "vocab": pieces}):
        with pytest.raises(TokenizerError, match="tokens of a Unigram model that have"):
            load_tokenizer(changed(tmp_path, model=model))


def test_beginnings_that_tokens_share_count_once() -> None:
    assert count_prefixes(["abc", "abd", "ab", "é"]) == 6
    assert count_prefixes([f"<|s_{i}|>" for i in range(1000)]) == 4 + 10 + 90 + 900 + 2 * 1000
    assert count_prefixes([]) == 0


def test_long_tokens_of_unigram_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["a", -1.0], ["a" * 200, -0.5]], "unk_id": 0}
    assert runs_in_child(load_tokenizer(changed(tmp_path, model=model)).backend)


def with_model(folder: Path, **settings: object) -> str:
    """A toy tokenizer whose model has other settings."""
    model = json.loads((TOY / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return changed(folder, model=model | settings)


@pytest.mark.parametrize("prefix", ["\0", "x", "Ġ"])
def test_a_prefix_that_cuts_merges_within_a_character_is_refused(tmp_path: Path, prefix: str) -> None:
    # Without the process of its own: SIGABRT, "panic in a destructor during cleanup".
    folder = with_model(tmp_path, continuing_subword_prefix=prefix)
    with pytest.raises(TokenizerError, match="this is not a tokenizer"):
        load_tokenizer(folder)
    file = tmp_path / "tokenizer.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace("continuing_sub", "continuing\\u005fsub"), encoding="utf-8"
    )
    with pytest.raises(TokenizerError, match="this is not a tokenizer"):
        load_tokenizer(folder)


def test_an_empty_prefix_and_that_of_wordpiece_are_known(tmp_path: Path) -> None:
    assert not runs_in_child(load_tokenizer(with_model(tmp_path, continuing_subword_prefix="")).backend)
    vocabulary = {"[UNK]": 0, "the": 1, "##re": 2}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocabulary, "continuing_subword_prefix": "##"}
    model["max_input_chars_per_word"] = 100
    assert not runs_in_child(load_tokenizer(changed(tmp_path, model=model)).backend)


def test_a_part_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    text = (TOY / "tokenizer.json").read_text(encoding="utf-8").rstrip().removesuffix("}")
    (tmp_path / "tokenizer.json").write_text(text + ', "added_tokens": []}', encoding="utf-8")
    with pytest.raises(TokenizerError, match="`added_tokens` is there more than once"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_or_folder_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    changed(tmp_path)
    for make in (os.mkfifo, os.mkdir):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        if make is os.mkfifo or name != "tokenizer_config.json":
            with pytest.raises(TokenizerError, match=r"not a plain file|Is a directory"):
                load_tokenizer(str(tmp_path))
        (tmp_path / name).unlink() if make is os.mkfifo else (tmp_path / name).rmdir()


def because(**parts: object) -> str | None:
    """What in a definition with these parts is not known to be quick."""
    content, reason = check_definition(json.dumps(parts).encode(), Path("tokenizer.json"))
    assert json.loads(content) == parts
    return reason


def test_regexes_are_known_by_their_branches() -> None:
    for regex in (r"\p{N}{1,3}|\s+(?!\S)|\s+", r"\s*[\r\n]+|\s+", " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]|\\s+"):
        assert because(pre_tokenizer=split(regex)) is None
    for regex in (r"\s*[\r\n]+", "\\s*[\r\n]+", r"\s+$", r"\s+|", r"(\s+|\n)", r"\s+\|\n", "a", r"\s+|(a|aa)+$"):
        assert because(pre_tokenizer=split(regex)) is not None, regex
    assert because(normalizer=REPLACE | {"content": "b"}) is None
    assert because(normalizer=REPLACE) is not None
    assert because(normalizer=REPLACE | {"pattern": {"Regex": r"\s"}, "content": ""}) is None


def test_models_are_known_by_what_they_state() -> None:
    assert because(model={"type": "BPE", "vocab": {"a": 0}, "continuing_subword_prefix": "##"}) is not None
    assert because(model={"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}) is not None
    assert because(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a" * 99}) is not None
    assert because(model={"type": "Nothing", "vocab": {"a": 0}}) is not None
    assert because(model={"type": "BPE", "vocab": {"a": 0}}) is None


# Templates


def test_a_value_is_measured_as_it_would_be_written() -> None:
    value: object = "ab"
    for _ in range(60):
        value = [value, value]
    size, deep = measure(value)
    assert size > 2**60
    assert deep == 60
    assert measure(["abc", {"k": "v"}])[1] == 2
    cycle: list[object] = []
    cycle.append(cycle)
    assert measure(cycle)[1] > MAX_DEPTH


def loop(step: str, end: str, times: int = 99) -> str:
    """A template that sets a value again and again, then reads it."""
    steps = "{% for i in range(" + str(times) + ") %}{% set n.s = " + step + " %}{% endfor %}"
    return "{% set n = namespace(s='xx') %}" + steps + end


def templates(name: str) -> list[str]:
    """The templates that stand under a name in the data, with the loops among them."""
    return [*(loop(*words) for words in stored(__file__, f"{name}_LOOPS")), *stored(__file__, name)]


@pytest.mark.parametrize("template", templates("SHARING"))
def test_parts_that_are_shared_cannot_multiply(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(RenderError):
        render(template)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("template", templates("LARGE"))
def test_the_faster_engine_leaves_large_values_to_the_reference(template: str) -> None:
    fast = compile_template(template, "here").fast
    if fast is not None:
        began = time.thread_time()
        with pytest.raises(NeedsReference):
            fast.run({"messages": [{"role": "user", "content": "abc" * 400_000}], "tools": None})
        assert time.thread_time() - began < 2


def test_a_large_conversation_gets_more_time() -> None:
    template = "{% for i in range(2000) %}{% set x = messages[0].content | upper %}{% endfor %}ok"
    small = compile_template(
        template + "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
        "here",
        time_limit=0.1,
    )
    with pytest.raises(RenderError, match=r"not finished after 0\.1 seconds"):
        small.run({"messages": [{"content": "x"}]})
    large = compile_template("{# large #}" + template, "here", time_limit=0.1)
    assert large.run({"messages": [{"content": "x" * 200_000}]}) == "ok"


def test_what_a_template_is_given_may_be_large() -> None:
    chat = [{"role": "user", "content": "word " * 400_000}] * 3
    assert len(render("{% for m in [messages, messages][0] %}{{ m.content }}{% endfor %}", chat)) == 6_000_000


def test_a_failure_keeps_no_value_of_the_template() -> None:
    with pytest.raises(RenderError) as raised:
        render("{% set x = 'a' * 999999 %}{{ raise_exception('no') }}", CHAT)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


def test_a_template_that_passes_limits_again_and_again_is_given_up() -> None:
    template = compile_template("{% set x = 'ab' * 999999999 %}{# again #}", "here", time_limit=3.0)
    messages = []
    for _ in range(5):
        with pytest.raises(RenderError) as raised:
            template.run({"messages": CHAT})
        messages.append(str(raised.value))
    assert ["past the limit" in message for message in messages] == [True] * 3 + [False] * 2
    assert "it is not run again" in messages[-1]


@pytest.mark.parametrize(("seconds", "runs"), [(0.002, None), (0.04, 101)])
def test_a_template_that_is_slow_at_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, seconds: float, runs: int | None
) -> None:
    # `template` renders some five hundred short conversations; published templates take two milliseconds at most.
    ticks = count()
    monkeypatch.setattr(limits.time, "thread_time", lambda: next(ticks) * seconds)
    source = f"a source that takes {seconds}"
    for number in range(1000):
        if is_too_slow(source, 3.0):
            assert number == runs
            return
        with count_waste(source, 3.0, {}):
            pass
    assert runs is None


def test_large_conversations_that_pass_a_limit_do_not_give_the_template_up() -> None:
    template = compile_template("{% if messages | length > 1 %}{{ messages[0] * 99999 }}{% endif %}ok", "here")
    for _ in range(5):
        with pytest.raises(RenderError, match="past the limit"):
            template.run({"messages": ["x" * 200_000] * 2})
    assert template.run({"messages": []}) == "ok"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("command", [["scan", "LOG", "-t", str(TOY)], ["template"], ["template", str(TOY)]])
def test_a_template_that_is_no_plain_file_is_refused_at_once(tmp_path: Path, command: list[str]) -> None:
    row = {"prompt": "a", "prompt_ids": [1], "completion": "b", "completion_ids": [2]}
    log = written(tmp_path / "log.jsonl", [row])
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 33)
    for name, says in (("pipe", "not a plain file"), ("huge", "none may have more than")):
        code, out, err = run(
            *(log if word == "LOG" else word for word in command),
            "--chat-template",
            tmp_path / name,
            "--no-config",
        )
        assert code == 2, out + err
        assert says in err
        assert "Traceback" not in err


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="the system has no links")
def test_links_to_tokenizers_and_templates_are_followed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").symlink_to(TOY)
    (tmp_path / "file").write_text("{{ messages[0].content }}", encoding="utf-8")
    (tmp_path / "template").symlink_to("file")
    code, _, err = run("template", tmp_path / "tokenizer", "--chat-template", tmp_path / "template", "--no-config")
    assert code in (0, 1), err


def test_a_source_of_megabytes_is_no_template() -> None:
    with pytest.raises(SetupError, match="past the limit of 262,144"):
        render("x" * 300_000)
