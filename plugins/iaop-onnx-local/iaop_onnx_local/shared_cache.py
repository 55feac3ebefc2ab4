"""The cache for `GroupQueryAttention`, which writes into the buffer that holds the past.

One buffer `[rows, heads, capacity, size]` for each cache tensor is bound as past and as present, so
a step moves nothing but the new keys and values. The operator reads from the mask only how long
each row is, and a row's new part goes to its own end: rows of different lengths make a step
together. A prompt runs in a view of its own row.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from iaop_onnx_local.decoder import CacheTensor, Decoder
from iaop_onnx_local.kv_cache import KvCache

__all__ = ["SharedCache"]

# y = Identity(x) on bytes: an ONNX model (IR version 10, operators of version 21), as serialized.
_COPY_MODEL: Final = bytes.fromhex(
    "080a3a440a100a017812017922084964656e746974791204636f70795a140a0178120f0a0d080212"
    "090a071205627974657362140a0179120f0a0d080212090a071205627974657342040a001015"
)


class SharedCache(KvCache):
    """See the module.

    Args:
        decoder: the model.
        rows: texts at a time.
        capacity: tokens of a text at most.
        pairs: never steps one row by itself, but another one with it.
    """

    def __init__(self, decoder: Decoder, *, rows: int, capacity: int, pairs: bool = False) -> None:
        super().__init__(decoder, rows=rows, capacity=capacity)
        self._pairs = pairs and rows > 1
        self._buffers = [_Buffer(decoder, tensor, rows, capacity) for tensor in decoder.cache]
        self._bindings: dict[tuple[int, int], Any] = {}
        self._logits = np.zeros((rows, 1, decoder.vocabulary), decoder.logits_type)
        self._copier = _Copier(decoder)

    def extend(
        self, row: int, token_ids: Sequence[int], options: Any = None
    ) -> NDArray[np.floating]:
        if self._pairs:
            return self._extend_in_pairs(row, token_ids, options)
        logits: NDArray[np.floating] = self._run([row], row, np.array([token_ids]), options)[0]
        return logits

    def _extend_in_pairs(
        self, row: int, token_ids: Sequence[int], options: Any
    ) -> NDArray[np.floating]:
        """The last token goes with another row, so that its logits always come by the same way."""
        *rest, last = token_ids
        other = row + 1 if row + 1 < self.rows else row - 1
        span = sorted((row, other))
        if len(rest) > 1:
            self._run([row], row, np.array([rest]), options)
        elif rest:
            self._step_span(span, {row: rest[0]}, options)
        return self._step_span(span, {row: last}, options)[0]

    def _step_together(
        self, rows: Sequence[int], token_ids: Sequence[int], options: Any
    ) -> list[NDArray[np.floating]]:
        tokens = dict(zip(rows, token_ids, strict=True))
        return self._step_span((rows[0], rows[-1]), tokens, options)

    def _step_span(
        self, span: Sequence[int], tokens: Mapping[int, int], options: Any
    ) -> list[NDArray[np.floating]]:
        first, last = span
        # Rows in between that have no token to append write one behind what they hold.
        ids = np.zeros((last - first + 1, 1), np.int64)
        for row in range(first, last + 1):
            if row in tokens:
                ids[row - first] = tokens[row]
            else:
                self.lengths[row] = min(self.lengths[row], self.capacity - 1)
        logits = self._run(list(tokens), first, ids, options)
        return [logits[row - first] for row in tokens]

    def cut(self, row: int, length: int) -> None:
        self.lengths[row] = length

    def copy(self, source: int, target: int, length: int) -> None:
        for buffer in self._buffers:
            for place, size_bytes in buffer.heads_of(source, length):
                self._copier.copy(place, place + buffer.distance(source, target), size_bytes)
        self.lengths[target] = length

    def _run(
        self, rows: Sequence[int], first: int, ids: NDArray[np.int64], options: Any
    ) -> NDArray[np.floating]:
        """Runs the rows from `first` on; of them, `rows` hold the new tokens then."""
        count, new = ids.shape
        binding = self._binding(first, count)
        starts = np.array(self.lengths[first : first + count], np.int64)
        ends = starts + new
        if ends.max() > self.capacity:
            raise ValueError(f"{ends.max()} tokens were put into a row of {self.capacity}")
        places = np.arange(ends.max())
        self.decoder.feed(binding, ids, starts, lambda: places < ends[:, None])
        fits = new == 1 or self.decoder.last_logits_only
        if fits:
            into = self._logits[first : first + count]
            binding.bind_output("logits", "cpu", 0, into.dtype, into.shape, into.ctypes.data)
        else:
            binding.bind_output("logits", "cpu")
        self.decoder.run(binding, options)
        for row in rows:
            self.lengths[row] += new
        if fits:
            return self._logits[first : first + count, -1]
        # Outputs come in the order in which they were first bound: the logits are the last.
        logits = binding.get_outputs()[-1].numpy()
        return np.array(logits[:, -1])  # a copy: the runtime frees its own

    def _binding(self, first: int, count: int) -> Any:
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = self.decoder.session.io_binding()
            for tensor, buffer in zip(self.decoder.cache, self._buffers, strict=True):
                place = buffer.view(first, count)
                binding.bind_input(tensor.past, *place)
                binding.bind_output(tensor.present, *place)
        return binding


class _Buffer:
    """The memory of one cache tensor. On the CPU it is only taken as far as it is written."""

    def __init__(self, decoder: Decoder, tensor: CacheTensor, rows: int, capacity: int) -> None:
        self._device, self._type = decoder.device, tensor.type
        self._row_shape = (tensor.heads, capacity, tensor.size)
        self._token_bytes = tensor.size * np.dtype(tensor.type).itemsize
        self._row_bytes = prod(self._row_shape) * np.dtype(tensor.type).itemsize
        if self._device == "cpu":
            # Not numpy's own zeros, which come in pages of 2 MiB where the system has them.
            self._memory: Any = np.frombuffer(_private_memory(rows * self._row_bytes), np.uint8)
            self._address = self._memory.ctypes.data
        else:
            self._memory = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                (rows, *self._row_shape), tensor.type, self._device
            )
            self._address = self._memory.data_ptr()

    def view(self, first: int, count: int) -> tuple[Any, ...]:
        """Some rows, as `bind_input` and `bind_output` take a place."""
        address = self._address + first * self._row_bytes
        return self._device, 0, self._type, (count, *self._row_shape), address

    def heads_of(self, row: int, length: int) -> list[tuple[int, int]]:
        """Where the first tokens of a row are: address and bytes of each head's."""
        heads, capacity, _ = self._row_shape
        row_address = self._address + row * self._row_bytes
        return [
            (row_address + head * capacity * self._token_bytes, length * self._token_bytes)
            for head in range(heads)
        ]

    def distance(self, row: int, other: int) -> int:
        return (other - row) * self._row_bytes


class _Copier:
    """Copies within the device's memory, which ONNX Runtime's Python can't by itself."""

    def __init__(self, decoder: Decoder) -> None:
        self._device = decoder.device
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            _COPY_MODEL, options, providers=decoder.session.get_providers()
        )
        self._binding = self._session.io_binding()

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        shape = (size_bytes,)
        self._binding.bind_input("x", self._device, 0, np.uint8, shape, source)
        self._binding.bind_output("y", self._device, 0, np.uint8, shape, target)
        self._session.run_with_iobinding(self._binding)


def _private_memory(size_bytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size_bytes)  # Windows
