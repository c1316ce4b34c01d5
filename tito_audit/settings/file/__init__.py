"""The configuration file: the settings of a project, under the names of the flags.

It is the nearest `tito-audit.toml` or `pyproject.toml` with a table `[tool.tito-audit]`, from the working folder
upwards; in the same folder `tito-audit.toml` comes first. A flag overrides the file. Relative paths start from the
folder of the file. `extend` names files whose settings apply where this one sets none, and `overrides` are
settings for some of the logs.
"""

from __future__ import annotations

from tito_audit.settings.file._merge import Merged, merged_config, toml_key, toml_value
from tito_audit.settings.file._read import Config, FileOverride, find_config, read_config
from tito_audit.settings.file._schema import config_schema
from tito_audit.settings.file._toml import EXTEND, OVERRIDES, PATHS, Search, look_for_config

__all__ = [
    "EXTEND",
    "OVERRIDES",
    "PATHS",
    "Config",
    "FileOverride",
    "Merged",
    "Search",
    "config_schema",
    "find_config",
    "look_for_config",
    "merged_config",
    "read_config",
    "toml_key",
    "toml_value",
]
