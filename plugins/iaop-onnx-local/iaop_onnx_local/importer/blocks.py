"""The quantized blocks of a GGUF tensor, rearranged for ONNX Runtime's block operators.

`MatMulNBits` and `GatherBlockQuantized` compute `scale * (q - zero_point)` over blocks of
unsigned integers, with a zero point of half the range (8 or 128). The GGUF encodings map onto that
without rounding anything:

- Q4_0 is `d * (q - 8)`: the same thing;
- Q8_0 is `d * q` with signed `q`: add 128 to each `q`;
- Q4_1 is `d * q + m`, which is `d * (q - 8)` plus the constant `m + 8 d` for the whole block;
  the constant goes into `offsets`, and a matrix product adds `offsets @ block sums of x`.

Block layouts: `block_q4_0`, `block_q4_1` and `block_q8_0` in ggml's `ggml-common.h`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from iaop_onnx_local.importer.gguf import GgufTensor, TensorType

__all__ = ["BLOCK_LENGTH", "BlockWeight", "dequantize", "to_blocks"]

BLOCK_LENGTH: Final = 32
"""Elements in a block, the same for each quantized encoding that can be imported."""


@frozen(slots=True)
class BlockWeight:
    """A quantized matrix of `rows` × `columns` as the ONNX Runtime operators want it."""

    bits: int
    """4 or 8."""
    values: NDArray[np.uint8] = field(repr=False, eq=False)
    """`[rows, columns / 32, 32 * bits / 8]`; of two 4-bit values the first is the low half."""
    scales: NDArray[np.float32] = field(repr=False, eq=False)
    """`[rows, columns / 32]`."""
    offsets: NDArray[np.float32] | None = field(default=None, repr=False, eq=False)
    """`[rows, columns / 32]`, added to each element of a block; None where all are zero."""

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def columns(self) -> int:
        return int(self.values.shape[1]) * BLOCK_LENGTH


def to_blocks(tensor: GgufTensor) -> BlockWeight:
    """Rearranges a quantized matrix; exact, no value is rounded.

    Raises:
        ValueError: the tensor is not quantized or not a matrix.
    """
    if tensor.type is TensorType.Q4_0:
        scales, values = _read(tensor, scalars=1)
        return BlockWeight(4, _pair(values), scales[..., 0])
    if tensor.type is TensorType.Q4_1:
        scales, values = _read(tensor, scalars=2)
        step, minimum = scales[..., 0], scales[..., 1]
        return BlockWeight(4, _pair(values), step, minimum + 8 * step)
    if tensor.type is TensorType.Q8_0:
        scales, values = _read(tensor, scalars=1)
        return BlockWeight(8, values ^ np.uint8(0x80), scales[..., 0])  # two's complement + 128
    raise ValueError(f"tensor {tensor.name!r} is {tensor.type.name}, not quantized")


def dequantize(tensor: GgufTensor) -> NDArray[np.float32]:
    """Returns the tensor's values in float32, by the definition of its encoding."""
    if tensor.type is TensorType.F32:
        return tensor.raw.view(np.float32).reshape(tensor.shape)
    if tensor.type is TensorType.F16:
        return tensor.raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
    if tensor.type is TensorType.Q8_0:
        scales, values = _read(tensor, scalars=1)
        numbers = values.view(np.int8).astype(np.float32) * scales
    else:
        scales, halves = _read(tensor, scalars=tensor.type - 1)
        # The low halves of the 16 bytes are elements 0 to 15, the high halves 16 to 31.
        nibbles = np.concatenate([halves & 15, halves >> 4], axis=-1).astype(np.float32)
        if tensor.type is TensorType.Q4_0:
            numbers = (nibbles - 8) * scales
        else:
            numbers = nibbles * scales[..., :1] + scales[..., 1:]
    return numbers.reshape(tensor.shape)


def _read(tensor: GgufTensor, scalars: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Splits each block into its leading float16 scalars and its bytes."""
    if len(tensor.shape) != 2:
        raise ValueError(f"tensor {tensor.name!r} has shape {tensor.shape}, not a matrix")
    blocks = tensor.raw.reshape(tensor.shape[0], -1, tensor.type.block_bytes)
    leading = np.ascontiguousarray(blocks[..., : 2 * scalars]).view(np.float16)
    return leading.astype(np.float32), np.ascontiguousarray(blocks[..., 2 * scalars :])


def _pair(halves: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turns ggml's order (elements i and i + 16 share a byte) into pairs of neighbours."""
    low, high = halves & 15, halves >> 4
    elements = np.concatenate([low, high], axis=-1)
    paired: NDArray[np.uint8] = elements[..., 0::2] | (elements[..., 1::2] << 4)
    return paired
