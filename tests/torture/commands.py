"""Attacks: a mutant, and the command line that is run on it, drawn from a seed and a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, islice
from random import Random

from tests.torture.attack import IN, OUT, Attack, Mutant, dice
from tests.torture.mutants import mutant_of
from tests.torture.mutants.settings import config_text, odd_option
from tests.torture.sources import TOY, fixtures, source_of

__all__ = ["COMMANDS", "attack_of", "attacks"]

COMMANDS = {
    "scan": 45,
    "repair": 20,
    "show": 6,
    "inspect": 7,
    "convert": 8,
    "config": 5,
    "identify": 3,
    "template": 0.6,
    "tokenizer": 1,
    "list": 0.3,
}
"""How often each command is drawn. `tokenizer` is a scan with a mutated tokenizer, `list` also `explain`."""
_REPORTS = ("json", "jsonl", "sarif", "junit", "markdown", "html", "github", "prometheus", "concise", "text")
_NAMES = (
    *("log",) * 5, "~x", "-x", "a b", "log:3", "x#1", "x?y", "[ab]", "é", "\U0001f4a5", "a'b", "%s", "$HOME",
    "x" * 200, ".hidden", "log.jsonl", "*", "a\nb", "\x1b[31m", "\u202e", "con", "a\\b", "{x}",
)  # fmt: skip

_REPAIRS = ("canonical", "drop", "fork", "mask", "normalize", "once", "realign", "splice")
_NORMALIZED = (
    *("--padding none", "--padding left", "--padding right", "--mask-style labels", "--mask-style bool"),
    *("--mask-style float", "--sentinel null", "--sentinel 0"),
)
_OF_REPAIR = (
    *("--fail-on note", "--fail-on warning", "--no-provenance", "--diff", "--mask-by turn"),
    *("--mask-by first-divergence", "--fail-on note"),
)
_OF_SCAN = (
    *("--fail-on never", "--worst 100", "--sample 50%", "-n 1", f"--resume --journal {OUT}/journal"),
    *("--session id", "--join", "--no-join", "--select REC,MSK"),
)


def attacks(seed: int, of: Sequence[str] = (), *, with_real: bool = True) -> Iterator[tuple[int, Attack]]:
    """The attacks of a seed with their numbers, without end; `of`: those of some commands."""
    for number in count():
        if not of or _drawn(dice(seed, number)) in of:
            yield number, attack_of(seed, number, with_real=with_real)


def some_attacks(seed: int, many: int, of: Sequence[str] = (), *, with_real: bool) -> Iterator[tuple[int, Attack]]:
    """The first attacks of a seed."""
    return islice(attacks(seed, of, with_real=with_real), many)


@cache
def _weights() -> tuple[list[str], list[float]]:
    return list(COMMANDS), list(COMMANDS.values())


def _drawn(drawn: Random) -> str:
    names, weights = _weights()
    return drawn.choices(names, weights)[0]


def attack_of(seed: int, number: int, *, with_real: bool = True) -> Attack:
    """The attack with this number."""
    drawn = dice(seed, number)
    command = _drawn(drawn)
    attack = _MADE[command](drawn, with_real)
    spread = "-j" in attack.words  # starting processes takes its time
    return replace(attack, process=drawn.random() < 1 / 500, seconds=attack.seconds + 20 * spread)


def _logs(drawn: Random, with_real: bool) -> tuple[dict[str, bytes], list[str], Attack]:
    """Mutated logs, the words that name them, and an attack without words."""
    source = source_of(drawn, with_real=with_real)
    mutants = [mutant_of(drawn, source)]
    if drawn.random() < 0.04:
        mutants += [mutant_of(drawn, drawn.choice(fixtures())) for _ in range(drawn.choice((1, 2, 5)))]
    folder = len(mutants) > 1 and drawn.random() < 0.6
    files: dict[str, bytes] = {}
    for number, mutant in enumerate(mutants):
        files[f"{f'folder/{number}/' if folder else ''}{_name(drawn, mutant, number)}"] = mutant.data
    words = [f"{IN}/folder"] if folder else [f"{IN}/{name}" for name in files]
    changes = "; ".join(each.made for each in mutants)
    seconds = sum(each.seconds for each in mutants)
    return (
        files,
        words,
        Attack((), files, changes, source.ours, seconds=seconds, facts={"tokenizer": source.tokenizer}),
    )


def _name(drawn: Random, mutant: Mutant, number: int) -> str:
    stem, _, suffix = mutant.name.partition(".")
    if drawn.random() < 0.03:
        stem = drawn.choice(_NAMES)
    return f"{stem}{number or ''}.{suffix}" if suffix else f"{stem}{number or ''}"


def _audited(drawn: Random, attack: Attack) -> list[str]:
    """Options of commands that audit."""
    words = ["--no-config"]
    if drawn.random() < 0.85:
        words += ["-t", str(attack.facts["tokenizer"])]
    if drawn.random() < 0.1:
        words += odd_option(drawn)
    if drawn.random() < 0.03:
        words += ["--max-row-bytes", drawn.choice(("1", "100", "5000", "10000000"))]
    return words


def _single(drawn: Random, with_real: bool) -> tuple[str, Attack]:
    """One log of several, for commands that take one."""
    _, words, attack = _logs(drawn, with_real)
    return words[0] if not words[0].endswith("/folder") else f"{IN}/{next(iter(attack.files))}", attack


def _scan(drawn: Random, with_real: bool) -> Attack:
    _, logs, attack = _logs(drawn, with_real)
    words = ["scan", *logs, *_audited(drawn, attack)]
    if drawn.random() < 0.5:
        words += ["-f", drawn.choice(_REPORTS)]
    if drawn.random() < 0.05:
        words += ["-r", f"{drawn.choice(_REPORTS)}={OUT}/report"]
    if drawn.random() < 0.008:
        words += ["-j", "2"]
    for extra in _OF_SCAN:
        if drawn.random() < 0.02:
            words += extra.split()
    if len(attack.files) == 1 and drawn.random() < 0.02:
        return replace(attack, words=("scan", "-", *words[2:]), stdin=next(iter(attack.files)))
    return replace(attack, words=tuple(words))


def _repair(drawn: Random, with_real: bool) -> Attack:
    files, logs, attack = _logs(drawn, with_real)
    words = ["repair", *logs, *_audited(drawn, attack), "-q", "-r", f"json={OUT}/report.json"]
    several = len(files) > 1
    suffixes = (".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".feather")
    if drawn.random() < 0.95:
        name = next(iter(files)).rsplit("/", 1)[-1]
        _, dot, suffix = name.partition(".")
        other = drawn.random() < 0.05
        ending = drawn.choice(suffixes) if other and not several else dot + suffix
        words += ["-o", f"{OUT}/repaired" if several else f"{OUT}/out{ending}"]
    else:
        words += ["--dry-run"]
    words += _repairs(drawn)
    for extra in _OF_REPAIR:
        if drawn.random() < 0.06:
            words += extra.split()
    if drawn.random() < 0.008:
        words += ["-j", "2"]
    return replace(attack, words=tuple(words))


def _repairs(drawn: Random) -> list[str]:
    """Which repairs run, with the flags that some of them need."""
    words = ["--unsafe"] if drawn.random() < 0.5 else []
    if drawn.random() < 0.5:
        return words
    names = drawn.sample(_REPAIRS, drawn.choice((1, 1, 2, 4)))
    if "normalize" in names and drawn.random() < 0.6:
        words += drawn.choice(_NORMALIZED).split()
    if {"canonical", "drop"} & {*names} and drawn.random() < 0.95:
        words += ["--unsafe", "--quarantine", f"{OUT}/quarantine.jsonl"]
    return [*words, "--with", ",".join(names)]


def _show(drawn: Random, with_real: bool) -> Attack:
    log, attack = _single(drawn, with_real)
    words = ["show", log, "--row", drawn.choice("0001"), *_audited(drawn, attack), "--no-pager"]
    around = drawn.choice(("5", "TOK101", "REC002", "-1"))
    for extra in (
        *("--full", "--ids", "--logprobs", "--turn 0", "--item 0", "-f json", f"--around {around}"),
        *("--context 0", "--item 999"),
    ):
        if drawn.random() < 0.2:
            words += extra.split()
    return replace(attack, words=tuple(words))


def _inspect(drawn: Random, with_real: bool) -> Attack:
    log, attack = _single(drawn, with_real)
    words = ["inspect", log, "--no-config"]
    words += ["-t", str(attack.facts["tokenizer"])] if drawn.random() < 0.4 else []
    words += ["-f", "json"] if drawn.random() < 0.5 else []
    return replace(attack, words=tuple(words))


def _convert(drawn: Random, with_real: bool) -> Attack:
    _, logs, attack = _logs(drawn, with_real)
    forms = [
        "rows",
        "calls",
        "atropos_group",
        "nemo_rl",
        "nemo_rl_message_log",
        "nemo_gym",
        "slime",
        "tito_sample",
    ]
    words = ["convert", *logs, "--no-config", "--to", drawn.choice(forms)]
    words += ["--lossy"] if drawn.random() < 0.7 else []
    suffixes = (".jsonl", ".jsonl", ".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".feather")
    words += ["-o", f"{OUT}/out{drawn.choice(suffixes)}"] if drawn.random() < 0.8 else ["--dry-run"]
    return replace(attack, words=tuple(words))


def _config(drawn: Random, with_real: bool) -> Attack:
    """A configuration file, read by `config` or by a scan."""
    name, data = config_text(drawn)
    files = {f"project/{name}": data, "project/log.jsonl": drawn.choice(fixtures()[5:9]).data[:3000]}
    scanned = drawn.random() < 0.3
    words = ["scan" if scanned else "config", f"{IN}/project/log.jsonl", "--config", f"{IN}/project/{name}"]
    words += ["-t", TOY] if scanned else []
    words += ["-f", "json"] if drawn.random() < 0.5 else []
    words += odd_option(drawn) if drawn.random() < 0.2 else []
    return Attack(tuple(words), files, f"a configuration in {name}")


def _identify(drawn: Random, with_real: bool) -> Attack:
    _, logs, attack = _logs(drawn, with_real)
    words = ["identify", *logs, "--no-config", "-t", str(attack.facts["tokenizer"])]
    words += ["-f", "json"] if drawn.random() < 0.5 else []
    return replace(attack, words=tuple(words))


def _template(drawn: Random, with_real: bool) -> Attack:
    log, attack = _single(drawn, with_real)
    words = ["template", TOY, "--log", log, "--no-config"]
    words += ["-f", "json"] if drawn.random() < 0.5 else []
    return replace(attack, words=tuple(words))


def _tokenizer(drawn: Random, with_real: bool) -> Attack:
    """A mutated tokenizer folder or template over a log as it is."""
    from tests.torture.mutants.definitions import tokenizer_files

    files, change = tokenizer_files(drawn)
    source = drawn.choice([path for path in fixtures() if path.suffix == ".jsonl"])
    log = b"".join(source.lines(drawn))
    command = drawn.choice(("scan", "scan", "template"))
    words = ["scan", f"{IN}/log.jsonl", "-t", f"{IN}/tokenizer", "--no-config"]
    if command == "template":
        words = ["template", f"{IN}/tokenizer", "--no-config"]
    if "template.jinja" in files:
        words += ["--chat-template", f"{IN}/tokenizer/template.jinja"]
    words += ["-f", "json"] if drawn.random() < 0.3 else []
    in_folder = {f"tokenizer/{name}": data for name, data in files.items()}
    return Attack(tuple(words), {"log.jsonl": log, **in_folder}, change, seconds=10.0)


def _list(drawn: Random, with_real: bool) -> Attack:
    odd = drawn.choice(("", "\0", "x" * 5000, "TOK", "tok101", "\x1b[31m", "*", "é", "splice", "REC002", "LPR5"))
    kind = drawn.choice(("formats", "rules", "repairs", "reports", "providers", "parsers"))
    words = ["explain", odd] if drawn.random() < 0.5 else ["list", drawn.choice((odd, kind))]
    words = [word.replace("\0", "\x01") for word in words]
    words += ["-f", drawn.choice(("json", "text"))] if drawn.random() < 0.5 else []
    return Attack(tuple(words), {}, f"the name {json.dumps(odd[:20])}")


_MADE: dict[str, Callable[[Random, bool], Attack]] = {
    made.__name__[1:]: made
    for made in (_scan, _repair, _show, _inspect, _convert, _config, _identify, _template, _tokenizer, _list)
}
