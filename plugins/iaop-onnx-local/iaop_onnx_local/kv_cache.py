"""The keys and values of the texts under way.

A cache holds a fixed number of rows, each for one text of up to `capacity` tokens. A row keeps what
it holds after its text has ended, so that another text with the same beginning can go on from it.
Rows are used by one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from iaop_onnx_local.decoder import Decoder

__all__ = ["ROUNDING", "TOLERABLE", "KvCache"]

ROUNDING: Final = 1e-3
TOLERABLE: Final = 0.25


class KvCache(ABC):
    """Rows of keys and values, and the model's steps on them.

    Args:
        decoder: the model.
        rows: texts at a time.
        capacity: tokens of a text at most.
    """

    def __init__(self, decoder: Decoder, *, rows: int, capacity: int) -> None:
        self.decoder = decoder
        self.rows = rows
        self.capacity = capacity
        self.lengths = [0] * rows
        """Tokens that each row holds."""
        self.joins_rows = True
        """Whether one run of the model makes a step of several rows."""
        self.steps_spans = False
        """Whether such a run computes the rows between the first and the last as well."""

    @property
    def max_bytes(self) -> int:
        """The memory that all rows take when all are full."""
        return self.rows * self.capacity * self.decoder.cache_bytes_per_token

    @abstractmethod
    def extend(
        self, row: int, token_ids: Sequence[int], options: Any = None
    ) -> NDArray[np.floating]:
        """Appends tokens to one row.

        Args:
            row: which.
            token_ids: at least one.
            options: `onnxruntime.RunOptions`, by which another thread can end the run.

        Returns:
            The logits `[vocabulary]` of the position after them, valid until the row is next used.

        Raises:
            Exception: what ONNX Runtime raises; the row then holds what it held before.
        """

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[NDArray[np.floating]]:
        """Appends one token to each of several rows; as `extend` otherwise.

        `rows` are in ascending order; the logits are in the order of `rows`.
        """
        if self.joins_rows and len(rows) > 1:
            return self._step_together(rows, token_ids)
        return [self.extend(row, [token]) for row, token in zip(rows, token_ids, strict=True)]

    @abstractmethod
    def _step_together(
        self, rows: Sequence[int], token_ids: Sequence[int]
    ) -> list[NDArray[np.floating]]: ...

    @abstractmethod
    def cut(self, row: int, length: int) -> None:
        """Forgets what a row holds beyond the first `length` tokens."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the target row hold the first `length` tokens of the source row, and no more."""

    def difference(self) -> float:
        """How far apart two rows are when they are stepped together, and when each is by itself.

        Not every graph that takes a mask heeds it; and where weights are quantized, the kernels for
        one row round otherwise than those for several. Uses the first two rows, leaves all empty.

        Returns:
            The difference of the logits, as a part of their spread: nothing but rounding is below
            `ROUNDING`, quantized kernels stay below `TOLERABLE`, a wrong mask is far above it.
        """
        if self.rows < 2 or not self.joins_rows:
            return 0.0
        # From all over the vocabulary: the first tokens of many are control tokens.
        ids = [self.decoder.vocabulary * place // 11 for place in range(1, 10)]
        texts, nexts = (ids[:5], ids[5:7]), ids[7:]
        for row, text in enumerate(texts):
            self.extend(row, text)
        together = [np.array(row, np.float32) for row in self.step((0, 1), nexts)]
        differences = []
        for row, text in enumerate(texts):
            self.cut(row, len(text))
            alone = np.array(self.extend(row, [nexts[row]]), np.float32)
            error = np.sqrt(np.mean((alone - together[row]) ** 2))
            differences.append(float(error / (alone.std() or 1)))
        for row in range(2):
            self.cut(row, 0)
        return max(differences)
