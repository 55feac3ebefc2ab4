"""What a decoder model wants to be fed and gives back, as its session declares it.

Names, shapes and types of inputs and outputs come from the session, never from a configuration; the
configuration only fills in a size that a graph leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from iaop_onnx_local.operators import find_operators
from iaop_onnx_local.session import OpenSession

__all__ = ["CacheTensor", "Decoder", "UnknownInputError"]

_PAST: Final = re.compile(r"past(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_PRESENT: Final = re.compile(r"present(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_TYPES: Final[dict[str, type[np.generic]]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_LAST_POSITIONS: Final = ("num_logits_to_keep", "logits_to_keep")
"""Inputs that say of how many last positions logits are wanted."""
_FED: Final = frozenset(
    ("input_ids", "attention_mask", "position_ids", "use_cache_branch", *_LAST_POSITIONS)
)


class UnknownInputError(ValueError):
    """The model has an input or an output that the engine doesn't know how to feed or read."""


@frozen(slots=True)
class CacheTensor:
    """The keys or the values of one layer."""

    past: str
    """The input's name."""
    present: str
    """The output's name."""
    heads: int
    size: int
    """Numbers of one head at one position; keys and values may differ in it."""
    type: type[np.generic]

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.size * np.dtype(self.type).itemsize


class Decoder:
    """A model's session, and how to feed it.

    Args:
        opened: the session.
        path: the model file, for its operators.
        head_size: what the configuration says of the heads' size, for graphs that leave it open.
        kv_heads: likewise their number.

    Raises:
        UnknownInputError: the engine can't run such a model; the message names the input.
    """

    def __init__(
        self, opened: OpenSession, path: Path, *, head_size: int | None, kv_heads: int | None
    ) -> None:
        self.session = opened.session
        self.device = opened.device
        self.threads = opened.threads
        self.shares_buffer = "GroupQueryAttention" in find_operators(path)
        """Whether the attention operator writes into the buffer that holds the past."""
        inputs = {entry.name: entry for entry in self.session.get_inputs()}
        outputs = {entry.name: entry for entry in self.session.get_outputs()}
        self.cache = _cache_tensors(inputs, outputs, head_size, kv_heads)
        self._shapes = {name: tuple(inputs[name].shape) for name in _FED & inputs.keys()}
        self._types = {name: _type_of(inputs[name]) for name in self._shapes}
        unknown = inputs.keys() - self._types.keys() - {tensor.past for tensor in self.cache}
        if unknown:
            raise UnknownInputError(f"it has an input {min(unknown)!r}, which can't be fed")
        if "input_ids" not in inputs:
            raise UnknownInputError("it has no input 'input_ids'")
        if "logits" not in outputs:
            raise UnknownInputError("it has no output 'logits'")
        shape = outputs["logits"].shape
        self.logits_type = _type_of(outputs["logits"])
        if not isinstance(shape[-1], int):
            raise UnknownInputError("its output 'logits' does not tell the size of the vocabulary")
        self.vocabulary: int = shape[-1]
        # A graph that makes the last position's logits alone says 1 here, others "sequence_length".
        self.last_logits_only = shape[1] == 1 or not inputs.keys().isdisjoint(_LAST_POSITIONS)
        self.takes_padding = {"attention_mask", "position_ids"} <= self._types.keys()
        """Whether the graph is told which positions of a row count, and where they stand."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory that one token of a text takes while its answer is made."""
        return sum(tensor.bytes_per_token for tensor in self.cache)

    def feed(
        self,
        binding: Any,
        token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        make_mask: Callable[[], NDArray[np.bool_]],
    ) -> None:
        """Binds everything but the cache.

        Args:
            binding: the session's.
            token_ids: `[rows, new]`.
            starts: how many tokens each row holds already, `[rows]`.
            make_mask: makes the mask `[rows, past + new]` of the positions that count.
        """
        types = self._types
        self._bind(binding, "input_ids", token_ids)
        if "attention_mask" in types:
            self._bind(binding, "attention_mask", make_mask())
        if "position_ids" in types:
            places = np.arange(token_ids.shape[1], dtype=np.int64)
            self._bind(binding, "position_ids", starts[:, None] + places)
        for name in types.keys() - {"input_ids", "attention_mask", "position_ids"}:
            value = bool(starts.any()) if name == "use_cache_branch" else 1
            self._bind(binding, name, np.full([1] * len(self._shapes[name]), value))

    def run(self, binding: Any, options: Any) -> None:
        """Runs one step. Raises what ONNX Runtime raises, also when `options` say to terminate."""
        self.session.run_with_iobinding(binding, options)

    def _bind(self, binding: Any, name: str, value: NDArray[Any]) -> None:
        # The binding keeps the array alive until the next one takes its place.
        binding.bind_cpu_input(name, np.ascontiguousarray(value, self._types[name]))


def _cache_tensors(
    inputs: dict[str, Any], outputs: dict[str, Any], head_size: int | None, kv_heads: int | None
) -> list[CacheTensor]:
    presents = {m.groups(): name for name in outputs if (m := _PRESENT.fullmatch(name))}
    tensors = []
    for name, entry in inputs.items():
        if match := _PAST.fullmatch(name):
            present = presents.pop(match.groups(), None)
            if present is None:
                raise UnknownInputError(f"its cache input {name!r} has no matching output")
            tensors.append(_cache_tensor(entry, present, head_size, kv_heads))
    if not tensors:
        raise UnknownInputError("it has no cache inputs (past_key_values.N.key and .value)")
    if presents:
        raise UnknownInputError(f"its output {min(presents.values())!r} has no matching input")
    return tensors


def _cache_tensor(
    past: Any, present: str, head_size: int | None, kv_heads: int | None
) -> CacheTensor:
    if len(past.shape) != 4:
        raise UnknownInputError(f"its cache input {past.name!r} has shape {past.shape}, not 4 axes")
    heads = past.shape[1] if isinstance(past.shape[1], int) else kv_heads
    size = past.shape[3] if isinstance(past.shape[3], int) else head_size
    if heads is None or size is None:
        raise UnknownInputError(
            f"its cache input {past.name!r} has shape {past.shape}: the number and size of heads "
            "stand neither there nor in the configuration"
        )
    return CacheTensor(past.name, present, heads, size, _type_of(past))


def _type_of(entry: Any) -> type[np.generic]:
    try:
        return _TYPES[entry.type]
    except KeyError:
        known = ", ".join(_TYPES)
        raise UnknownInputError(
            f"its {entry.name!r} is a {entry.type}, which can't be handled; known: {known}"
        ) from None
