"""A Parquet file of any size: the row groups of a small one, repeated and uncompressed."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main"]


def main(source: str, target: str, size: int) -> None:
    """Write row groups of one file into another until it has this many bytes."""
    from pyarrow import parquet

    log = parquet.ParquetFile(source)
    with parquet.ParquetWriter(target, log.schema_arrow, compression="none", use_dictionary=False) as writer:
        while True:
            for group in range(log.num_row_groups):
                writer.write_table(log.read_row_group(group), row_group_size=1 << 20)
                if Path(target).stat().st_size >= size:
                    return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
