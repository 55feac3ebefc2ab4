"""Which operators a model file uses, read without the onnx package.

How the cache has to be fed depends on the attention operator, which ONNX Runtime does not tell. The
names stand in the file, under the field numbers of
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. Everything else is stepped over, so even a
file of gigabytes takes milliseconds.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["find_operators"]

_MODEL_GRAPH: Final = 7
_MODEL_FUNCTION: Final = 25
_GRAPH_NODE: Final = 1
_FUNCTION_NODE: Final = 7
_NODE_OPERATOR: Final = 4
_NODE_ATTRIBUTE: Final = 5
_ATTRIBUTE_GRAPHS: Final = (6, 11)
"""One graph, and several."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def find_operators(path: Path) -> frozenset[str]:
    """Returns the operator types of all graphs: the main one, branches, loops and functions.

    Raises:
        ValueError: the file is not an ONNX model.
        OSError: the file can't be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            whole = (0, len(data))
            return frozenset(
                data[begin:end].decode("utf-8")
                for holder, node in ((_MODEL_GRAPH, _GRAPH_NODE), (_MODEL_FUNCTION, _FUNCTION_NODE))
                for part in _fields(data, *whole, holder)
                for begin, end in _operators(data, part, node)
            )
        except IndexError:
            raise ValueError(f"{path} is not an ONNX model, or is cut short") from None


def _operators(
    data: mmap.mmap, part: tuple[int, int], node_field: int
) -> Iterator[tuple[int, int]]:
    """The places of the names of a graph's operators."""
    for node in _fields(data, *part, node_field):
        yield from _fields(data, *node, _NODE_OPERATOR)
        for attribute in _fields(data, *node, _NODE_ATTRIBUTE):
            for kind in _ATTRIBUTE_GRAPHS:
                for graph in _fields(data, *attribute, kind):
                    yield from _operators(data, graph, _GRAPH_NODE)


def _fields(data: mmap.mmap, position: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """The places of one length-delimited field among those of a message."""
    while position < end:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _BYTES:
            length, position = _varint(data, position)
            if position + length > end:
                raise IndexError
            if tag >> 3 == wanted:
                yield position, position + length
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise IndexError


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
