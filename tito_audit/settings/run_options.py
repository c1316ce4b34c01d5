"""The options of a run: its reports, how much it reads, its configuration file, its speed."""

from __future__ import annotations

from functools import partial
from typing import Final

from tito_audit.settings import readers, values
from tito_audit.settings.model import Encoder, Engine, Settings
from tito_audit.settings.option import FlagOnly, Option, numbered, under

_EVERY = ("scan", "repair", "convert", "show", "inspect", "identify", "template", "rescore")
_FILE = (*_EVERY, "serve")

_of_run = partial(Option, fills=Settings)

RUN_OPTIONS: Final = under(
    "Running",
    Option(
        "report",
        "A report, to stdout or a file; `list reports` names them. Repeatable.",
        ("scan",),
        short="-r",
        panel="Reports",
        metavar="NAME[=FILE]",
        repeats=True,
        completes="reports",
        key_takes=values.REPORTS,
        key_after="jobs",
        unset="text",
    ),
    Option(
        "report",
        "text or json, to stdout or a file. Repeatable. [default: text]",
        ("repair",),
        short="-r",
        panel="Reports",
        metavar="NAME[=FILE]",
        repeats=True,
        completes="repair_reports",
    ),
    Option(
        "report",
        "text, json or html, to stdout or a file. Repeatable. [default: text]",
        ("rescore",),
        short="-r",
        panel="Reports",
        metavar="NAME[=FILE]",
        repeats=True,
        completes="rescore_reports",
    ),
    Option(
        "output_format",
        "The report on stdout; everything else goes to stderr. [default: text]",
        ("scan",),
        short="-f",
        panel="Reports",
        metavar="NAME",
        completes="reports",
        key_takes=values.text("the name of a report"),
        key_after="report",
        unset="text",
    ),
    Option(
        "output_format",
        "The report on stdout: text or json. [default: text]",
        ("repair",),
        short="-f",
        panel="Reports",
        metavar="NAME",
        completes="repair_reports",
    ),
    Option(
        "output_format",
        "The report on stdout: text, json or html. [default: text]",
        ("rescore",),
        short="-f",
        panel="Reports",
        metavar="NAME",
        completes="rescore_reports",
    ),
    numbered(
        "limit",
        "Stop after this many rows, counted over all logs.",
        ("scan", "identify", "rescore"),
        "a number of rows",
        1,
        short="-n",
        panel="Input",
        helps={"identify": "Rows to read, the first of each log. [default: 400]"},
        fills=Settings,
        key_after="sample",
        unset="every row",
    ),
    _of_run(
        "sample",
        "Audit about this share of the rows, 0.05 or 5%: the same rows every time.",
        ("scan", "rescore"),
        metavar="SHARE",
        takes=readers.share,
        panel="Input",
        key_takes=values.SHARE,
        unset="every row",
    ),
    numbered(
        "max_row_bytes",
        "Report longer rows as REC001 instead of reading them.",
        ("scan", "repair", "convert", "inspect", "identify", "template", "rescore"),
        "a number of bytes",
        1,
        metavar="BYTES",
        panel="Input",
        fills=Settings,
    ),
    _of_run(
        "trust_remote_code",
        "Let a tokenizer run its own Python code.",
        ("scan", "repair", "show", "inspect", "identify", "template", "rescore", "serve"),
        takes=bool,
        flag_only=FlagOnly.CODE,
    ),
    # The file is searched for once both are parsed, in this order.
    Option(
        "no_config",
        "Read no configuration file.",
        _FILE,
        takes=bool,
        calls="read_no_file",
        flag_only=FlagOnly.READ,
    ),
    Option(
        "config",
        "Read settings from this file. [default: tito-audit.toml or pyproject.toml, here or in a folder above]",
        _FILE,
        metavar="FILE",
        calls="read_file",
        flag_only=FlagOnly.READ,
    ),
    numbered(
        "jobs",
        "How many processes to use; the result is the same. [default: one per core]",
        ("scan", "repair"),
        "a number of processes",
        1,
        short="-j",
        fills=Settings,
        unset="one per core",
    ),
    _of_run(
        "engine",
        "Where to work: in processes on this machine, or in tasks of a Ray cluster, --jobs of them at once or one "
        "per CPU. The result is the same.",
        ("scan", "repair"),
        takes=Engine,
    ),
    _of_run(
        "address",
        "With --engine ray, the cluster: HOST:PORT, auto for the one on this machine, local for a new one. "
        "[default: $RAY_ADDRESS, or auto, or local]",
        ("scan", "repair"),
        metavar="HOST:PORT",
        key_takes=values.text("the address of a Ray cluster"),
        unset="RAY_ADDRESS, or auto, or local",
    ),
    Option(
        "resume",
        "Skip logs that an earlier run finished and that have not changed since. The result is the same.",
        ("scan", "repair"),
        takes=bool,
        flag_only=FlagOnly.PURPOSE,
    ),
    Option(
        "journal",
        "Record each finished log in this file. [default, with --resume: OUT.journal, beside what the run writes]",
        ("scan", "repair"),
        metavar="FILE",
        flag_only=FlagOnly.WRITTEN,
    ),
    _of_run(
        "encoder",
        "Which encoder runs first; tokenizers confirms every difference before it is reported. auto: fastokens "
        "for large logs.",
        ("scan", "repair", "rescore"),
        takes=Encoder,
        key_after="sampled-roles",
    ),
    numbered(
        "worst",
        "Findings shown in full by the text report.",
        ("scan",),
        "a number of findings",
        0,
        default=10,
        panel="Reports",
    ),
    Option(
        "quiet",
        "No progress line, and only the reports that you name.",
        ("scan", "repair", "convert", "rescore"),
        short="-q",
        takes=bool,
        helps={
            "convert": "No progress line, and no list of what is kept.",
        },
        key_takes=values.FLAG,
    ),
)
