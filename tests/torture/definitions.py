"""Tokenizer folders and chat templates built to exhaust whoever reads them: `python -m tests.torture.definitions`.

`drawn` makes one, `attack_of` a run of the command with it; both depend on a seed and a number and nothing else.
"""

# ruff: noqa: E501 - the lists of hostile texts are read as tables
from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from tests.torture.attack import IN, Attack
from tests.torture.judge import Failure
from tests.torture.runner import SECONDS, Room, Trial
from tests.torture.sources import ROOT

__all__ = ["attack_of", "attacks", "drawn"]

SMALL = 2 << 20
"""Larger tokenizers of others are not mutated: writing them would take most of the time."""
_LOG = (
    '{"messages": [{"role": "system", "content": "You   are"}, {"role": "user", "content": "%s"}, {"role": "assistant", '
    '"content": "aaaa bbbb"}], "prompt_ids": [1, 2, 3], "completion_ids": [5, 6, 7, 8]}\n'
)
_TEXTS = (
    "a" * 40 + "b",
    " " * 3000 + "x",
    "ab " * 400,
    "hello world 12345",
    "é" * 500,
    "a" * 20000 + "!",
    "\\n" * 2000,
)
_REGEXES = (
    "(a+)+$", "(a|a)*b", "(a|aa)+$", r"(\s*)*x", r"\s+$", "(.*)*y", "(a*)*(a*)*(a*)*c", "(?:a{1,1000}){1,1000}b",
    "((a{1,1000}){1,1000}){1,1000}", "(", "[", "*", "", "^", "$", "(?=a)", "(?<=a+)b", r"(a)\1*\1*\1*b", "a**", "(?i:" * 200 + ")" * 200,
    r"\p{Nothing}", "(?R)", "(?<n>a|b\\g<n>c)", "\\", "a" * 5000, "|".join("ab"[i % 2] * (i + 1) for i in range(300)), ".{0,65000}b",
    r"([^\s]+\s*)+:", "(x+x+)+y", "(?:(?:(?:a?)*)*)*b", r"\s*[\r\n]+", "(?!)", "\x00",
)  # fmt: skip
_NUMBERS = (-1, 0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**9, 10**18, 10**30, 1.5, -0.0, 1e308)
_ODD: tuple[Any, ...] = (None, True, "", "x", [], {}, [[]], {"a": 1}, "\x00", "\U0001f600", "a" * 5000, *_NUMBERS)


@cache
def _folders() -> tuple[tuple[dict[str, bytes], bool], ...]:
    """The files of the tokenizers to mutate, and whether they are ours."""
    shared = Path(os.environ.get("TITO_AUDIT_SHARED") or ROOT.parent / "shared") / "tokenizers"
    ours = sorted(path for path in (ROOT / "fixtures" / "tokenizers").iterdir() if path.is_dir())
    others = sorted(path for path in shared.iterdir() if path.is_dir()) if shared.is_dir() else []
    folders = []
    for folder in (*ours, *others):
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        if "tokenizer.json" in files and sum(map(len, files.values())) < SMALL:
            folders.append((files, folder in ours))
    return tuple(folders)


def drawn(dice: Random) -> tuple[dict[str, bytes], str]:
    """The files of a tokenizer folder, and what was done to them. `template.jinja` is to be given as a template."""
    ours = [files for files, own in _folders() if own]
    files, changes, _ = _changed(dice, dict(dice.choice(ours)))
    return files, changes


def attack_of(seed: int, number: int) -> Attack:
    """A run of the command with a hostile tokenizer or template."""
    dice = Random(f"definitions {seed}:{number}")
    files, ours = dice.choice(_folders())
    files, changes, kinds = _changed(dice, dict(files))
    tokenizer = [f"{IN}/tokenizer"]
    template = ["--chat-template", f"{IN}/tokenizer/template.jinja"] if "template.jinja" in files else []
    log = f"{IN}/log.jsonl"
    words = dice.choice(
        [
            ["scan", log, "-t", *tokenizer, *template],
            ["scan", log, "-t", *tokenizer, *template],
            ["scan", log, "-t", *tokenizer, *template, "-f", "json"],
            ["repair", log, "--dry-run", "-t", *tokenizer, *template],
            ["template", *tokenizer, *template],
            ["template", *tokenizer, *template, "--log", log],
            ["identify", log, "-t", *tokenizer],
            ["inspect", log, "-t", *tokenizer],
            ["show", log, "0", "-t", *tokenizer, *template],
        ]
    )
    contents = {f"tokenizer/{name}": data for name, data in files.items()}
    contents["log.jsonl"] = (_LOG % dice.choice(_TEXTS)).encode() * dice.choice((1, 2, 5))
    slow = 50.0 if "tokenizer.json" not in files else 0.0  # transformers takes seconds to start
    return Attack((*words, "--no-config"), contents, changes, ours=ours, seconds=slow, facts={"kinds": kinds})


