"""Tiny decoders in every layout: plain attention, `GroupQueryAttention`, and merged ones.

The shapes are those that guesses from a configuration get wrong. Beside each graph stands the same
model in numpy, which sees the whole text at once and has no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from attrs import Factory, define, field, frozen
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

VOCABULARY, WIDTH, PLACES = 40, 24, 64
_INT64 = TensorProto.INT64


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
    grouped: bool = False
    """Attends by `GroupQueryAttention`; keys and values are of one size then, a multiple of 8."""
    rotary: bool = False
    """`GroupQueryAttention` turns queries and keys by their places; sizes a multiple of 16."""
    merged: bool = False
    """Holds two graphs, with and without a past, and takes `use_cache_branch`."""
    last_only: bool = False
    """Gives the logits of the last position alone."""
    keep: str = ""
    """The name of an input that says of how many last positions logits are wanted."""
    keep_1d: bool = False
    """It is a list of one, not a scalar."""
    type: type[np.floating] = np.float32
    id_type: type[np.integer] = np.int64
    """Of the ids, the mask and the positions."""
    weights: dict[str, Array] = field(init=False)

    def __attrs_post_init__(self) -> None:
        random = np.random.default_rng(7)
        shapes = {
            "embed": (VOCABULARY, WIDTH),
            "place": (PLACES, WIDTH),
            "q": (WIDTH, self.heads * self.key_size),
            "k": (WIDTH, self.kv_heads * self.key_size),
            "v": (WIDTH, self.kv_heads * self.value_size),
            "o": (self.heads * self.value_size, WIDTH),
            "head": (WIDTH, VOCABULARY),
        }
        weights = {n: random.normal(0, 0.6, s).astype(self.type) for n, s in shapes.items()}
        object.__setattr__(self, "weights", weights)

    # -- the definition --------------------------------------------------------------------------

    def logits(self, ids: Sequence[int]) -> Array:
        """Of the position after `ids`, `[vocabulary]`."""
        w = {name: value.astype(np.float32) for name, value in self.weights.items()}
        x = w["embed"][ids]
        if self.positions:
            x = x + w["place"][: len(ids)]
        count = len(ids)
        q = (x @ w["q"]).reshape(count, self.heads, self.key_size)
        k = (x @ w["k"]).reshape(count, self.kv_heads, self.key_size)
        v = (x @ w["v"]).reshape(count, self.kv_heads, self.value_size)
        if self.rotary:
            q, k = self._turned(q), self._turned(k)
        heads = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, group].T + np.triu(np.full((count, count), -1e4), 1)
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(chances / chances.sum(-1, keepdims=True) @ v[:, group])
        return (x + np.concatenate(heads, -1) @ w["o"])[-1] @ w["head"]

    def _angles(self) -> Array:
        half = self.key_size // 2
        return np.arange(PLACES)[:, None] * 100.0 ** -(np.arange(half) / half)

    def _turned(self, x: Array) -> Array:
        angles = self._angles()[: len(x), None]
        left, right = np.split(x, 2, -1)
        sin, cos = np.sin(angles), np.cos(angles)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    # -- the graph -------------------------------------------------------------------------------

    def write(self, path: Path) -> Path:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))
        id_kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.id_type))
        value = helper.make_tensor_value_info
        inputs = [value("input_ids", id_kind, ["batch", "sequence"])]
        inputs.append(value("attention_mask", id_kind, ["batch", "total"]))
        if self.positions:
            inputs.append(value("position_ids", id_kind, ["batch", "sequence"]))
        if self.keep:
            inputs.append(value(self.keep, _INT64, [1] * self.keep_1d))
        if self.merged:
            inputs.append(value("use_cache_branch", TensorProto.BOOL, [1]))
        outputs = [
            value("logits", kind, ["batch", 1 if self.last_only else "sequence", VOCABULARY])
        ]
        for part, size in (("key", self.key_size), ("value", self.value_size)):
            shape = ["batch", self.kv_heads, "past", size]
            inputs.append(value(self.names.format(part), kind, shape))
            shape = ["batch", self.kv_heads, "present", size]
            outputs.append(value(self._present(part), kind, shape))
        body = _Body(constants=dict(self.weights))
        if self.merged:
            self._merge(body, [output.name for output in outputs])
        else:
            self._fill(body, with_past=True)
        graph = helper.make_graph(body.nodes, "tiny", inputs, outputs, body.initializers)
        opset = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opset), path)
        return path

    def _present(self, part: str) -> str:
        return self.names.format(part).replace("past_key_values", "present")

    def _merge(self, body: _Body, outputs: list[str]) -> None:
        branches = {}
        for name, with_past in (("then_branch", True), ("else_branch", False)):
            branch = _Body(constants=body.constants, suffix=f"_{name}")
            self._fill(branch, with_past=with_past)
            given = [
                helper.make_empty_tensor_value_info(output + branch.suffix) for output in outputs
            ]
            branches[name] = helper.make_graph(branch.nodes, name, [], given)
        body.nodes.append(helper.make_node("If", ["use_cache_branch"], outputs, **branches))

    def _fill(self, body: _Body, *, with_past: bool) -> None:
        node, constant = body.node, body.constant
        x = node("Gather", "embed", "input_ids")
        if self.positions:
            x = node("Add", x, node("Gather", "place", "position_ids"))
        if self.grouped:
            mixed = self._grouped(body, x)
        else:
            mixed = self._plain(body, x, with_past=with_past)
        stream = node("Add", x, node("MatMul", mixed, "o"))
        if self.last_only:
            stream = node("Gather", stream, constant("last", [-1]), axis=1)
        if self.keep:
            begin = node("Reshape", node("Neg", self.keep), constant("flat1", [1]))
            stream = node("Slice", stream, begin, constant("far", [2**31]), constant("one", [1]))
        node("MatMul", stream, "head", out="logits")

    def _grouped(self, body: _Body, x: str) -> str:
        node, constant = body.node, body.constant
        to_int32 = {"to": TensorProto.INT32}
        mask = node("Cast", "attention_mask", **to_int32)
        held = node("ReduceSum", mask, constant("one", [1]), keepdims=0)
        last = node("Sub", held, constant("one32", 1, np.int32))
        total = node("Cast", node("Shape", "attention_mask", start=1, end=2), **to_int32)
        total = node("Reshape", total, constant("scalar", np.empty(0)))
        turns = []
        if self.rotary:
            angles = self._angles()
            turns = [
                constant("cos", np.cos(angles), self.type),
                constant("sin", np.sin(angles), self.type),
            ]
        names = ("key", "value")
        return node(
            "GroupQueryAttention",
            *(node("MatMul", x, part) for part in "qkv"),
            *(self.names.format(name) for name in names),
            last,
            total,
            *turns,
            more_out=[self._present(name) for name in names],
            domain="com.microsoft",
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            scale=1.0,
            do_rotary=int(self.rotary),
        )

    def _plain(self, body: _Body, x: str, *, with_past: bool) -> str:
        node, constant = body.node, body.constant

        def split(part: str, heads: int, size: int) -> str:
            shape = constant(f"shape_{part}", [0, 0, heads, size])
            return node(
                "Transpose", node("Reshape", node("MatMul", x, part), shape), perm=[0, 2, 1, 3]
            )

        q = split("q", self.heads, self.key_size)
        repeated = []
        for part, name, size in (("k", "key", self.key_size), ("v", "value", self.value_size)):
            joined = [split(part, self.kv_heads, size)]
            if with_past:
                joined.insert(0, self.names.format(name))
            present = node("Concat", *joined, out=self._present(name), axis=2)
            wide = node("Unsqueeze", present, constant("axis2", [2]))
            group = constant("group", [1, 1, self.heads // self.kv_heads, 1, 1])
            repeat = constant(f"repeat_{part}", [0, self.heads, -1, size])
            repeated.append(node("Reshape", node("Expand", wide, group), repeat))
        keys, values = repeated
        scores = node("MatMul", q, node("Transpose", keys, perm=[0, 1, 3, 2]))
        # Rows of a lower triangle: all cells, of them the last rows.
        total = node("Shape", "attention_mask", start=1, end=2)
        fresh = node("Shape", "input_ids", start=1, end=2)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))
        square = node("Concat", total, total, axis=0)
        ones = node("ConstantOfShape", square, value=helper.make_tensor("", kind, [1], [1]))
        above = node("Trilu", ones, constant("offset", 1), upper=1)
        rows = node(
            "Slice", above, node("Neg", fresh), constant("far", [2**31]), constant("a0", [0])
        )
        # What the mask leaves out, for every row of the batch.
        mask = node("Unsqueeze", node("Cast", "attention_mask", to=kind), constant("a12", [1, 2]))
        hidden = node("Sub", constant("one_", [1], self.type), mask)
        hidden = node("Mul", node("Add", rows, hidden), constant("low", [-1e4], self.type))
        chances = node("Softmax", node("Add", scores, hidden), axis=-1)
        mixed = node("Transpose", node("MatMul", chances, values), perm=[0, 2, 1, 3])
        return node("Reshape", mixed, constant("flat", [0, 0, self.heads * self.value_size]))


@define
class _Body:
    """The nodes of a graph, and the constants that they share with the graph around it."""

    constants: dict[str, Array]
    suffix: str = ""
    nodes: list[onnx.NodeProto] = Factory(list)

    def node(
        self, operator: str, *inputs: str, out: str = "", more_out: Sequence[str] = (), **more: Any
    ) -> str:
        name = (out or f"{operator}{len(self.nodes)}") + self.suffix
        names = [name, *(other + self.suffix for other in more_out)]
        self.nodes.append(helper.make_node(operator, inputs, names, **more))
        return name

    def constant(self, name: str, value: Any, kind: Any = np.int64) -> str:
        self.constants[name] = np.array(value, kind)
        return name

    @property
    def initializers(self) -> list[onnx.TensorProto]:
        return [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
