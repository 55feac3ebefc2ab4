"""One text on a model by itself, beneath the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.growing_cache import GrowingCache
from iaop_onnx_local.kv_cache import KvCache
from iaop_onnx_local.shared_cache import SharedCache


def open_cache(decoder: Decoder, *, rows: int = 1, capacity: int = 64) -> KvCache:
    kind = SharedCache if decoder.shares_buffer else GrowingCache
    return kind(decoder, rows=rows, capacity=capacity)


class OneText:
    """Appends tokens to a cache of one row."""

    def __init__(self, decoder: Decoder, capacity: int = 64) -> None:
        self._cache = open_cache(decoder, capacity=capacity)

    def extend(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        return self._cache.extend(0, token_ids)
