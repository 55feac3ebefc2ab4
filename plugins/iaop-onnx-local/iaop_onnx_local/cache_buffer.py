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
        self._row_shape = (tensor.heads, capacity, tensor.size)
        row_bytes = prod(self._row_shape) * np.dtype(tensor.type).itemsize
        # Not numpy's own zeros, which come in pages of 2 MiB where the system has them.
        memory = np.frombuffer(_private_memory(rows * row_bytes), tensor.type)
        self._memory = memory.reshape(rows, *self._row_shape)

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
        self._type, self._device, self._copier = tensor.type, copier.device, copier
        self._row_shape = (tensor.heads, capacity, tensor.size)
        self._token_bytes = tensor.size * np.dtype(tensor.type).itemsize
        self._memory = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            (rows, *self._row_shape), tensor.type, copier.device
        )

    def view(self, first: int, count: int) -> tuple[Any, ...]:
        """As `HostBuffer.view`."""
        return self._device, 0, self._type, (count, *self._row_shape), self._address(first)

    def copy(self, source: int, target: int, length: int) -> None:
        """As `HostBuffer.copy`."""
        heads, capacity, _ = self._row_shape
        for head in range(heads):
            place = head * capacity * self._token_bytes
            self._copier.copy(
                self._address(source) + place,
                self._address(target) + place,
                length * self._token_bytes,
            )

    def _address(self, row: int) -> int:
        address: int = self._memory.data_ptr()
        return address + row * prod(self._row_shape[:2]) * self._token_bytes


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
