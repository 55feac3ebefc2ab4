"""Tensors and model metadata, the same for both protocols (KServe v2 inference protocol)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

Value: TypeAlias = bytes | bool | int | float


@frozen
class TensorSpec:
    """A tensor as a model's metadata declares it; a dimension of -1 is free."""

    name: str
    datatype: str
    """Such as `BYTES` (texts), `BOOL`, `UINT32`."""
    shape: tuple[int, ...]


@frozen
class ModelMetadata:
    """Which tensors a model takes and gives."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


@frozen
class Tensor:
    """An input of a request: one value in the dtype and shape that the model declares."""

    spec: TensorSpec
    value: Value

    @property
    def shape(self) -> tuple[int, ...]:
        """The declared shape, its free dimensions being 1."""
        return tuple(1 if size == -1 else size for size in self.spec.shape)


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