def attacks(seed: int, first: int = 0) -> Iterator[tuple[int, Attack]]:
    """Attacks of a seed, without end, each with its number."""
    while True:
        yield first, attack_of(seed, first)
        first += 1


def _changed(dice: Random, files: dict[str, bytes]) -> tuple[dict[str, bytes], str, list[str]]:
    """The files after one to three changes, what was done to them, and the kinds of these changes."""
    changes, kinds = [], []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        change = dice.choice(_CHANGES)
        try:
            changes.append(change(dice, files))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
            continue  # an earlier change left nothing to change
        kinds.append(change.__name__.strip("_").replace("_", " "))
    return files, ", ".join(changes) or "nothing", kinds


def _write(files: dict[str, bytes], name: str, value: Any) -> None:
    files[name] = json.dumps(value).encode("utf-8", "surrogatepass")


def _regex(dice: Random, files: dict[str, bytes]) -> str:
    """A pattern that backtracks, or is none."""
    whole = json.loads(files["tokenizer.json"])
    pattern = dice.choice(_REGEXES)
    step: dict[str, Any] = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    if dice.random() < 0.2:
        step["behavior"] = dice.choice(("Removed", "MergedWithPrevious", "Contiguous", "Nothing"))
    part = "pre_tokenizer"
    if dice.random() < 0.3:
        part, step = "normalizer", {"type": "Replace", "pattern": {"Regex": pattern}, "content": "zz"}
    before = whole.get(part)
    keep = [before] if before is not None and dice.random() < 0.7 else []
    inner = "normalizers" if part == "normalizer" else "pretokenizers"
    whole[part] = {"type": "Sequence", inner: [step, *keep] if dice.random() < 0.7 else [*keep, step]}
    _write(files, "tokenizer.json", whole)
    return f"{part} {pattern[:30]!r}"


