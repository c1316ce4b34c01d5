"""`tito-audit config`: the effective settings, and where each comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tito_audit.cli._options import Options, gate_settings_of, repair_settings_of, run_config
from tito_audit.cli._outputs import print_object, wanted_reports
from tito_audit.formats import format_named
from tito_audit.repairs import repair_named
from tito_audit.reports import report_named
from tito_audit.settings.file import OVERRIDES, PATHS, find_config, toml_value
from tito_audit.settings.model import Override
from tito_audit.settings.options import KEYS
from tito_audit.storage import find_logs
from tito_audit.terminal.encoding import print_json
from tito_audit.terminal.escape import inert, visible
from tito_audit.unknown import unknown_name

SCHEMAS = ("config", "record", "report", "rescore", "rescore-prompts", "validate")
"""The JSON schemas that `--schema` prints."""


def config(options: Options, logs: list[str] | None) -> None:
    """Show the effective settings and where each comes from."""
    if options.schema:
        name = logs[0] if logs else "config"
        if name not in SCHEMAS:
            raise unknown_name("schema", name, SCHEMAS)
        text = files("tito_audit").joinpath(f"schemas/{name}.schema.json").read_text(encoding="utf-8")
        print_json(text.rstrip("\n"))
        return
    # Refuse what no run could start with.
    settings = options.settings()
    for format in (settings.format, *(override.changes.get("format") for override in settings.overrides)):
        if format is not None:
            format_named(format)
    for name in repair_settings_of(**options.values).strategies:
        repair_named(name)
    gate_settings_of(**options.values)
    for name, _ in wanted_reports(options, logs or []):
        report_named(name)
    current = settings_object(options, find_logs(logs or []))
    if options.shape == "json":
        print_object(current)
        return
    for line in page_lines(current, named=options.is_flagged("config"), off=options.no_config):
        print(inert(visible(line)))


_MOST_LOGS = 3
"""How many logs a line names; the others are counted."""


def settings_object(options: Options, files: Sequence[Path]) -> dict[str, Any]:
    """The settings in effect, for all logs and for each, with values as a configuration file here would hold them.

    Paths are relative to the working folder where that is shorter.
    """
    config = run_config(options.context)
    search = find_config(Path.cwd()) if config.path is None and not options.no_config else None
    flags = frozenset(name for name, option in KEYS.items() if options.is_flagged(option.name))
    settings = {}
    for name, option in KEYS.items():
        if name in config.values and name not in flags:
            settings[name] = _setting(name, config.values[name], "file", config.sources[name])
        else:
            origin = "flag" if name in flags else "default"
            settings[name] = _setting(name, options.context.params.get(option.name), origin)
    logs = []
    for file in files:
        fitting = [each for each in config.overrides if Override(each.patterns, {}).fits(file)]
        changed = {
            name: _setting(name, value, "file", override.file)
            for override in fitting
            for name, value in override.values.items()
            if name not in flags
        }
        indices = [config.overrides.index(override) for override in fitting]
        logs.append({"file": str(file), "overrides": indices, "settings": settings | changed})
    return {
        "schema_version": 1,
        "folder": str(Path.cwd()),
        "file": _short(config.path) if config.path is not None else None,
        "extended": [{"file": _short(file), "by": _short(by)} for file, by in config.extended_by.items()],
        "passed_over": [_short(file) for file in search.passed_over] if search is not None else [],
        "settings": settings,
        "overrides": [
            {
                "name": str(override),
                "file": _short(override.file),
                "paths": list(override.paths),
                "settings": {name: _as_written(name, value) for name, value in override.values.items()},
                "overruled_by_flags": [name for name in override.values if name in flags],
            }
            for override in config.overrides
        ],
        "logs": logs,
    }


def _setting(name: str, value: Any, origin: str, file: Path | None = None) -> dict[str, Any]:
    return {"value": _as_written(name, value), "from": origin, "file": None if file is None else _short(file)}


def _as_written(name: str, value: Any) -> Any:
    """A value as a configuration file in the working folder would hold it; None if it is unset."""
    plain = getattr(value, "value", value)  # the word of an enum
    return None if plain is None or plain == () else KEYS[name].kind.to_toml(plain, Path.cwd())


def _short(path: Path) -> str:
    """The path relative to the working folder, if that is shorter."""
    near = os.path.relpath(path)
    return near if len(near) < len(str(path)) else str(path)


def page_lines(current: dict[str, Any], *, named: bool, off: bool) -> Iterator[str]:
    """The page. `named`: --config named the file; `off`: --no-config was passed."""
    if current["file"] is not None:
        yield f"# Settings from {current['file']}" + (", given by --config" if named else "")
        for each in current["extended"]:
            yield f"# and from {each['file']}, which {each['by']} extends"
    elif off:
        yield "# No configuration file (--no-config)"
    else:
        yield "# No configuration file: no tito-audit.toml, and no pyproject.toml with a table [tool.tito-audit],"
        yield f"# in {current['folder']} or a folder above it"
        for passed in current["passed_over"]:
            yield f"# {passed} was skipped: it has no table [tool.tito-audit]"
    sources = {each["file"]: f"{each['file']}, extended by {each['by']}" for each in current["extended"]}

    def origin(name: str, entry: dict[str, Any]) -> str:
        file = entry["file"]
        return KEYS[name].flag if entry["from"] == "flag" else sources.get(file, file) or "default"

    yield ""
    for name, entry in current["settings"].items():
        if entry["value"] is None:
            yield f"# {name} is not set" + (f": {KEYS[name].unset}" if KEYS[name].unset else "")
        else:
            yield _line(name, entry["value"], origin(name, entry))
    overrides = current["overrides"]
    for override in overrides:
        yield ""
        yield _line(f"[[{OVERRIDES}]]", None, sources.get(override["file"], override["file"]))
        yield _line(PATHS, override["paths"], "")
        for name, value in override["settings"].items():
            overruled = name in override["overruled_by_flags"]
            yield _line(name, value, f"not in effect: {KEYS[name].flag} was passed" if overruled else "")
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for log in current["logs"]:
        groups.setdefault(tuple(log["overrides"]), []).append(log)
    for indices, logs in groups.items():
        yield ""
        names = ", ".join(log["file"] for log in logs[:_MOST_LOGS])
        names += f" and {len(logs) - _MOST_LOGS:,} more" if len(logs) > _MOST_LOGS else ""
        fitting = [overrides[index] for index in indices]
        if not fitting:
            yield f"# {names}: as above, no override matches"
            continue
        others = (f" of {each['file']}" if each["file"] != current["file"] else "" for each in fitting)
        applied = [f"{each['name']}{where}" for each, where in zip(fitting, others, strict=True)]
        yield f"# {names}: as above, with {', '.join(applied)}"
        changed = (name for each in fitting for name in each["settings"] if name not in each["overruled_by_flags"])
        for name in dict.fromkeys(changed):
            entry = logs[0]["settings"][name]
            yield _line(name, entry["value"], origin(name, entry))


def _line(name: str, value: Any, remark: str) -> str:
    text = name if value is None else f"{name} = {toml_value(value)}"
    # Remarks start at this column, unless the value is longer.
    return f"{text:<48}  # {remark}" if remark else text
