"""What a decoder model wants to be fed and gives back, as its session declares it.

Names, shapes and types of inputs and outputs come from the session, never from a configuration; the
configuration only fills in a size that a graph leaves open.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from iaop_onnx_local.operators import find_operators
from iaop_onnx_local.session import OpenSession

__all__ = ["CacheTensor", "Decoder", "Feed", "UnknownInputError"]

_PAST: Final = re.compile(r"past(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_PRESENT: Final = re.compile(r"present(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_TYPES: Final[dict[str, type[np.generic]]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
Feed: TypeAlias = dict[str, NDArray[Any]]
"""Inputs by name."""

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
        vocabulary: likewise how many logits there are.

    Raises:
        UnknownInputError: the engine can't run such a model; the message names the input.
    """

    def __init__(
        self,
        opened: OpenSession,
        path: Path,
        *,
        head_size: int | None = None,
        kv_heads: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.session = opened.session
        self.device = opened.device
        self.memory = opened.memory
        """Where the cache lives: on other devices ONNX Runtime moves it from and to the CPU."""
        self.threads = opened.threads
        inputs = {entry.name: entry for entry in self.session.get_inputs()}
        outputs = {entry.name: entry for entry in self.session.get_outputs()}
        self.cache = _cache_tensors(inputs, outputs, head_size, kv_heads)
        self._fed = {
            name: (len(inputs[name].shape), _type_of(inputs[name])) for name in _FED & inputs.keys()
        }
        """The axes and the type of each input that is fed."""
        unknown = inputs.keys() - self._fed.keys() - {tensor.past for tensor in self.cache}
        if unknown:
            raise UnknownInputError(f"it has an input {min(unknown)!r}, which can't be fed")
        for name in ("input_ids", "attention_mask", "position_ids"):
            if name in inputs:
                _check_open(inputs[name])
        if "input_ids" not in inputs:
            raise UnknownInputError("it has no input 'input_ids'")
        if "logits" not in outputs:
            raise UnknownInputError("it has no output 'logits'")
        self.logits_type, self.vocabulary, last_only = _logits(outputs["logits"], vocabulary)
        self.last_logits_only = last_only or not inputs.keys().isdisjoint(_LAST_POSITIONS)
        takes_rows = not isinstance(inputs["input_ids"].shape[0], int)
        grouped = "GroupQueryAttention" in find_operators(path)
        self.shares_buffer = (
            grouped
            and takes_rows
            and "use_cache_branch" not in inputs
            and self.memory == self.device
        )
        """Whether the attention operator writes into the buffer that holds the past."""
        told = {"attention_mask", "position_ids"} <= self._fed.keys()
        self.takes_padding = told and takes_rows and not grouped
        """Whether a row may begin with padding: the graph is told which positions count, and where
        they stand. `GroupQueryAttention` reads from the mask no more than how many do."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory that one token of a text takes while its answer is made."""
        return sum(tensor.bytes_per_token for tensor in self.cache)

    def feed(self, binding: Any, ids: NDArray[Any], starts: NDArray[Any], mask: Any) -> Feed:
        """Binds everything but the cache and the logits.

        Args:
            binding: the session's.
            ids: the new tokens, `[rows, new]`.
            starts: how many tokens each row holds already, `[rows]`.
            mask: which positions count, `[rows, past + new]` or wider.

        Returns:
            The arrays that were bound. On the CPU their memory itself is.
        """
        places = np.arange(ids.shape[1])
        values = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": starts[:, None] + places,
        }
        values["use_cache_branch"] = np.atleast_1d(starts.any())
        values |= dict.fromkeys(_LAST_POSITIONS, np.ones(1))
        feed = {}
        for name, (axes, kind) in self._fed.items():
            value = values[name] if axes else values[name].reshape(())
            feed[name] = np.array(value, kind, order="C")
        for name, value in feed.items():
            # The binding keeps the array alive until the next one takes its place.
            binding.bind_cpu_input(name, value)
        return feed

    def run(self, binding: Any, options: Any = None) -> None:
        """Runs one step. Raises what ONNX Runtime raises, also when `options` say to terminate."""
        self.session.run_with_iobinding(binding, options)


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
    if isinstance(past.shape[2], int):
        raise UnknownInputError(
            f"its cache input {past.name!r} has the fixed shape {past.shape}; it has to take any "
            "number of tokens"
        )
    heads = past.shape[1] if isinstance(past.shape[1], int) else kv_heads
    size = past.shape[3] if isinstance(past.shape[3], int) else head_size
    if heads is None or size is None:
        raise UnknownInputError(
            f"its cache input {past.name!r} has shape {past.shape}: the number and size of heads "
            "stand neither there nor in the configuration"
        )
    return CacheTensor(past.name, present, heads, size, _type_of(past))


def _check_open(entry: Any) -> None:
    """An input `[rows, positions]` that leaves at least the number of positions open."""
    shape = entry.shape
    fixed = len(shape) != 2 or isinstance(shape[1], int)
    if fixed or (isinstance(shape[0], int) and shape[0] != 1):
        raise UnknownInputError(
            f"its input {entry.name!r} has the fixed shape {shape}; it has to be [rows, positions] "
            "with any number of positions"
        )


def _logits(entry: Any, vocabulary: int | None) -> tuple[type[np.generic], int, bool]:
    """Their type, how many there are, and whether only those of the last position are made."""
    if len(entry.shape) != 3:
        raise UnknownInputError(f"its output 'logits' has shape {entry.shape}, not 3 axes")
    _, positions, size = entry.shape
    if not isinstance(size, int):
        size = vocabulary
    if size is None:
        raise UnknownInputError(
            "the size of the vocabulary stands neither at its output 'logits' nor in the "
            "configuration"
        )
    # A graph that makes the last position's logits alone says 1 here, others "sequence_length".
    return _type_of(entry), size, positions == 1


def _type_of(entry: Any) -> type[np.generic]:
    try:
        return _TYPES[entry.type]
    except KeyError:
        known = ", ".join(_TYPES)
        raise UnknownInputError(
            f"its {entry.name!r} is a {entry.type}, which can't be handled; known: {known}"
        ) from None