def _growth(dice: Random, files: dict[str, bytes]) -> str:
    """A normalizer that makes texts longer and longer."""
    whole = json.loads(files["tokenizer.json"])
    many = dice.choice((2, 8, 20, 40, 500, 5000))
    step = dice.choice(
        (
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
            {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
            {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "x"},
            {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaaaaaaaa"},
            {"type": "Prepend", "prepend": "a" * dice.choice((1, 64, 10000, 1_000_000))},
            {"type": "ByteLevel"},
            {"type": "NFKD"},
            {"type": "Precompiled", "precompiled_charsmap": dice.choice(("", "AAAA", "//////8=", "x" * 100))},
        )
    )
    whole["normalizer"] = {"type": "Sequence", "normalizers": [step] * many}
    _write(files, "tokenizer.json", whole)
    return f"{many} {step['type']}"


def _ids(dice: Random, files: dict[str, bytes]) -> str:
    """Odd ids of tokens and added tokens."""
    whole = json.loads(files["tokenizer.json"])
    number = dice.choice(_NUMBERS)
    if dice.random() < 0.5:
        dice.choice(whole["added_tokens"])["id"] = number
    else:
        vocabulary = whole["model"]["vocab"]
        for _ in range(dice.choice((1, 1, 50))):
            vocabulary[dice.choice(list(vocabulary))] = number
    _write(files, "tokenizer.json", whole)
    return f"an id of {number}"


def _tokens(dice: Random, files: dict[str, bytes]) -> str:
    """Long, empty, many or equal tokens."""
    whole = json.loads(files["tokenizer.json"])
    text = dice.choice(("", " ", "a", "\x00", "x" * 5000, "x" * 1_000_000, "ab" * 3_000_000, "<", "\ufffd", "é"))
    many = 1 if len(text) > 100 else dice.choice((1, 20, 3000))
    start = max((token["id"] for token in whole["added_tokens"]), default=3000) + 1
    flags = {key: dice.random() < 0.3 for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    added = [{"id": start + i, "content": text if many == 1 else f"{text}{i}", **flags} for i in range(many)]
    where = dice.random()
    if where < 0.5:
        whole["added_tokens"] += added
    elif where < 0.8:
        whole["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    else:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        config["added_tokens_decoder"] = {str(token["id"]): token for token in added}
        _write(files, "tokenizer_config.json", config)
    _write(files, "tokenizer.json", whole)
    return f"{many} tokens of {len(text):,} characters"


def _model(dice: Random, files: dict[str, bytes]) -> str:
    """Another model, or odd settings of it."""
    whole = json.loads(files["tokenizer.json"])
    model = whole["model"]
    kind = dice.choice(("same", "same", "Unigram", "WordPiece", "WordLevel", "Nothing"))
    if kind == "Unigram":
        score = dice.choice((-1.0, 0, 1e308, -1e308, None))
        pairs = [[token, score] for token in model["vocab"]]
        whole["model"] = {
            "type": kind,
            "vocab": pairs,
            "unk_id": dice.choice((0, None, 10**6, -1)),
            "byte_fallback": True,
        }
    elif kind != "same":
        whole["model"] = {"type": kind, "vocab": model["vocab"], "unk_token": dice.choice(("a", "no such token"))}
        whole["model"] |= {
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": dice.choice((100, 10**9)),
        }
    else:
        settings = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")
        setting = dice.choice((*settings, "byte_fallback", "merges"))
        model[setting] = dice.choice((*_ODD, "x" * 1_000_000, 0.5))
    _write(files, "tokenizer.json", whole)
    return f"model {kind}"


def _part(dice: Random, files: dict[str, bytes]) -> str:
    """Deep, long or odd parts."""
    whole = json.loads(files["tokenizer.json"])
    part = dice.choice(("normalizer", "pre_tokenizer", "decoder", "post_processor"))
    inner = {"post_processor": "processors"}.get(part, part.replace("_", "") + "s")
    what = dice.random()
    if what < 0.3:
        value: Any = whole.get(part)
        for _ in range(dice.choice((5, 60, 130, 400))):
            value = {"type": "Sequence", inner: [value]}
        whole[part] = value
    elif what < 0.5 and part == "post_processor":
        twice = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}
        twice |= {
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
        whole[part] = {"type": "Sequence", "processors": [twice] * dice.choice((1, 10, 30))}
    elif what < 0.7:
        whole[part] = {"type": "FixedLength", "length": dice.choice((0, 1, 10**18))}
    else:
        whole[part] = dice.choice(_ODD)
    _write(files, "tokenizer.json", whole)
    return f"odd {part}"


def _value(dice: Random, files: dict[str, bytes]) -> str:
    """Any value of a JSON file replaced, removed, nested or given twice."""
    name = dice.choice([name for name in files if name.endswith(".json")])
    whole = json.loads(files[name])
    places = list(_places(whole))
    holder, key = dice.choice(places[:60] if dice.random() < 0.7 else places)
    change = dice.random()
    if change < 0.15:
        del holder[key]
    elif change < 0.3:
        deep: Any = copy.deepcopy(holder[key])
        for _ in range(dice.choice((3, 200, 900))):
            deep = [deep]
        holder[key] = deep
    elif change < 0.4:
        holder[key] = copy.deepcopy(dice.choice([other[at] for other, at in places[:200]]))
    else:
        holder[key] = dice.choice(_ODD)
    _write(files, name, whole)
    if change > 0.9:
        files[name] = files[name].replace(
            b"{", b'{"type": "BPE", "model": {}, ' if change > 0.95 else b'{"version": 1, ', 1
        )
    return f"{str(key)[:20]} in {name}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value, the outermost first."""
    pending = [value]
    while pending:
        holder = pending.pop(0)
        keys: Any = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list) and len(holder[key]) < 300:
                pending.append(holder[key])


def _bytes(dice: Random, files: dict[str, bytes]) -> str:
    """A file cut, damaged, doubled or replaced."""
    name = dice.choice(sorted(files))
    data = bytearray(files[name])
    what = dice.choice(("cut", "flip", "double", "marks", "deep", "zeros", "empty"))
    if what == "cut":
        del data[dice.randrange(len(data) + 1) :]
    elif what == "flip":
        for _ in range(dice.choice((1, 5, 50))):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif what == "double":
        data += bytes(data)
    else:
        full = {
            "marks": b"\xef\xbb\xbf" + bytes(data),
            "deep": b"[" * 200_000,
            "zeros": b"\0" * 100_000,
            "empty": b"",
        }
        data = bytearray(full[what])
    files[name] = bytes(data)
    return f"{what} {name}"


def _other_vocabulary(dice: Random, files: dict[str, bytes]) -> str:
    """A folder without tokenizer.json, with files of other libraries."""
    content = files.pop("tokenizer.json")
    name = dice.choice(("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "x.tiktoken", "spiece.model"))
    files[name] = dice.choice(
        (
            b"",
            b"\x0a\xff\xff\xff\xff\x0f",
            content[:500],
            b"YQ== 0\nYg== 99999999999\n",
            b'{"a": 1}',
            os.devnull.encode(),
        )
    )
    if dice.random() < 0.5:
        files["merges.txt"] = dice.choice((b"", b"a b\n" * 3, b"\xff"))
    config = {
        "tokenizer_class": dice.choice(("LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast", 3, None))
    }
    if dice.random() < 0.3:
        config["auto_map"] = {"AutoTokenizer": ["tokenization_x.X", None]}
        files["tokenization_x.py"] = b"raise SystemExit('code of a tokenizer folder was run')\n"
    _write(files, "tokenizer_config.json", config)
    return f"only {name}"


def _template(dice: Random, files: dict[str, bytes]) -> str:
    """A hostile template, as a file of the folder, a setting, or given apart."""
    text = hostile_template(dice)
    where = dice.choice(("chat_template.jinja", "template.jinja", "template.jinja", "tokenizer_config.json"))
    if where == "tokenizer_config.json":
        files.pop("chat_template.jinja", None)
        _write(files, where, {**json.loads(files.get(where, b"{}")), "chat_template": text})
    else:
        files[where] = text.encode("utf-8", "surrogatepass")
    return f"template {text[:60]!r}"


_STARTS = ("'xx'", "[1, 2]", "{'a': 1}", "messages", "(1, 2)", "3", "messages[0].content", "namespace(z=1)")
_STEPS = (
    "[n.s, n.s]", "{'a': n.s, 'b': n.s}", "n.s ~ n.s", "n.s + n.s", "n.s | tojson", "[n.s, n.s] | tojson", "n.s * 2", "(n.s, n.s)",
    "[n.s, n.s] | string", "dict(a=n.s, b=n.s)", "[n.s] * 8", "n.s | string | replace('a', 'aaaa')", "[n.s, n.s] | join", "n.s | list + n.s | list",
    "'%s%s' % (n.s, n.s)", "'{}{}'.format(n.s, n.s)", "n.s | string | e", "n.s | string | urlencode", "[n.s, n.s] | sort | list", "n.s | pprint",
    "namespace(a=n.s, b=n.s)", "(n.s | string).encode('utf-16')", "(n.s | string).split('') if n.s else 1", "[n.s, n.s] | unique | list",
    "n.s | string | list", "[n.s, n.s] | map('string') | list", "dict.fromkeys([1, 2], n.s)", "{(n.s, n.s): 1}", "n.s ** 2", "[n.s, n.s] | batch(1) | list",
    "n.s | string | wordwrap(1)", "n.s | indent(99)", "[[n.s, n.s]] | sum(start=[])", "n.s | tojson(indent=9)", "n.s | string | upper | lower", "[n.s, n.s][:]",
    "n.s | string | center(9999)", "[n.s, n.s] | groupby(0) | list", "(n.s, n.s) | select | list", "n.s | string | title", "'%9999s' % n.s", "n.s | items | list",
)  # fmt: skip
_ENDS = (
    "{{ n.s }}", "{{ n.s | tojson }}", "{{ n.s == n.s }}", "{{ n.s | length }}", "{{ n.s | string | length }}", "{% if n.s in [n.s] %}x{% endif %}",
    "{{ [n.s, n.s] | unique | list | length }}", "{{ {n.s: 1} }}", "{{ n.s | pprint }}", "{{ n.s ~ '' }}", "{{ n.s | sort }}", "{{ n.s is sameas n.s }}",
    "{% set m = namespace(s=0) %}{{ m }}", "{{ raise_exception(n.s) }}", "{{ n.s | tojson(indent=99) }}", "{{ n.s.missing }}", "{{ n.s | int }}",
    "{{ n.s < n.s }}", "{{ [n.s, [n.s]] | max }}", "{{ '%s' % n.s }}", "{{ '{0}{0}'.format(n.s) }}", "{{ n.s | xmlattr }}", "{{ n.s | random }}",
)  # fmt: skip
_ALONE = (
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{{ range(99999) | list * 999 }}",
    "{{ 2 ** 99999999 }}", "{{ (2 ** 90000) | string }}", "{{ 10 ** 90000 }}", "{{ '9' * 5000000 | int }}", "{{ 'a' * 99999999 }}",
    "{{ '%0999999999d' % 3 }}", "{{ '{:>999999999}'.format(3) }}", "{{ 'x'.ljust(999999999) }}",
    "{% set n = namespace() %}{% set n.n = n %}{{ n }}{{ n | tojson }}{{ [n, n] | string }}",
    "{{ messages.__class__.__mro__ }}", "{{ ''.join.__globals__ }}", "{{ cycler.__init__.__globals__ }}", "{% import 'x' as y %}", "{% include 'x' %}",
    "{% extends 'x' %}", "{{ self }}", "{{ lipsum() }}", "{{ strftime_now('%Y' * 999999) }}", "{{ strftime_now('%') }}{{ strftime_now('\\x00') }}",
    "{{ strftime_now('%9999999999Y') }}", "{{ joiner('a' * 999) }}", "{% set x %}{% for i in range(99999) %}{{ 'ab' * 999 }}{% endfor %}{% endset %}{{ x }}",
    "{% call(x) f() %}{% endcall %}", "{% filter upper %}{% for i in range(9999) %}{{ messages }}{% endfor %}{% endfilter %}",
    "{{ messages | map(attribute='content' * 9) | list }}", "{{ '\\ud83d' }}", "{{ (1).__add__ }}", "{{ [].append }}", "{{ messages.append(messages) }}",
    "{{ 'a'.translate({97: 'a' * 999999}) }}", "{{ ('a' * 999999).translate({97: 'a' * 999999}) }}", "{{ 'a,' * 9999999 | string }}",
    "{% generation %}{{ messages }}{% endgeneration %}", "{% for i in range(9999999) %}{% endfor %}", "{{ 1 / 0 }}", "{{ 1.5 ** 99999 }}",
    "{{ ('a' * 999999).split('a') | map('upper') | list | length }}", "{{ '{0.__class__}'.format(1) }}", "{{ ('x' * 9999999) | e | e | e }}",
    "{{ ('<' * 9999999) | e | e | e | e | e }}", "{{ ('\\n' * 99999) | indent('x' * 9999) }}", "{{ ('a b ' * 999999) | title | wordcount }}",
    "{{ ('a' * 9999999) | urlize }}", "{{ ('<a' * 999999) | striptags }}", "{{ ('http://a ' * 99999) | urlize }}", "{{ ('(' * 99999) | urlize }}",
)  # fmt: skip


def hostile_template(dice: Random) -> str:
    """The source of a template that grows something, never ends, nests too deep or asks for what it must not get."""
    kind = dice.random()
    if kind < 0.55:
        times = dice.choice((5, 18, 25, 40, 99, 5000))
        steps = " %}{% set n.s = ".join(dice.choice(_STEPS) for _ in range(dice.choice((1, 1, 2))))
        loop = "{% for i in range(" + str(times) + ") %}{% set n.s = " + steps + " %}{% endfor %}"
        return "{% set n = namespace(s=" + dice.choice(_STARTS) + ") %}" + loop + dice.choice(_ENDS)
    if kind < 0.85:
        return dice.choice(_ALONE)
    many = dice.choice((50, 500, 5000, 100_000))
    return dice.choice(
        (
            "{{ " + "(" * many + "1" + ")" * many + " }}",
            "{% if 1 %}" * many + "{% endif %}" * many,
            "{{ " + " + ".join(["1"] * many) + " }}",
            "{{ " + " ~ ".join(["'a'"] * many) + " }}",
            "{{ messages" + "[0]" * many + " }}",
            "{{ 'a'" + " | upper" * many + " }}",
            "{{ " + "[" * many + "]" * many + " }}",
            "{% for a in messages %}" * (many // 10) + "{{ a }}" + "{% endfor %}" * (many // 10),
            "{{ " + "not " * many + "1 }}",
            "{{ x" + ".y" * many + " }}",
            "{{ 'a' }}" * many,
            "{% set a = 1 %}" * many,
            "{% macro m() %}" * (many // 10) + "{% endmacro %}" * (many // 10),
            "{# " * many,
            "{{ " + "1 if " * many + "1 }}",
            "x" * (many * 100),
        )
    )


_CHANGES: tuple[Callable[[Random, dict[str, bytes]], str], ...] = (
    *(_regex, _regex, _growth, _ids, _tokens, _model, _part, _value, _value, _value, _bytes, _other_vocabulary),
    *(_template, _template, _template, _template, _template),
)  # fmt: skip


def main() -> int:
    """Run attacks with some workers; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.definitions", description=__doc__)
    parser.add_argument("--mutants", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--jobs", type=int, default=1, help="workers")
    parser.add_argument("--minutes", type=float, default=1e6, help="no attack begins after this time")
    parser.add_argument(
        "--seconds", type=float, default=10, help="a run hangs if it takes longer; more on a busy machine"
    )
    chosen = parser.parse_args()
    tally = _Tally()
    lock = Lock()
    numbers = iter(range(chosen.first, chosen.first + chosen.mutants))
    began = time.monotonic()

    def work(folder: Path) -> None:
        with Room(folder, seconds=chosen.seconds) as room:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None or time.monotonic() - began > 60 * chosen.minutes:
                    return
                attack = attack_of(chosen.seed, number)
                trial = room.attempt(attack)
                with lock:
                    tally.add(number, attack, trial)

    with tempfile.TemporaryDirectory(prefix="torture.") as aside, ThreadPoolExecutor(chosen.jobs) as pool:
        for future in [pool.submit(work, Path(aside) / str(job)) for job in range(chosen.jobs)]:
            future.result()
    tally.say(chosen.seed, time.monotonic() - began)
    return int(bool(tally.failed))


class _Tally:
    """What came of the attacks so far, counted."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self._exits: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._commands: Counter[str] = Counter()
        self._slowest, self._largest, self._last = (0.0, -1), (0, -1), -1

    def add(self, number: int, attack: Attack, trial: Trial) -> None:
        """Count an attack; one that failed is printed."""
        self._exits[trial.outcome.code] += 1
        self._kinds.update(attack.facts["kinds"] or ["nothing"])
        self._commands[attack.command] += 1
        self._slowest = max(self._slowest, (trial.outcome.cpu, number))
        self._largest = max(self._largest, (trial.outcome.peak, number))
        self._last = max(self._last, number)
        failures = list(trial.failures)
        if not failures and trial.outcome.cpu > SECONDS + attack.seconds:
            failures = [Failure("slow", attack.command, f"{trial.outcome.cpu:.0f} s of the processor")]
        for failure in failures:
            self.failed[str(failure)] += 1
            lines = failure.said.strip().splitlines()
            words = f"{attack.command} {attack.made[:150]}: {failure} {lines[-1][:200] if lines else ''}"
            print(f"{number}: {words}", flush=True)

    def say(self, seed: int, seconds: float) -> None:
        """Print the counts."""
        exits = ", ".join(f"exit {code}: {many:,}" for code, many in sorted(self._exits.items()))
        print(f"{self._exits.total():,} mutants of seed {seed} up to {self._last} in {seconds:.0f} s; {exits}")
        for counted in (self._commands, self._kinds):
            print(", ".join(f"{kind} {many:,}" for kind, many in counted.most_common()))
        longest, largest = self._slowest, self._largest
        print(
            f"longest {longest[0]:.1f} s of the processor ({longest[1]}), "
            f"most memory {largest[0] >> 20:,} MB ({largest[1]})"
        )
        for kind, many in self.failed.most_common():
            print(f"{many:7,}  {kind}")


if __name__ == "__main__":
    raise SystemExit(main())
