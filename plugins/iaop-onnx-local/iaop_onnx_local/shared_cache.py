"""The cache for `GroupQueryAttention`, which writes into the buffer that holds the past.

One buffer `[rows, heads, capacity, size]` for each cache tensor is bound as past and as present, so
a step moves nothing but the new keys and values. The operator reads from the mask only how long
each row is, and a row's new part goes to its own end: rows of different lengths make a step
together. A prompt runs in a view of its own row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from iaop_onnx_local.cache_buffer import make_buffers
from iaop_onnx_local.decoder import Decoder, Feed
from iaop_onnx_local.kv_cache import KvCache

__all__ = ["SharedCache"]

_MASK_STEP: Final = 64


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
        self.steps_spans = True
        self._pairs = pairs and rows > 1
        self._buffers = make_buffers(decoder, rows, capacity)
        self._prompts: dict[int, Any] = {}
        """Bindings for prompts, by row."""
        self._steps: dict[tuple[int, int], _Step] = {}
        """For steps, by the first row and the number of rows."""
        self._logits = np.zeros((rows, 1, decoder.vocabulary), decoder.logits_type)

    def extend(
        self, row: int, token_ids: Sequence[int], options: Any = None
    ) -> NDArray[np.floating]:
        if len(token_ids) > 1:
            return self._read(row, token_ids, options)
        span = self._pair_of(row) if self._pairs else (row, row)
        return self._step(span, {row: token_ids[0]})[0]

    def _step_together(
        self, rows: Sequence[int], token_ids: Sequence[int]
    ) -> list[NDArray[np.floating]]:
        tokens = dict(zip(rows, token_ids, strict=True))
        return self._step((rows[0], rows[-1]), tokens)

    def cut(self, row: int, length: int) -> None:
        self.lengths[row] = length

    def copy(self, source: int, target: int, length: int) -> None:
        for buffer in self._buffers:
            buffer.copy(source, target, length)
        self.lengths[target] = length

    def _pair_of(self, row: int) -> tuple[int, int]:
        return (row, row + 1) if row + 1 < self.rows else (row - 1, row)

    def _read(self, row: int, token_ids: Sequence[int], options: Any) -> NDArray[np.floating]:
        """Appends several tokens to one row."""
        start = self.lengths[row]
        end = self._checked(start + len(token_ids))
        binding = self._prompts.get(row)
        if binding is None:
            binding = self._prompts[row] = self._bound(row, 1)
        ids, starts = np.array([token_ids]), np.array([start])
        self.decoder.feed(binding, ids, starts, np.ones((1, end)))
        if self.decoder.last_logits_only:
            _bind_logits(binding, self._logits[row : row + 1])
        else:
            binding.bind_output("logits", "cpu")
        self.decoder.run(binding, options)
        self.lengths[row] = end
        if self.decoder.last_logits_only:
            last: NDArray[np.floating] = self._logits[row, -1]
            return last
        # Outputs come in the order in which they were first bound: the logits are the last.
        return np.array(binding.get_outputs()[-1].numpy()[0, -1])  # the runtime frees its own

    def _step(self, span: tuple[int, int], tokens: Mapping[int, int]) -> list[NDArray[np.floating]]:
        """Appends one token to some rows of a span, the first and the last of which are given."""
        first, count = span[0], span[1] - span[0] + 1
        # Rows in between that have no token to append write one behind what they hold.
        lengths = []
        for row in range(first, first + count):
            if row not in tokens:
                self.lengths[row] = min(self.lengths[row], self.capacity - 1)
            lengths.append(self._checked(self.lengths[row] + 1) - 1)
        step = self._steps.get((first, count))
        if step is None:
            binding = self._bound(first, count)
            _bind_logits(binding, self._logits[first : first + count])
            step = self._steps[first, count] = _Step(self.decoder, binding, self.capacity)
        step.run([tokens.get(row, 0) for row in range(first, first + count)], lengths)
        for row in tokens:
            self.lengths[row] += 1
        return [self._logits[row, -1] for row in tokens]

    def _checked(self, length: int) -> int:
        if length > self.capacity:
            raise ValueError(f"{length} tokens were put into a row of {self.capacity}")
        return length

    def _bound(self, first: int, count: int) -> Any:
        """A binding with some rows as past and as present."""
        binding = self.decoder.session.io_binding()
        for tensor, buffer in zip(self.decoder.cache, self._buffers, strict=True):
            place = buffer.view(first, count)
            binding.bind_input(tensor.past, *place)
            binding.bind_output(tensor.present, *place)
        return binding


class _Step:
    """Steps of one token on the same rows, for which as little as can be is bound anew."""

    def __init__(self, decoder: Decoder, binding: Any, capacity: int) -> None:
        self._decoder, self._binding, self._capacity = decoder, binding, capacity
        self._width = 0
        self._lengths: list[int] = []
        """Of the rows as the bound mask has them, the new token among them."""
        self._feed: Feed = {}

    def run(self, token_ids: list[int], lengths: list[int]) -> None:
        if self._decoder.device != "cpu" or max(lengths) >= self._width:
            self._bind(token_ids, lengths)
        else:
            self._change(token_ids, lengths)
        self._lengths = [length + 1 for length in lengths]
        self._decoder.run(self._binding)

    def _bind(self, token_ids: list[int], lengths: list[int]) -> None:
        # The operator takes a mask that is wider than need be, so it need not change each step.
        width = (max(lengths) // _MASK_STEP + 1) * _MASK_STEP
        self._width = min(width, self._capacity)
        starts = np.array(lengths)
        mask = np.arange(self._width) <= starts[:, None]
        self._feed = self._decoder.feed(self._binding, np.array(token_ids)[:, None], starts, mask)

    def _change(self, token_ids: list[int], lengths: list[int]) -> None:
        """Writes into the arrays that are bound."""
        self._feed["input_ids"][:, 0] = token_ids
        if "position_ids" in self._feed:
            self._feed["position_ids"][:, 0] = lengths
        mask = self._feed.get("attention_mask")
        if mask is not None:
            for place, (length, known) in enumerate(zip(lengths, self._lengths, strict=True)):
                if length != known:
                    mask[place, :length] = 1
                    mask[place, length:] = 0
                mask[place, length] = 1


def _bind_logits(binding: Any, logits: NDArray[np.floating]) -> None:
    binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
