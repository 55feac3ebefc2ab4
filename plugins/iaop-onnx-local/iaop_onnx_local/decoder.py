"""Runs a decoder model step by step, each text with its own cache of keys and values.

What a model wants is read from its session: names, shapes and types of inputs and outputs. Two ways
of feeding the cache exist, and the attention operator decides which is right:

- `GroupQueryAttention` writes new keys and values into the buffer that holds the old ones, when
  past and present are the same buffer: it is allocated once, for the whole text;
- other graphs give back the past with the new part joined on: the outputs of one step become the
  inputs of the next.

In neither does the cache pass through Python.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from attrs import frozen
from numpy.typing import NDArray

from iaop_onnx_local.operators import find_operators
from iaop_onnx_local.session import OpenSession
from iaop_onnx_local.turns import Turns

__all__ = ["CacheTensor", "Decoder", "DecoderText", "UnknownInputError"]

_PAST: Final = re.compile(r"past(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_PRESENT: Final = re.compile(r"present(?:_key_values?)?\.(\d+)\.(?:decoder\.)?(key|value)")
_TYPES: Final[dict[str, type[np.generic]]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_PROMPT_CHUNK: Final = 256
"""Prompt tokens of one step: others get their turn in between, and a cancellation is soon seen."""


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
    """A model ready to run.

    Args:
        opened: its session.
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
        self.turns = Turns()
        self.step_began: float | None = None
        """When the running step began, by `time.monotonic`."""
        self.shares_buffer = "GroupQueryAttention" in find_operators(path)
        inputs = {entry.name: entry for entry in self.session.get_inputs()}
        presents = {
            match.groups(): entry.name
            for entry in self.session.get_outputs()
            if (match := _PRESENT.fullmatch(entry.name))
        }
        self.cache: list[CacheTensor] = []
        for name, entry in inputs.items():
            if match := _PAST.fullmatch(name):
                present = presents.pop(match.groups(), None)
                if present is None:
                    raise UnknownInputError(f"its cache input {name!r} has no matching output")
                self.cache.append(_cache_tensor(entry, present, head_size, kv_heads))
        self.types = {
            name: _type_of(entry)
            for name, entry in inputs.items()
            if name in ("input_ids", "attention_mask", "position_ids")
        }
        unknown = inputs.keys() - self.types.keys() - {tensor.past for tensor in self.cache}
        if unknown:
            raise UnknownInputError(f"it has an input {min(unknown)!r}, which can't be fed")
        if "input_ids" not in inputs:
            raise UnknownInputError("it has no input 'input_ids'")
        if not self.cache:
            raise UnknownInputError("it has no cache inputs (past_key_values.N.key and .value)")
        if presents:
            raise UnknownInputError(f"its output {min(presents.values())!r} has no matching input")
        logits = next((o for o in self.session.get_outputs() if o.name == "logits"), None)
        if logits is None:
            raise UnknownInputError("it has no output 'logits'")
        self.logits_type = _type_of(logits)
        if not isinstance(logits.shape[-1], int):
            raise UnknownInputError("its output 'logits' does not tell the size of the vocabulary")
        self.vocabulary: int = logits.shape[-1]
        # A graph that makes the last position's logits alone says 1 here, others "sequence_length".
        self.last_logits_only = logits.shape[1] == 1

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory that one token of a text takes while its answer is made."""
        return sum(tensor.bytes_per_token for tensor in self.cache)

    @property
    def busy_s(self) -> float:
        """How long the running step has been running; 0 where none is."""
        began = self.step_began
        return 0.0 if began is None else time.monotonic() - began

    def open_text(self, capacity: int) -> DecoderText:
        """Begins a text of at most `capacity` tokens."""
        return DecoderText(self, capacity)


class DecoderText:
    """One text under way: its cache and how far it has come. Used by one thread at a time."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self._decoder = decoder
        self._capacity = capacity
        self._length = 0
        self._binding = decoder.session.io_binding()
        self._options = onnxruntime.RunOptions()
        self._ones = np.ones((1, capacity), decoder.types.get("attention_mask", np.int64))
        self._cache = (_SharedBuffers if decoder.shares_buffer else _GrowingOutputs)(
            decoder, self._binding, capacity
        )
        # Logits of one position always go to the same place; Python reads them, so on the CPU.
        self._row = np.empty((1, 1, decoder.vocabulary), decoder.logits_type)
        self._row_value = onnxruntime.OrtValue.ortvalue_from_numpy(self._row)

    def extend(self, token_ids: Sequence[int]) -> NDArray[np.floating]:
        """Appends tokens; returns the logits `[vocabulary]` of the position after them.

        The array is valid until the next call. Raises what ONNX Runtime raises, which is also what
        happens once `stop` was called.
        """
        for start in range(0, len(token_ids), _PROMPT_CHUNK):
            logits = self._step(token_ids[start : start + _PROMPT_CHUNK])
        return logits

    def stop(self) -> None:
        """Makes the step that is running, and every later one, fail. From any thread."""
        self._options.terminate = True

    def _step(self, token_ids: Sequence[int]) -> NDArray[np.floating]:
        decoder, binding, types = self._decoder, self._binding, self._decoder.types
        end = self._length + len(token_ids)
        if end > self._capacity:
            raise ValueError(f"{end} tokens were put into a text of {self._capacity}")
        binding.bind_cpu_input("input_ids", np.array([token_ids], types["input_ids"]))
        if "attention_mask" in types:
            binding.bind_cpu_input("attention_mask", self._ones[:, :end])
        if "position_ids" in types:
            positions = np.arange(self._length, end, dtype=types["position_ids"])
            binding.bind_cpu_input("position_ids", positions[None])
        self._cache.before_step()
        one_row = len(token_ids) == 1 or decoder.last_logits_only
        if one_row:
            binding.bind_ortvalue_output("logits", self._row_value)
        else:
            binding.bind_output("logits", "cpu")
        with decoder.turns:
            decoder.step_began = time.monotonic()
            try:
                decoder.session.run_with_iobinding(binding, self._options)
            finally:
                decoder.step_began = None
        self._length = end
        self._cache.after_step()
        # The logits are bound last, so they are the last output.
        logits = self._row if one_row else binding.get_outputs()[-1].numpy()
        last: NDArray[np.floating] = logits[0, -1]
        return last


