"""Tensors and model metadata, the same for both protocols (KServe v2 inference protocol)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

Value: TypeAlias = bytes | bool | int | float

INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""The least and the greatest value of each integer datatype."""


@frozen(cache_hash=True)
class TensorSpec:
    """A tensor as a model's metadata declares it; a dimension of -1 is free."""

    name: str
    datatype: str
    """Such as `BYTES` (texts), `BOOL`, `UINT32`."""
    shape: tuple[int, ...]


@frozen
class ModelMetadata:
    """Which tensors a model takes and gives, and how it answers."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    decoupled: bool | None
    """Whether one request may have several responses; None where the server does not tell."""
    required: frozenset[str] = frozenset()
    """Inputs that a request can't leave out, as far as the server tells."""


@frozen
class Tensor:
    """An input of a request: one value, or several texts, in the dtype and shape declared."""

    spec: TensorSpec
    values: tuple[Value, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The declared shape; its free dimensions are 1, the last one of them takes the values."""
        shape = [1 if size == -1 else size for size in self.spec.shape]
        if len(self.values) != 1:
            shape[-1] = len(self.values)
        return tuple(shape)


@frozen
class Response:
    """One response of a model: the values of its outputs, flattened, by name."""

    outputs: Mapping[str, tuple[Value, ...]]


@frozen
class ModelState:
    """A model version in the server's repository."""

    name: str
    version: str
    state: str
    """`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`, or empty when it was never loaded."""
    reason: str
