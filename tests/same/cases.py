"""The command lines that are run in both checkouts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.tables import stored

from .inputs import TOY, Inputs, Log

__all__ = ["Case", "cases", "rules_of"]

REPORTS = ("concise", "github", "html", "json", "jsonl", "junit", "markdown", "sarif", "text")
REPAIRS = ("splice", "fork", "realign", "mask", "normalize", "canonical", "drop")
FORMS = ("rows", "calls", "atropos_group", "nemo_rl", "nemo_rl_message_log", "nemo_gym", "slime", "tito_sample")
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
COMMANDS = ("scan", "repair", "convert", "show", "identify", "inspect", "config", "explain", "list")
NO_CONFIG = "--no-config"
CONFIG = """\
tokenizer = "in/toy_bpe"
fail-on = "warning"
ignore = ["SEQ3"]
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Command lines run one after another in a folder of their own, in which `in` leads to the inputs."""

    kind: str
    steps: tuple[tuple[str, ...], ...]
    files: dict[str, str] = field(default_factory=dict)
    """Files that stand in the folder before."""
    env: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    """Whether each command needs a process of its own."""

    def command(self, arguments: Sequence[str]) -> str:
        """A command line as one would type it."""
        set_ = "".join(f"{name}={value} " for name, value in self.env.items())
        return f"{set_}tito-audit {shlex.join(arguments)}"


def cases(inputs: Inputs, codes: Sequence[str], *, whole: bool) -> list[Case]:
    """All cases; `codes`: every rule there is."""
    listed = [*_words(codes), *_mistakes(inputs), *_settings()]
    for number, log in enumerate(inputs.of("format")):
        listed += _format(log, number, whole=whole)
    for number, log in enumerate(inputs.of("broken")):
        listed += _broken(log, number, whole=whole)
    for log in inputs.of("packed"):
        listed += [*_scans(log), _repair(log, "default", out=PurePosixPath(log.path).name)]
    for log in inputs.of("truth"):
        listed += [_all_reports(log), _repair(log, "default", out=PurePosixPath(log.path).name)]
        if whole:
            listed += [_repair(log, "warning", "--fail-on", "warning"), *_some_repairs(log, ("realign", "mask"))]
    for log in inputs.of("rollout"):
        listed += _rollout(log, whole=whole)
    for log in inputs.of("recorded"):
        listed += [_all_reports(log), _inspect(log), _repair(log, "default"), _show(log, 0)]
    return listed


def _plain(kind: str, *arguments: str, **more: object) -> Case:
    return Case(kind, (arguments,), **more)  # type: ignore[arg-type]


def _words(codes: Sequence[str]) -> Iterator[Case]:
    """What is printed without a log."""
    yield from (_plain("help", *line.split()) for line in ("", "--help", "--version"))
    for command in COMMANDS:
        yield from (_plain("help", command, *more) for more in ((), ("--help",), ("--no-such",)))
    for plugins in ("formats", "rules", "repairs", "reports", "nothing"):
        yield from (_plain("list", "list", plugins, *more) for more in ((), ("--markdown",)))
    yield from (_plain("explain", "explain", name) for name in (*codes, *REPAIRS, "TOK999", "slice", "tok101"))
    yield _plain("config", "config", "--schema")


def _mistakes(inputs: Inputs) -> Iterator[Case]:
    """What a user gets wrong, one message each."""
    log = inputs.of("format")[0].path
    yield from (_plain("mistake", *line.format(log=log).split()) for line in stored("same", "MISTAKES"))


def _settings() -> Iterator[Case]:
    """Settings from a file, from flags, and wrong ones."""
    log = "in/formats/generic.jsonl"
    files = {"tito-audit.toml": CONFIG}
    for line in (("config",), ("config", "-f", "json"), ("config", log, "--select", "TOK", "--worst", "3")):
        yield _plain("config", *line, files=files)
        yield _plain("config", *line)
    yield _plain("scan", "scan", log, "--jobs", "1", files=files)
    yield _plain("repair", "repair", log, "-o", "out.jsonl", files=files)
    for text in ("tokenizer = 3\n", "none = 1\n", "= x", 'fail-on = "none"\n', 'select = ["XYZ"]\n'):
        yield _plain("config", "config", files={"tito-audit.toml": text})
        yield _plain("scan", "scan", log, files={"tito-audit.toml": text})
    for more in stored("same", "OPTIONS"):
        yield _plain("scan", "scan", log, "-t", TOY, NO_CONFIG, "--jobs", "1", *more.split())
    yield _plain("scan", "scan", "in/formats", "-t", TOY, NO_CONFIG, "--jobs", "1", "-r", "json=report.json")
    yield _plain("repair", "repair", "in/formats/*.jsonl", "-o", "out", "-t", TOY, NO_CONFIG)
    yield from _others(log)
    own = ("--map", "token_ids=toks", "--map", "loss_mask=train_on", "--map", "logprobs=lp")
    yield _plain("scan", "scan", "in/docs/own_columns.jsonl", "-t", TOY, NO_CONFIG, "--jobs", "1", *own)
    yield _plain("repair", "repair", "in/docs/own_columns.jsonl", "-o", "out.jsonl", "-t", TOY, NO_CONFIG, *own)


def _others(log: str) -> Iterator[Case]:
    """Other tokenizers and templates, messages from elsewhere, rows deep in a document, files that are there."""
    toy = ("-t", TOY, NO_CONFIG)
    audit = ("-f", "concise", "--jobs", "1")
    yield _plain("scan", "scan", log, "-t", "in/toy_metaspace", NO_CONFIG, *audit)
    for text in (TEMPLATE, "{{ raise_exception('no') }}", "{% for", "{{ messages | tojson }}"):
        files = {"own.jinja": text}
        yield _plain("scan", "scan", log, *toy, *audit, "--chat-template", "own.jinja", files=files)
    joined = ("--messages", "in/joined/messages.jsonl", "--tools", "in/joined/tools.json")
    for more in (joined, (*joined, "--on", "id"), (*joined, "--on", "none"), joined[:2]):
        yield _plain("scan", "scan", "in/joined/rows.jsonl", *toy, *audit, *more)
        yield _plain("repair", "repair", "in/joined/rows.jsonl", "-o", "out.jsonl", *toy, *more)
    deep = ("in/joined/deep.json", "--rows-at", "data.rollouts")
    for place in ("data.rollouts", "data", "none", "data.*"):
        yield _plain("scan", "scan", "in/joined/deep.json", "--rows-at", place, *toy, *audit)
    yield _plain("repair", "repair", *deep, "-o", "out.json", *toy)
    yield _plain("convert", "convert", *deep, "--to", "calls", "-o", "out.jsonl", "--lossy", NO_CONFIG)
    yield _plain("inspect", "inspect", *deep, NO_CONFIG)
    there = {"out.jsonl": "mine\n"}
    for more in ((), ("--force",)):
        yield _plain("repair", "repair", log, "-o", "out.jsonl", *toy, *more, files=there)
        convert = ("convert", log, "--to", "rows", "--lossy", "-o", "out.jsonl", NO_CONFIG)
        yield _plain("convert", *convert, *more, files=there)
    yield _plain("scan", "scan", "in/packed", *toy, *audit)
    for name in ("out.jsonl.gz", "out.jsonl.zst", "out.parquet", "out.arrow", "out.json"):
        yield _plain("repair", "repair", "in/packed/rows.jsonl", "-o", name, *toy)
        slime = ("in/packed/rows.jsonl", "--to", "slime", "--lossy", "-o", name, NO_CONFIG)
        yield _plain("convert", "convert", *slime)
    steps = (("repair", log, "-o", "out.jsonl", *toy), ("scan", "out.jsonl", *toy, *audit))
    yield Case("repair and scan", steps)


def _audit(command: str, log: Log, *more: str, jobs: int = 1) -> tuple[str, ...]:
    spread = ("--jobs", str(jobs)) if command == "scan" else ()
    return command, log.path, "-t", log.tokenizer, NO_CONFIG, *spread, *more


def _all_reports(log: Log, **more: object) -> Case:
    reports = [part for name in REPORTS for part in ("-r", f"{name}=report.{name}")]
    return _plain("scan", *_audit("scan", log, *reports), **more)


def _scans(log: Log) -> Iterator[Case]:
    yield _all_reports(log)
    yield _plain("scan", "scan", log.path, NO_CONFIG, "--jobs", "1", "-r", "json=report.json", "-f", "concise")


def _show(log: Log, row: int, *more: str, **rest: object) -> Case:
    return _plain("show", *_audit("show", log, "--row", str(row), *more), **rest)


def _inspect(log: Log, *more: str) -> Case:
    return _plain("inspect", "inspect", log.path, NO_CONFIG, *more)


def _repair(log: Log, kind: str, *more: str, out: str = "out.jsonl") -> Case:
    reports = ("-o", out, "-r", "json=report.json", "-r", "text")
    return _plain(f"repair {kind}", *_audit("repair", log, *reports, *more))


def _some_repairs(log: Log, names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        yield _repair(log, f"--with {name}", "--unsafe", "--with", name, "--fail-on", "note")


def _converted(log: Log, form: str, *more: str) -> Case:
    return _plain("convert", "convert", log.path, "--to", form, "-o", "out.jsonl", NO_CONFIG, *more)


def _baseline(log: Log) -> Case:
    """A baseline is written, and then holds."""
    words = ("--baseline", "known.json", "-f", "concise")
    steps = (_audit("scan", log, *words, "--update-baseline"), _audit("scan", log, *words))
    return Case("baseline", steps)


def _format(log: Log, number: int, *, whole: bool) -> Iterator[Case]:
    """All there is to do with a small log."""
    yield from _scans(log)
    yield _show(log, 0, "--ids", "--logprobs")
    yield _show(log, 1, "--json")
    yield _inspect(log)
    yield _repair(log, "default")
    yield _plain("repair diff", *_audit("repair", log, "--diff", "--dry-run", "--unsafe", "--fail-on", "warning"))
    yield _repair(log, "quarantine", "--quarantine", "aside.jsonl", "--with", "splice,mask", "--no-provenance")
    chosen = FORMS if whole else [form for at, form in enumerate(FORMS) if at % 4 == number % 4]
    yield from (_converted(log, form, "--lossy") for form in chosen)
    if whole or number % 4 == 0:
        yield _baseline(log)
        yield _show(log, 2, "--full", env={"FORCE_COLOR": "1"})
        yield _inspect(log, "-f", "json")
    if not whole:
        yield from _some_repairs(log, [REPAIRS[number % len(REPAIRS)]])
        return
    yield _plain("inspect", "inspect", log.path, "-t", log.tokenizer, NO_CONFIG)
    yield _repair(log, "warning", "--fail-on", "warning")
    yield _repair(log, "unsafe", "--unsafe", "--fail-on", "note")
    yield from _some_repairs(log, REPAIRS)
    for style in ("labels", "binary", "float", "bool"):
        normal = ("--with", "normalize", "--mask-style", style, "--sentinel", "null", "--padding", "left")
        yield _repair(log, "normalize", *normal, "--fail-on", "note")
    for place in ("turn", "first-divergence"):
        yield _repair(log, "mask", "--with", "mask", "--mask-by", place)
    yield from (_converted(log, form) for form in FORMS)
    yield from (_converted(log, form, "--dry-run") for form in ("rows", "calls"))
    yield _plain("convert", "convert", log.path, "--to", "rows", "-o", "out.parquet", "--lossy", NO_CONFIG)
    yield _show(log, 0, "--around", "5", "--context", "3")
    yield _plain("show", "show", f"{log.path}:0:0", NO_CONFIG)
    yield _all_reports(log, env={"FORCE_COLOR": "1"})


def _broken(log: Log, number: int, *, whole: bool) -> Iterator[Case]:
    """What is done with rows that are wrong in every way."""
    yield _all_reports(log)
    yield _repair(log, "default", "--quarantine", "aside.jsonl")
    yield _converted(log, FORMS[number % len(FORMS)], "--lossy")
    yield from (_show(log, row) for row in ((0, 1, 2, 3) if whole else (number % 8,)))
    yield _plain("repair diff", *_audit("repair", log, "--diff", "--dry-run", "--unsafe", "--fail-on", "note"))
    if whole:
        yield _inspect(log, "-f", "json")
        yield _baseline(log)
        yield from _some_repairs(log, REPAIRS)
        yield from (_converted(log, form, "--lossy") for form in FORMS)


def _rollout(log: Log, *, whole: bool) -> Iterator[Case]:
    """A real log, also read and repaired by two processes."""
    yield _all_reports(log)
    report = ("-r", "json=report.json", "-r", "text=report.text")
    yield _plain("scan --jobs 2", *_audit("scan", log, *report, jobs=2), alone=True)
    yield _repair(log, "default")
    yield _show(log, 3)
    if whole:
        yield _repair(log, "warning", "--fail-on", "warning")
        yield _repair(log, "unsafe", "--unsafe", "--fail-on", "note")
        yield from (_converted(log, form, "--lossy") for form in FORMS)
        yield _inspect(log)
        yield from (_show(log, row, "--ids", "--logprobs") for row in (0, 7, 20))


def rules_of(listed: str) -> list[str]:
    """The codes in what `list rules` prints."""
    return sorted(set(re.findall(r"^([A-Z]{3}\d{3})\b", listed, re.MULTILINE)))
