"""The configuration file: settings that a project keeps, under the names of the flags.

`tito-audit.toml`, or the table `[tool.tito-audit]` of a `pyproject.toml`: the nearest one, from the working folder
upwards, and in one folder `tito-audit.toml` before `pyproject.toml`. A flag stands in place of the file's value.
Relative paths are relative to the file. `extend` names files whose settings hold where this one says nothing, and
`overrides` are settings for some logs only.
"""

from __future__ import annotations

from tito_audit.settings.file._read import Config, FileOverride, Search, find_config, look_for_config, read_config
from tito_audit.settings.file._schema import config_schema
from tito_audit.settings.file._toml import EXTEND, OVERRIDES, PATHS

__all__ = [
    "EXTEND",
    "OVERRIDES",
    "PATHS",
    "Config",
    "FileOverride",
    "Search",
    "config_schema",
    "find_config",
    "look_for_config",
    "read_config",
]
