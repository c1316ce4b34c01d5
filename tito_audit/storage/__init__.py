"""Files to rows and back."""

from __future__ import annotations

from tito_audit.storage.atomic import (
    make_folder,
    output_path,
    path_identity,
    raise_open_file_limit,
    refuse_existing,
    target_paths,
)
from tito_audit.storage.caller_logs import (
    Logs,
    MemoryOutput,
    Name,
    log_names,
    log_paths,
    memory_targets,
    open_memory_output,
    passed_logs,
)
from tito_audit.storage.find import (
    dataset_metadata,
    find_logs,
    first_few,
    skipped_files,
    write_dataset_metadata,
)
from tito_audit.storage.in_memory import RowsInMemory, is_in_memory
from tito_audit.storage.log import Log, open_log
from tito_audit.storage.output import Output, Quarantine, open_output
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.watch import path_from_name

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
    "dataset_metadata",
    "find_logs",
    "first_few",
    "is_in_memory",
    "log_names",
    "log_paths",
    "make_folder",
    "memory_targets",
    "open_log",
    "open_memory_output",
    "open_output",
    "output_path",
    "passed_logs",
    "path_from_name",
    "path_identity",
    "raise_open_file_limit",
    "refuse_existing",
    "skipped_files",
    "target_paths",
    "write_dataset_metadata",
]
