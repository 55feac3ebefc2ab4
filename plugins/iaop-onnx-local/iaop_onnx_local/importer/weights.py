"""Puts the tensors of a GGUF file into a graph and multiplies by them.

Quantized matrices become `MatMulNBits` on their own blocks. A Q4_1 matrix has a constant per block
besides; its part of the product is that constant times the sum of the 32 activations it meets, so
one `Gemm` on block sums adds it exactly. (`MatMulNBits` could take the constant as a float zero
point, but then runs without its fast kernels; rounded to an integer one it ruins the model.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from attrs import evolve, frozen
from onnx import TensorProto

from iaop_onnx_local.importer.blocks import BLOCK_LENGTH, dequantize, to_blocks
from iaop_onnx_local.importer.gguf import GgufError, GgufFile, GgufTensor, TensorType
from iaop_onnx_local.importer.writer import ModelWriter

__all__ = ["Dtype", "WeightGraph", "reorder_rows"]

Dtype = Literal["keep", "fp32"]
"""`keep`: each weight stays as the file encodes it. `fp32`: every weight is dequantized."""

_INT8_ACTIVATIONS: Final = 4
"""`accuracy_level`: block products on 8-bit activations, ONNX Runtime's fast kernels."""


def reorder_rows(tensor: GgufTensor, order: list[int]) -> GgufTensor:
    """Returns the matrix with its rows in another order; the encoded blocks stay as they are."""
    return evolve(tensor, raw=tensor.raw.reshape(tensor.shape[0], -1)[order].reshape(-1))


@frozen(slots=True)
class _Stored:
    """The names of what was written for one matrix: a plain table, or the parts of its blocks."""

    table: str = ""
    bits: int = 0
    values: str = ""
    scales: str = ""
    offsets: str = ""


class WeightGraph:
    """Takes tensors by name, and makes the nodes that use them."""

    def __init__(
        self, gguf: GgufFile, writer: ModelWriter, dtype: Dtype, advance: Callable[[int], None]
    ) -> None:
        self._gguf, self._writer, self._dtype, self._advance = gguf, writer, dtype, advance
        self._stored: dict[str, _Stored] = {}
        self._block_sums: dict[str, str] = {}
        self._block_ones: dict[int, str] = {}
        self._axis = ""
        self.unused = set(gguf.tensors)
        """Names of the tensors that nobody took."""

    def take(self, name: str, *shape: int) -> GgufTensor:
        """Returns a tensor that has to be there in that shape.

        Raises:
            GgufError: it is missing or of another shape.
        """
        tensor = self._gguf.tensors.get(name)
        if tensor is None:
            raise GgufError(f"{self._gguf.path}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise GgufError(
                f"{self._gguf.path}: tensor {name!r} has shape {tensor.shape}; "
                f"the metadata calls for {shape}"
            )
        self.unused.discard(name)
        return tensor

    def vector(self, name: str, length: int) -> str:
        """Stores a vector in float32 and returns its name."""
        tensor = self.take(name, length)
        self._advance(tensor.raw.nbytes)
        return self._writer.weight(name, dequantize(tensor))

    def linear(self, x: str, *tensors: GgufTensor) -> str:
        """Multiplies `x [positions, columns]` by matrices stacked on each other."""
        if len({tensor.type for tensor in tensors}) > 1:
            return self._writer.node("Concat", *(self.linear(x, t) for t in tensors), axis=-1)
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        stacked = GgufTensor(
            "+".join(tensor.name for tensor in tensors),
            (rows, columns),
            tensors[0].type,
            np.concatenate([tensor.raw for tensor in tensors]),
        )
        stored = self._store(stacked)
        if stored.table:
            return self._writer.node("Gemm", x, self._as_float(stored.table, stacked), transB=1)
        product = self._writer.contrib(
            "MatMulNBits",
            x,
            stored.values,
            stored.scales,
            K=columns,
            N=rows,
            bits=stored.bits,
            block_size=BLOCK_LENGTH,
            accuracy_level=_INT8_ACTIVATIONS,
        )
        if not stored.offsets:
            return product
        sums = self._sum_blocks(x, columns)
        return self._writer.node("Gemm", sums, stored.offsets, product, transB=1)

    def embed(self, ids: str, tensor: GgufTensor) -> str:
        """Looks up rows: `ids [batch, sequence]` to `[batch * sequence, columns]`."""
        writer, stored = self._writer, self._store(tensor)
        if stored.table:
            rows = self._as_float(writer.node("Gather", stored.table, ids), tensor)
        else:
            # Given explicitly, because the CPU and the CUDA kernel have different defaults.
            blocks = (tensor.shape[0], tensor.shape[1] // BLOCK_LENGTH, 1)
            zero = np.full(blocks, 0x80 if stored.bits == 8 else 0x08, np.uint8)
            rows = writer.contrib(
                "GatherBlockQuantized",
                stored.values,
                ids,
                writer.node("Unsqueeze", stored.scales, self._block_axis),
                writer.weight(f"{tensor.name}.zeros", zero),
                bits=stored.bits,
                block_size=BLOCK_LENGTH,
                gather_axis=0,
                quantize_axis=2,
            )
        if stored.offsets:
            offsets = writer.node("Unsqueeze", stored.offsets, self._block_axis)
            rows = writer.node("Add", rows, writer.node("Gather", offsets, ids))
        width = writer.constant("embedded", np.array([-1, tensor.shape[1]], np.int64))
        return writer.node("Reshape", rows, width)

    def _store(self, tensor: GgufTensor) -> _Stored:
        name = tensor.name
        if name not in self._stored:
            self._stored[name] = self._write(tensor)
            self._advance(tensor.raw.nbytes)
        return self._stored[name]

    def _write(self, tensor: GgufTensor) -> _Stored:
        name, weight = tensor.name, self._writer.weight
        if self._dtype == "fp32" or tensor.type is TensorType.F32:
            return _Stored(table=weight(name, dequantize(tensor)))
        if tensor.type is TensorType.F16:
            return _Stored(table=weight(name, tensor.raw.view(np.float16).reshape(tensor.shape)))
        blocks = to_blocks(tensor)
        return _Stored(
            bits=blocks.bits,
            values=weight(f"{name}.values", blocks.values),
            scales=weight(f"{name}.scales", blocks.scales),
            offsets="" if blocks.offsets is None else weight(f"{name}.offsets", blocks.offsets),
        )

    def _as_float(self, table: str, tensor: GgufTensor) -> str:
        if self._dtype == "fp32" or tensor.type is TensorType.F32:
            return table
        return self._writer.node("Cast", table, to=TensorProto.FLOAT)

    @property
    def _block_axis(self) -> str:
        if not self._axis:
            self._axis = self._writer.constant("block_axis", np.array([2], np.int64))
        return self._axis

    def _sum_blocks(self, x: str, columns: int) -> str:
        """Sums each 32 neighbours of `x`, once for all products that need them."""
        if x not in self._block_sums:
            if columns not in self._block_ones:
                # As a product: one node that is fast for few rows, where a sum over a shape is two.
                ones = np.repeat(np.eye(columns // BLOCK_LENGTH, dtype=np.float32), BLOCK_LENGTH, 0)
                self._block_ones[columns] = self._writer.constant(f"blocks.{columns}", ones)
            self._block_sums[x] = self._writer.node("MatMul", x, self._block_ones[columns])
        return self._block_sums[x]
