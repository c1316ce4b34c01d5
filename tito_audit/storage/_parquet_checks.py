"""Whether the column chunks of a Parquet file can be asked for: a damaged one would end the process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tito_audit.storage._parquet_footer import Footer

_NOT_READ = "no page is read"
_CODECS = range(8)
"""UNCOMPRESSED, SNAPPY, GZIP, LZO, BROTLI, LZ4, ZSTD, LZ4_RAW."""
# Fields of a row group, of a column chunk, and of what is said about it.
_COLUMNS, _ABOUT, _PATH, _CODEC = 1, 3, 3, 4


class _NoPages(io.RawIOBase):
    """A file of a size whose bytes cannot be read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise OSError(_NOT_READ)


def check_chunks(metadata: Any, size: int) -> None:
    """Raise an Arrow error, OSError or ValueError if what a footer says of a column chunk is damaged.

    pyarrow's own accessors of a column chunk end the process there, but its reader raises before it reads a page.
    `size`: bytes of the file.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(_NoPages(size), metadata=metadata, pre_buffer=True) as file:
        try:
            file.read_row_groups(range(metadata.num_row_groups), use_threads=False)
        except NotImplementedError:
            return  # a type that cannot be read, which is told where its rows are
        except OSError as error:
            if _NOT_READ not in str(error):
                raise


def check_forms(path: Path, schema: Any) -> None:
    """ValueError or IndexError if a column chunk has a codec that does not exist, or another column's path.

    pyarrow ends the process where it is asked for the name of such a codec, and reads columns by their places
    alone.
    """
    names = [schema.column(place).path.encode() for place in range(len(schema))]
    with path.open("rb") as file:
        for number, group in enumerate(Footer(file).groups()):
            for chunk, name in zip(group.get(_COLUMNS).values, names, strict=True):
                about = chunk.get(_ABOUT)
                if about is None or about.get(_CODEC) not in _CODECS:
                    raise ValueError(f"row group {number}: no such codec in a column chunk of {name.decode()!r}")
                own = b".".join(about.get(_PATH).values)
                if own != name:
                    raise ValueError(
                        f"row group {number}: {own!r} is at the place of the column {name.decode()!r}"
                    )
