"""Files to rows and back."""

from __future__ import annotations

from tito_audit.storage.atomic import allow_open_files
from tito_audit.storage.datasets import dataset_metadata, write_dataset_metadata
from tito_audit.storage.find import LOG_SUFFIXES, find_logs
from tito_audit.storage.log import MAX_ROW_BYTES, Log, open_log
from tito_audit.storage.output import open_output
from tito_audit.storage.output_contract import Output
from tito_audit.storage.quarantine import Quarantine
from tito_audit.storage.row import RawRow
from tito_audit.storage.targets import make_folder, refuse_taken, same_place, target_paths

__all__ = [
    "LOG_SUFFIXES",
    "MAX_ROW_BYTES",
    "Log",
    "Output",
    "Quarantine",
    "RawRow",
    "allow_open_files",
    "dataset_metadata",
    "find_logs",
    "make_folder",
    "open_log",
    "open_output",
    "refuse_taken",
    "same_place",
    "target_paths",
    "write_dataset_metadata",
]
