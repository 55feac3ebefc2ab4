"""The cache for graphs that give back the past with the new part joined on.

The outputs of one step become the inputs of the next. Rows of different lengths can make a step
together where the graph takes a mask and positions: the shorter ones are padded on the left. The
batch is put together anew only when rows join or leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.kv_cache import KvCache

__all__ = ["GrowingCache"]

_Pasts = list[Any]
"""An `OrtValue` `[rows, heads, length, size]` for each cache tensor."""


class GrowingCache(KvCache):
    """See the module."""

    def __init__(self, decoder: Decoder, *, rows: int, capacity: int) -> None:
        super().__init__(decoder, rows=rows, capacity=capacity)
        self.joins_rows = decoder.takes_padding
        self._alone: dict[int, _Pasts] = {}
        """The rows that are not in the batch; one that isn't here is empty."""
        self._batch: list[int] = []
        self._pasts: _Pasts = []
        """Of the batch; a row's tokens are the last ones."""

    def extend(
        self, row: int, token_ids: Sequence[int], options: Any = None
    ) -> NDArray[np.floating]:
        if row in self._batch:
            self._regroup([other for other in self._batch if other != row])
        pasts = self._alone.get(row) or self._of_length([0])
        starts = np.array([self.lengths[row]], np.int64)
        ids = np.array([token_ids], np.int64)
        logits, self._alone[row] = self._run(pasts, ids, starts, options)
        self.lengths[row] += len(token_ids)
        last: NDArray[np.floating] = logits[0]
        return last

    def _step_together(
        self, rows: Sequence[int], token_ids: Sequence[int]
    ) -> list[NDArray[np.floating]]:
        if self._batch != list(rows):
            self._regroup(list(rows))
        starts = np.array([self.lengths[row] for row in rows], np.int64)
        ids = np.array(token_ids, np.int64)[:, None]
        logits, self._pasts = self._run(self._pasts, ids, starts, None)
        for row in rows:
            self.lengths[row] += 1
        return list(logits)

    def cut(self, row: int, length: int) -> None:
        if row in self._batch:
            self._regroup([other for other in self._batch if other != row])
        if length == 0:
            self._alone.pop(row, None)
        elif length < self.lengths[row]:
            self._alone[row] = self._beginning(row, length)
        self.lengths[row] = length

    def copy(self, source: int, target: int, length: int) -> None:
        if source in self._batch:
            pasts = self._taken_out(self._batch.index(source), self.lengths[source], length)
        else:
            pasts = self._beginning(source, length)
        self.cut(target, 0)
        self._alone[target] = pasts
        self.lengths[target] = length

    def _run(
        self, pasts: _Pasts, ids: NDArray[np.int64], starts: NDArray[np.int64], options: Any
    ) -> tuple[NDArray[np.floating], _Pasts]:
        decoder, binding = self.decoder, self.decoder.session.io_binding()
        width = starts.max() + ids.shape[1]
        if width > self.capacity:
            raise ValueError(f"{width} tokens were put into a row of {self.capacity}")
        padding = starts.max() - starts
        decoder.feed(binding, ids, starts, np.arange(width) >= padding[:, None])
        for tensor, past in zip(decoder.cache, pasts, strict=True):
            binding.bind_ortvalue_input(tensor.past, past)
            binding.bind_output(tensor.present, decoder.memory)
        binding.bind_output("logits", "cpu")
        decoder.run(binding, options)
        *presents, logits = binding.get_outputs()
        return np.array(logits.numpy()[:, -1]), presents  # a copy: the runtime frees its own

    def _regroup(self, rows: list[int]) -> None:
        """Takes the batch apart and puts one of `rows` together."""
        for place, row in enumerate(self._batch):
            length = self.lengths[row]
            self._alone[row] = self._taken_out(place, length, length)
        self._batch, self._pasts = [], []
        if rows:
            lengths = [self.lengths[row] for row in rows]
            self._pasts = self._of_length(lengths, [self._alone[row] for row in rows])
            self._batch = rows
            for row in rows:
                del self._alone[row]

    def _of_length(self, lengths: list[int], parts: list[_Pasts] | None = None) -> _Pasts:
        """Pasts for rows of these lengths, from their own ones: padded on the left."""
        made = []
        for index, tensor in enumerate(self.decoder.cache):
            shape = (len(lengths), tensor.heads, max(lengths), tensor.size)
            values = np.zeros(shape, tensor.type)
            for place, part in enumerate(parts or ()):
                values[place, :, max(lengths) - lengths[place] :] = part[index].numpy()[0]
            made.append(self._placed(values))
        return made

    def _taken_out(self, place: int, held: int, length: int) -> _Pasts:
        """The first `length` of the `held` tokens of the batch's row at a place."""
        made = []
        for past in self._pasts:
            values = past.numpy()[place : place + 1]
            begin = values.shape[2] - held
            made.append(self._placed(values[:, :, begin : begin + length]))
        return made

    def _beginning(self, row: int, length: int) -> _Pasts:
        return [self._placed(past.numpy()[:, :, :length]) for past in self._alone[row]]

    def _placed(self, values: NDArray[Any]) -> Any:
        # A copy in any case: `values` may be a view of what the runtime is about to free.
        return onnxruntime.OrtValue.ortvalue_from_numpy(
            np.array(values, order="C"), self.decoder.memory
        )
