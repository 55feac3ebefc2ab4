"""Builds the decoder graph of a Llama model on ONNX Runtime's fused operators.

The layout is the one that onnxruntime-genai's builder makes, so other programs read it too:
`input_ids [batch, sequence]`, `attention_mask [batch, total]`, a past and a present for each
layer `[batch, kv heads, cache length, head size]`, and `logits [batch, 1, vocabulary]` of the
last position alone. Past and present may be one buffer.

Inside, activations are `[batch * sequence, width]`: a `Gemm` can then add one product to another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import frozen
from onnx import TensorProto

from iaop_onnx_local.importer.blocks import dequantize
from iaop_onnx_local.importer.gguf import GgufError, GgufFile, GgufTensor
from iaop_onnx_local.importer.weights import Dtype, WeightGraph, reorder_rows
from iaop_onnx_local.importer.writer import ModelWriter

__all__ = ["LlamaShape", "write_llama_graph"]


@frozen(slots=True)
class LlamaShape:
    """The sizes of a Llama model, from the file's metadata."""

    layers: int
    width: int
    inner_width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    @classmethod
    def of(cls, gguf: GgufFile) -> LlamaShape:
        """Reads the sizes.

        Raises:
            GgufError: another architecture, or a variant of Llama that the graph doesn't cover.
        """
        architecture = gguf.get("general.architecture", str)
        if architecture != "llama":
            raise GgufError(
                f"{gguf.path}: architecture {architecture!r} can't be imported; known: 'llama'"
            )

        def number(key: str) -> int:
            return int(gguf.get(f"llama.{key}", int))

        width, heads = number("embedding_length"), number("attention.head_count")
        head_size = int(gguf.metadata.get("llama.attention.key_length", width // heads))
        expected = {  # a graph that passed over one of these would give wrong text
            "llama.attention.value_length": head_size,
            "llama.rope.dimension_count": head_size,
            "llama.rope.scaling.type": "none",
            "llama.expert_count": 0,
        }
        for key, value in expected.items():
            if gguf.metadata.get(key, value) != value:
                raise GgufError(
                    f"{gguf.path}: {key} is {gguf.metadata[key]!r}; only {value!r} can be imported"
                )
        return cls(
            layers=number("block_count"),
            width=width,
            inner_width=number("feed_forward_length"),
            heads=heads,
            kv_heads=int(gguf.metadata.get("llama.attention.head_count_kv", heads)),
            head_size=head_size,
            vocabulary=len(gguf.get("tokenizer.ggml.tokens", list)),
            context_length=number("context_length"),
            rope_base=float(gguf.metadata.get("llama.rope.freq_base", 10000.0)),
            norm_epsilon=gguf.get("llama.attention.layer_norm_rms_epsilon", float),
        )


def write_llama_graph(
    gguf: GgufFile,
    shape: LlamaShape,
    folder: Path,
    *,
    dtype: Dtype,
    advance: Callable[[int], None],
) -> None:
    """Writes `model.onnx` and `model.onnx.data` into a folder.

    Args:
        gguf: the source.
        shape: its sizes.
        folder: where to write; it exists.
        dtype: what becomes of the weights.
        advance: told the number of source bytes each time some are done.

    Raises:
        GgufError: a tensor is missing, has no place in the graph, or is of a wrong shape.
    """
    with ModelWriter(folder) as writer:
        weights = WeightGraph(gguf, writer, dtype, advance)
        _Decoder(gguf, shape, writer, weights).build()
        if weights.unused:
            raise GgufError(
                f"{gguf.path}: tensors that a Llama graph has no place for: "
                + ", ".join(sorted(weights.unused)[:5])
            )
        writer.save()


class _Decoder:
    """The nodes of one decoder, in order; attributes are names of values used in every layer."""

    def __init__(
        self, gguf: GgufFile, shape: LlamaShape, writer: ModelWriter, weights: WeightGraph
    ) -> None:
        self._gguf, self._shape, self._writer, self._weights = gguf, shape, writer, weights
        self._ids = writer.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
        mask = writer.input("attention_mask", TensorProto.INT64, ["batch", "total"])
        self._axis_one = writer.constant("axis_one", np.array([1], np.int64))
        self._last = writer.constant("last", np.array(-1, np.int64))
        self._inner_halves = writer.constant(
            "inner_halves", np.array([shape.inner_width] * 2, np.int64)
        )
        self._attended_shape = writer.constant(
            "attended_shape", np.array([-1, shape.heads * shape.head_size], np.int64)
        )
        anything = writer.constant("anything", np.array([-1], np.int64))
        self._per_position = writer.node(
            "Concat", writer.node("Shape", self._ids), anything, axis=0
        )
        # What the attention operator asks for: each row's length less one, and the longest length.
        counted = writer.node("ReduceSum", mask, self._axis_one, keepdims=0)
        less_one = writer.node("Sub", counted, self._axis_one)
        self._lengths = writer.node("Cast", less_one, to=TensorProto.INT32)
        total = writer.node("Gather", writer.node("Shape", mask), self._axis_one)
        self._total = writer.node("Cast", total, to=TensorProto.INT32)
        self._cosines, self._sines = self._rotary_tables()

    def build(self) -> None:
        shape, writer, weights = self._shape, self._writer, self._weights
        table = weights.take("token_embd.weight", shape.vocabulary, shape.width)
        stream = weights.embed(self._ids, table)
        normed = writer.node(
            "SimplifiedLayerNormalization",
            stream,
            weights.vector("blk.0.attn_norm.weight", shape.width),
            epsilon=shape.norm_epsilon,
            axis=-1,
        )
        for layer in range(shape.layers):
            stream, normed = self._layer(layer, stream, normed)
        if "output.weight" in weights.unused:
            table = weights.take("output.weight", shape.vocabulary, shape.width)
        writer.node("Unsqueeze", weights.linear(normed, table), self._axis_one, outputs=("logits",))
        writer.output("logits", TensorProto.FLOAT, ["batch", 1, shape.vocabulary])

    def _layer(self, layer: int, stream: str, normed: str) -> tuple[str, str]:
        """Returns the residual stream after the layer, and its form normalised for the next."""
        shape, writer, weights = self._shape, self._writer, self._weights
        width, inner, block = shape.width, shape.inner_width, f"blk.{layer}"
        attended = self._attention(layer, normed)
        is_last = layer + 1 == shape.layers
        if is_last:  # from here on only the last position counts
            attended = writer.node("Gather", attended, self._last, axis=1)
            positions = writer.node("Reshape", stream, self._per_position)
            stream = writer.node("Gather", positions, self._last, axis=1)
        attended = writer.node("Reshape", attended, self._attended_shape)
        output = weights.take(f"{block}.attn_output.weight", width, shape.heads * shape.head_size)
        projected = weights.linear(attended, output)
        stream, normed = self._add_and_norm(stream, projected, f"{block}.ffn_norm.weight")

        gate, up = f"{block}.gate", f"{block}.up"
        both = weights.linear(
            normed,
            weights.take(f"{block}.ffn_gate.weight", inner, width),
            weights.take(f"{block}.ffn_up.weight", inner, width),
        )
        writer.node("Split", both, self._inner_halves, outputs=(gate, up), axis=-1)
        # QuickGelu with alpha 1 is SiLU in one operator.
        gated = writer.node("Mul", writer.contrib("QuickGelu", gate, alpha=1.0), up)
        down = weights.linear(gated, weights.take(f"{block}.ffn_down.weight", width, inner))
        following = "output_norm.weight" if is_last else f"blk.{layer + 1}.attn_norm.weight"
        return self._add_and_norm(stream, down, following)

    def _attention(self, layer: int, normed: str) -> str:
        shape, writer, block = self._shape, self._writer, f"blk.{layer}"
        projected = self._weights.linear(
            normed,
            self._rotated(f"{block}.attn_q.weight", shape.heads),
            self._rotated(f"{block}.attn_k.weight", shape.kv_heads),
            self._weights.take(
                f"{block}.attn_v.weight", shape.kv_heads * shape.head_size, shape.width
            ),
        )
        packed = writer.node("Reshape", projected, self._per_position)
        pasts, presents = [], []
        for part in ("key", "value"):
            past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            kind, (heads, size) = TensorProto.FLOAT, (shape.kv_heads, shape.head_size)
            pasts.append(writer.input(past, kind, ["batch", heads, "past", size]))
            presents.append(writer.output(present, kind, ["batch", heads, "present", size]))
        return writer.contrib(
            "GroupQueryAttention",
            *(packed, "", "", *pasts),
            *(self._lengths, self._total, self._cosines, self._sines),
            outputs=(f"{block}.attended", *presents),
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            scale=shape.head_size**-0.5,
            do_rotary=1,
            rotary_interleaved=0,
        )

    def _rotated(self, name: str, heads: int) -> GgufTensor:
        """Takes a matrix whose result is rotated by position.

        llama.cpp keeps the two numbers of a rotated pair side by side; the operator wants the first
        of all pairs of a head, then the second of all.
        """
        size = self._shape.head_size
        tensor = self._weights.take(name, heads * size, self._shape.width)
        order = np.arange(heads * size).reshape(heads, size // 2, 2).swapaxes(1, 2)
        return reorder_rows(tensor, order.reshape(-1).tolist())

    def _rotary_tables(self) -> tuple[str, str]:
        half = self._shape.head_size // 2
        frequencies = self._shape.rope_base ** -(np.arange(half, dtype=np.float64) / half)
        if "rope_freqs.weight" in self._gguf.tensors:  # the long-context scaling of Llama 3.1
            frequencies /= dequantize(self._weights.take("rope_freqs.weight", half))
        angles = np.outer(np.arange(self._shape.context_length), frequencies)
        return (
            self._writer.weight("cosines", np.cos(angles).astype(np.float32)),
            self._writer.weight("sines", np.sin(angles).astype(np.float32)),
        )

    def _add_and_norm(self, stream: str, added: str, norm: str) -> tuple[str, str]:
        """Adds to the residual stream; returns the sum and its normalised form."""
        normed, total = f"{norm}.normed", f"{norm}.sum"
        self._writer.contrib(
            "SkipSimplifiedLayerNormalization",
            stream,
            added,
            self._weights.vector(norm, self._shape.width),
            outputs=(normed, "", "", total),
            epsilon=self._shape.norm_epsilon,
        )
        return total, normed
