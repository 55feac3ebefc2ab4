"""Tiny decoders in the plain layout: attention in standard operators, a cache that grows.

The shapes are those that guesses from a configuration get wrong. Beside each graph stands the same
model in numpy, which sees the whole text at once and has no cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from attrs import field, frozen
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

VOCABULARY, WIDTH = 40, 24


@frozen(kw_only=True)
class TinyDecoder:
    """One layer of attention between an embedding and a head, with random weights."""

    heads: int = 4
    kv_heads: int = 2
    key_size: int = 6
    value_size: int = 6
    names: str = "past_key_values.0.{}"
    positions: bool = False
    """Takes `position_ids`, and adds an embedding of them."""
    last_only: bool = False
    """Gives the logits of the last position alone."""
    type: type[np.floating] = np.float32
    weights: dict[str, Array] = field(init=False)

    def __attrs_post_init__(self) -> None:
        random = np.random.default_rng(7)
        shapes = {
            "embed": (VOCABULARY, WIDTH),
            "place": (64, WIDTH),
            "q": (WIDTH, self.heads * self.key_size),
            "k": (WIDTH, self.kv_heads * self.key_size),
            "v": (WIDTH, self.kv_heads * self.value_size),
            "o": (self.heads * self.value_size, WIDTH),
            "head": (WIDTH, VOCABULARY),
        }
        weights = {n: random.normal(0, 0.6, s).astype(self.type) for n, s in shapes.items()}
        object.__setattr__(self, "weights", weights)

    def logits(self, ids: list[int]) -> Array:
        w = {name: value.astype(np.float32) for name, value in self.weights.items()}
        x = w["embed"][ids]
        if self.positions:
            x = x + w["place"][: len(ids)]
        count = len(ids)
        q = (x @ w["q"]).reshape(count, self.heads, self.key_size)
        k = (x @ w["k"]).reshape(count, self.kv_heads, self.key_size)
        v = (x @ w["v"]).reshape(count, self.kv_heads, self.value_size)
        heads = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, group].T + np.triu(np.full((count, count), -1e4), 1)
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(chances / chances.sum(-1, keepdims=True) @ v[:, group])
        return (x + np.concatenate(heads, -1) @ w["o"])[-1] @ w["head"]

    def write(self, path: Path) -> Path:
        nodes: list[onnx.NodeProto] = []
        constants: dict[str, Array] = dict(self.weights)

        def node(operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
            name = out or f"{operator}{len(nodes)}"
            nodes.append(helper.make_node(operator, inputs, [name], **attributes))
            return name

        def constant(name: str, *values: Any, kind: Any = np.int64) -> str:
            constants[name] = np.array(values, kind)
            return name

        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))
        x = node("Gather", "embed", "input_ids")
        if self.positions:
            x = node("Add", x, node("Gather", "place", "position_ids"))
        parts = {}
        for part, heads, size in (
            ("q", self.heads, self.key_size),
            ("k", self.kv_heads, self.key_size),
            ("v", self.kv_heads, self.value_size),
        ):
            shape = constant(f"shape_{part}", 0, 0, heads, size)
            split = node("Reshape", node("MatMul", x, part), shape)
            parts[part] = node("Transpose", split, perm=[0, 2, 1, 3])
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        if self.positions:
            inputs.append(
                helper.make_tensor_value_info(
                    "position_ids", TensorProto.INT64, ["batch", "sequence"]
                )
            )
        outputs, repeated = [], {}
        for part, short, size in (("key", "k", self.key_size), ("value", "v", self.value_size)):
            past, present = self.names.format(part), self.names.format(part)
            present = present.replace("past_key_values", "present")
            shape = ["batch", self.kv_heads, "past", size]
            inputs.append(helper.make_tensor_value_info(past, kind, shape))
            outputs.append(
                helper.make_tensor_value_info(
                    present, kind, ["batch", self.kv_heads, "present", size]
                )
            )
            node("Concat", past, parts[short], out=present, axis=2)
            wide = node("Unsqueeze", present, constant("axis2", 2))
            group = constant("group", 1, 1, self.heads // self.kv_heads, 1, 1)
            repeat = constant(f"repeat_{part}", 0, self.heads, -1, size)
            repeated[part] = node("Reshape", node("Expand", wide, group), repeat)
        turned = node("Transpose", repeated["key"], perm=[0, 1, 3, 2])
        scores = node("MatMul", parts["q"], turned)
        # Rows of a lower triangle: all cells, of them the last rows.
        total = node("Shape", "attention_mask", start=1, end=2)
        fresh = node("Shape", "input_ids", start=1, end=2)
        square = node("Concat", total, total, axis=0)
        ones = node("ConstantOfShape", square, value=helper.make_tensor("", kind, [1], [1]))
        above = node("Trilu", ones, constant("one", 1, kind=np.int64), upper=1)
        rows = node("Slice", above, node("Neg", fresh), constant("far", 2**31), constant("a0", 0))
        masked = node("Mul", rows, constant("low", -1e4, kind=self.type))
        chances = node("Softmax", node("Add", scores, masked), axis=-1)
        mixed = node("Transpose", node("MatMul", chances, repeated["value"]), perm=[0, 2, 1, 3])
        flat = node("Reshape", mixed, constant("flat", 0, 0, self.heads * self.value_size))
        stream = node("Add", x, node("MatMul", flat, "o"))
        positions: int | str = "sequence"
        if self.last_only:
            positions = 1
            stream = node("Gather", stream, constant("last", -1), axis=1)
        node("MatMul", stream, "head", out="logits")
        outputs.insert(
            0, helper.make_tensor_value_info("logits", kind, ["batch", positions, VOCABULARY])
        )
        graph = helper.make_graph(
            nodes,
            "tiny",
            inputs,
            outputs,
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        # Trilu wants its offset as a scalar.
        for tensor in graph.initializer:
            if tensor.name == "one":
                tensor.CopyFrom(numpy_helper.from_array(np.array(1, np.int64), "one"))
        opset = [helper.make_opsetid("", 21)]
        onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opset), path)
        return path
