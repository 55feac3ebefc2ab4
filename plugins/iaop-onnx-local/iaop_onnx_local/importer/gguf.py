"""A memory-mapped reader for GGUF files.

Reads the header and the metadata and gives each tensor as a view of the mapped file: no tensor is
copied and no dictionary of the vocabulary is built until someone asks for one.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from enum import IntEnum
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

__all__ = ["GgufError", "GgufFile", "GgufTensor", "TensorType"]

_MAGIC: Final = b"GGUF"
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9


class GgufError(ValueError):
    """The file is not a GGUF file, is damaged, or holds something that can't be imported."""


class TensorType(IntEnum):
    """The tensor encodings that can be imported (values from `ggml_type`)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8

    @property
    def block_length(self) -> int:
        """How many elements one block holds."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """How many bytes one block takes in the file."""
        return _BLOCKS[self][1]


_BLOCKS: Final = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q8_0: (32, 34),
}


@frozen(slots=True)
class GgufTensor:
    """One tensor; `shape` is row-major (the slowest axis first), unlike in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    raw: NDArray[np.uint8] = field(repr=False, eq=False)
    """The encoded bytes, a read-only view of the mapped file."""


class GgufFile:
    """An open GGUF file. Close it, or use it as a context manager; views die with it.

    Raises:
        GgufError: the file is no GGUF file of version 2 or 3, is cut short, or a tensor has an
            encoding that can't be imported (the message names both).
        OSError: the file can't be read.
    """

    metadata: dict[str, Any]
    """Scalars, strings and lists by key, such as `llama.block_count`."""
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # an empty file can't be mapped
                raise GgufError(f"{self.path} is empty, not a GGUF file") from None
        try:
            self.metadata, self.tensors = _parse(self._map)
        except struct.error:
            raise GgufError(f"{self.path} ends inside its header: the file is cut short") from None
        except GgufError as error:
            raise GgufError(f"{self.path}: {error}") from None

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Returns a metadata value that has to be there and of the given type.

        Raises:
            GgufError: the key is missing or its value is of another type.
        """
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise GgufError(f"{self.path}: metadata key {key!r} {found}")
        return value

    def close(self) -> None:
        self.tensors = {}
        with suppress(BufferError):  # a caller still holds a view; the map goes with the last one
            self._map.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def read(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def read_string(self) -> str:
        length = self.read("Q")
        start = self.position
        self.position += length
        if self.position > len(self.data):
            raise struct.error
        # Token texts of some vocabularies are not valid UTF-8; keep their bytes recoverable.
        return self.data[start : self.position].decode("utf-8", "surrogateescape")

    def read_value(self, kind: int) -> Any:
        if code := _SCALARS.get(kind):
            return self.read(code)
        if kind == _STRING:
            return self.read_string()
        if kind == _ARRAY:
            return self._read_array(self.read("I"), self.read("Q"))
        raise GgufError(f"unknown metadata value type {kind}: a damaged file or a newer format")

    def _read_array(self, kind: int, count: int) -> list[Any]:
        if code := _SCALARS.get(kind):
            values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
            self.position += struct.calcsize(f"<{count}{code}")
            return list(values)
        return [self.read_value(kind) for _ in range(count)]


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if data[:4] != _MAGIC:
        raise GgufError("not a GGUF file (its first four bytes are not 'GGUF')")
    cursor = _Cursor(data)
    cursor.position = 4
    version = cursor.read("I")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    tensor_count, value_count = cursor.read("Q"), cursor.read("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.read_string()
        metadata[key] = cursor.read_value(cursor.read("I"))
    entries = [_read_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // alignment) * alignment
    whole = np.frombuffer(data, np.uint8)
    tensors = {}
    for name, shape, kind, offset in entries:
        begin = start + offset
        end = begin + prod(shape) // kind.block_length * kind.block_bytes
        if end > len(data):
            raise GgufError(f"tensor {name!r} ends beyond the file: the file is cut short")
        tensors[name] = GgufTensor(name, shape, kind, whole[begin:end])
    return metadata, tensors


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.read_string()
    shape = tuple(reversed([cursor.read("Q") for _ in range(cursor.read("I"))]))
    number = cursor.read("I")
    offset = cursor.read("Q")
    try:
        kind = TensorType(number)
    except ValueError:
        known = ", ".join(member.name for member in TensorType)
        raise GgufError(
            f"tensor {name!r} has ggml type {number}, which can't be imported; known: {known}"
        ) from None
    if shape and shape[-1] % kind.block_length:
        raise GgufError(f"tensor {name!r} has rows of {shape[-1]} elements, no whole blocks")
    return name, shape, kind, offset
