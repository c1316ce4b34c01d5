"""Whether record batches are safe to read: reading a damaged one would crash the process."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_sound(batch: Any) -> bool:
    """Whether nothing in a record batch points outside its data; text that is not UTF-8 does not count."""
    import pyarrow as pa

    try:
        batch.validate()
        return all(_array_is_sound(column) for column in batch.columns)
    except (pa.ArrowException, OSError, ValueError, IndexError):
        return False


def _array_is_sound(array: Any) -> bool:
    import pyarrow as pa

    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        # The check may have failed at text that is not UTF-8, which only invalidates its own row.
        return "UTF8" in str(error) and _is_sound_but_for_text(array)
    return True


def _is_sound_but_for_text(array: Any) -> bool:
    """The same for an array that contains text that is not UTF-8."""
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _is_sound_but_for_text(array.storage)
    if pa.types.is_string(kind):
        array.view(pa.binary()).validate(full=True)
        return True
    if pa.types.is_large_string(kind):
        array.view(pa.large_binary()).validate(full=True)
        return True
    if pa.types.is_struct(kind):
        return all(_array_is_sound(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        inside = len(offsets) == 0 or (offsets[0] >= 0 and offsets[-1] <= len(array.values))
        return bool(inside and (np.diff(offsets) >= 0).all()) and _array_is_sound(array.values)
    return pa.types.is_fixed_size_list(kind) and _array_is_sound(array.values)
