"""The memory of a cache's tensors, on the CPU or on a device."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from iaop_onnx_local.decoder import CacheTensor, Decoder

__all__ = ["DeviceBuffer", "DeviceCopier", "HostBuffer", "make_buffers"]

# y = Identity(x) on bytes: an ONNX model (IR version 10, operators of version 21), as serialized.
_COPY_MODEL: Final = bytes.fromhex(
    "080a3a440a100a017812017922084964656e746974791204636f70795a140a0178120f0a0d080212"
    "090a071205627974657362140a0179120f0a0d080212090a071205627974657342040a001015"
)


def make_buffers(decoder: Decoder, rows: int, capacity: int) -> Sequence[HostBuffer | DeviceBuffer]:
    """One for each of the decoder's cache tensors, `rows` times `capacity` tokens."""
    if decoder.device == "cpu":
        return [HostBuffer(tensor, rows, capacity) for tensor in decoder.cache]
    copier = DeviceCopier(decoder.device, decoder.session.get_providers())
    return [DeviceBuffer(tensor, rows, capacity, copier) for tensor in decoder.cache]


class HostBuffer:
    """The memory of one cache tensor on the CPU; only taken as far as it is written."""

    def __init__(self, tensor: CacheTensor, rows: int, capacity: int) -> None:
        shape = (rows, tensor.heads, capacity, tensor.size)
        # Not numpy's own zeros, which come in pages of 2 MiB where the system has them.
        memory = _private_memory(prod(shape) * np.dtype(tensor.type).itemsize)
        self._memory = np.frombuffer(memory, tensor.type).reshape(shape)

    def view(self, first: int, count: int) -> tuple[Any, ...]:
        """Some rows, as `bind_input` and `bind_output` take a place."""
        rows = self._memory[first : first + count]
        return "cpu", 0, rows.dtype.type, rows.shape, rows.ctypes.data

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first tokens of a row to another one."""
        self._memory[target, :, :length] = self._memory[source, :, :length]


class DeviceBuffer:
    """As `HostBuffer`, in the memory of a device."""

    def __init__(self, tensor: CacheTensor, rows: int, capacity: int, copier: DeviceCopier) -> None:
        self._type, self._copier = tensor.type, copier
        self._row_shape = (tensor.heads, capacity, tensor.size)
        self._token_bytes = tensor.size * np.dtype(tensor.type).itemsize
        self._head_bytes = capacity * self._token_bytes
        self._row_bytes = tensor.heads * self._head_bytes
        self._memory = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            (rows, *self._row_shape), tensor.type, copier.device
        )
        self._address = self._memory.data_ptr()

    def view(self, first: int, count: int) -> tuple[Any, ...]:
        """As `HostBuffer.view`."""
        address = self._address + first * self._row_bytes
        return self._copier.device, 0, self._type, (count, *self._row_shape), address

    def copy(self, source: int, target: int, length: int) -> None:
        """As `HostBuffer.copy`."""
        start = self._address + source * self._row_bytes
        distance = (target - source) * self._row_bytes
        for place in range(start, start + self._row_bytes, self._head_bytes):
            self._copier.copy(place, place + distance, length * self._token_bytes)


class DeviceCopier:
    """Copies within a device's memory, which ONNX Runtime's Python can't by itself."""

    def __init__(self, device: str, providers: Sequence[str]) -> None:
        self.device = device
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(_COPY_MODEL, options, providers=providers)
        self._binding = self._session.io_binding()

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        shape = (size_bytes,)
        self._binding.bind_input("x", self.device, 0, np.uint8, shape, source)
        self._binding.bind_output("y", self.device, 0, np.uint8, shape, target)
        self._session.run_with_iobinding(self._binding)


def _private_memory(size_bytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size_bytes)  # Windows
