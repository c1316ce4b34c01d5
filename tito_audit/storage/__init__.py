"""Files to rows and back."""

from __future__ import annotations

from tito_audit.storage.atomic import allow_open_files, make_folder, refuse_taken, same_place, target_paths
from tito_audit.storage.find import (
    dataset_metadata,
    few,
    find_logs,
    skipped_files,
    write_dataset_metadata,
)
from tito_audit.storage.in_memory import RowsInMemory, is_in_memory
from tito_audit.storage.log import Log, open_log
from tito_audit.storage.output import Output, Quarantine, open_output
from tito_audit.storage.passed import (
    Logs,
    MemoryOutput,
    Name,
    memory_targets,
    names_of,
    open_memory_output,
    passed_logs,
    paths_of,
)
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.remote_output import output_path, place_key
from tito_audit.storage.row import RawRow
from tito_audit.storage.watch import path_of

__all__ = [
    "Log",
    "Logs",
    "MemoryOutput",
    "Name",
    "Output",
    "Quarantine",
    "RawRow",
    "RemoteFile",
    "RowsInMemory",
    "allow_open_files",
    "dataset_metadata",
    "few",
    "find_logs",
    "is_in_memory",
    "make_folder",
    "memory_targets",
    "names_of",
    "open_log",
    "open_memory_output",
    "open_output",
    "output_path",
    "passed_logs",
    "path_of",
    "paths_of",
    "place_key",
    "refuse_taken",
    "same_place",
    "skipped_files",
    "target_paths",
    "write_dataset_metadata",
]