class _SharedBuffers:
    """One buffer for each cache tensor, past and present at once, for the whole text."""

    def __init__(self, decoder: Decoder, binding: Any, capacity: int) -> None:
        # A binding does not keep the memory of what it binds alive in every release of the runtime.
        self._buffers = [_zeros(decoder, tensor, capacity) for tensor in decoder.cache]
        for tensor, buffer in zip(decoder.cache, self._buffers, strict=True):
            binding.bind_ortvalue_input(tensor.past, buffer)
            binding.bind_ortvalue_output(tensor.present, buffer)

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass


class _GrowingOutputs:
    """The presents of one step, wherever the runtime put them, are the pasts of the next."""

    def __init__(self, decoder: Decoder, binding: Any, _capacity: int) -> None:
        self._decoder, self._binding = decoder, binding
        self._pasts = [_zeros(decoder, tensor, 0) for tensor in decoder.cache]
        self._bind_pasts()

    def before_step(self) -> None:
        for tensor in self._decoder.cache:
            self._binding.bind_output(tensor.present, self._decoder.device)

    def after_step(self) -> None:
        # Outputs come in the order in which they were first bound: the logits are the last.
        self._pasts = self._binding.get_outputs()[:-1]
        self._bind_pasts()

    def _bind_pasts(self) -> None:
        for tensor, past in zip(self._decoder.cache, self._pasts, strict=True):
            self._binding.bind_ortvalue_input(tensor.past, past)


def _zeros(decoder: Decoder, tensor: CacheTensor, length: int) -> Any:
    values = np.zeros((1, tensor.heads, length, tensor.size), tensor.type)
    return onnxruntime.OrtValue.ortvalue_from_numpy(values, decoder.device)


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
            "stand neither there nor in genai_config.json"
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
