"""The engine feeds each model what its session asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from one_text import OneText, open_cache
from onnx import TensorProto, helper
from tiny_decoders import VOCABULARY, TinyDecoder

from iaop_onnx_local.decoder import Decoder, UnknownInputError
from iaop_onnx_local.operators import find_operators
from iaop_onnx_local.session import open_session

PROMPT = [3, 1, 4, 1, 5, 9]


def open_decoder(path: Path, **sizes: Any) -> Decoder:
    opened = open_session(path, device="cpu", threads=1)
    return Decoder(opened, path, **sizes)


@pytest.mark.parametrize(
    "tiny",
    [
        TinyDecoder(),
        TinyDecoder(kv_heads=4),
        TinyDecoder(kv_heads=1),
        TinyDecoder(key_size=10, value_size=10),
        TinyDecoder(key_size=8, value_size=3),
        TinyDecoder(names="past_key_values.0.decoder.{}"),
    ],
    ids=[
        "grouped",
        "all-heads",
        "one-kv-head",
        "head-size-of-its-own",
        "keys-and-values-of-different-size",
        "decoder-in-names",
    ],
)
def test_greedy_tokens_equal_those_without_a_cache(tmp_path: Path, tiny: TinyDecoder) -> None:
    decoder = open_decoder(tiny.write(tmp_path / "model.onnx"))
    text, pending, ids = OneText(decoder), PROMPT, list(PROMPT)
    for _ in range(16):
        logits, expected = text.extend(pending), tiny.logits(ids)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        pending = [int(expected.argmax())]
        ids += pending


def test_cache_is_told_in_bytes(tmp_path: Path) -> None:
    tiny = TinyDecoder(kv_heads=2, key_size=8, value_size=3)
    decoder = open_decoder(tiny.write(tmp_path / "model.onnx"))
    assert decoder.cache_bytes_per_token == 2 * (8 + 3) * 4


def test_texts_do_not_share_a_cache(tmp_path: Path) -> None:
    tiny = TinyDecoder()
    decoder = open_decoder(tiny.write(tmp_path / "model.onnx"))
    one, other = OneText(decoder), OneText(decoder)
    one.extend([1, 2, 3])
    other.extend([30, 31])
    np.testing.assert_allclose(one.extend([4]), tiny.logits([1, 2, 3, 4]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(other.extend([32]), tiny.logits([30, 31, 32]), rtol=1e-4, atol=1e-4)


def test_text_takes_no_more_than_its_capacity(tmp_path: Path) -> None:
    decoder = open_decoder(TinyDecoder().write(tmp_path / "model.onnx"))
    text = OneText(decoder, 4)
    text.extend([1, 2, 3])
    with pytest.raises(ValueError, match="5 tokens"):
        text.extend([1, 2])


def test_operators_are_read_from_the_file(tmp_path: Path) -> None:
    path = TinyDecoder().write(tmp_path / "model.onnx")
    expected = {node.op_type for node in onnx.load(path).graph.node}
    assert find_operators(path) == expected
    (tmp_path / "text.onnx").write_text("this is no model")
    with pytest.raises(ValueError, match="not an ONNX model"):
        find_operators(tmp_path / "text.onnx")


def change(path: Path, edit: Any) -> Path:
    model = onnx.load(path)
    edit(model.graph)
    onnx.save(model, path)
    return path


def add_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("audio", TensorProto.FLOAT, [1]))
    graph.node.append(helper.make_node("Identity", ["audio"], ["echo"]))
    graph.output.append(helper.make_tensor_value_info("echo", TensorProto.FLOAT, [1]))


def hide_present(graph: onnx.GraphProto) -> None:
    del graph.output[-1]


def hide_size(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[3].dim_param = "size"


def hide_vocabulary(graph: onnx.GraphProto) -> None:
    """Also from the inference of shapes."""
    graph.node[-1].output[0] = "raw"
    for operator, given, made, more in (
        ("Shape", ["raw"], "shape", {}),
        ("Cast", ["shape"], "numbers", {"to": TensorProto.FLOAT}),
        ("Cast", ["numbers"], "sizes", {"to": TensorProto.INT64}),
        ("Reshape", ["raw", "sizes"], "logits", {}),
    ):
        graph.node.append(helper.make_node(operator, given, [made], **more))
    fix_shape("logits", 0, 0, 0)(graph)


def fix_shape(name: str, *sizes: int) -> Any:
    def edit(graph: onnx.GraphProto) -> None:
        for value in [*graph.input, *graph.output]:
            if value.name == name:
                kind = value.type.tensor_type.elem_type
                value.CopyFrom(
                    helper.make_tensor_value_info(name, kind, [s or "any" for s in sizes])
                )

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (add_input, "'audio'"),
        (hide_present, "past_key_values.0.value"),
        (hide_size, "size of head"),
        (fix_shape("input_ids", 0, 8), "'input_ids' has the fixed shape"),
        (fix_shape("input_ids", 2, 0), "'input_ids' has the fixed shape"),
        (fix_shape("past_key_values.0.key", 0, 2, 64, 6), r"0\.key' has the fixed shape"),
        (hide_vocabulary, "size of the vocabulary"),
    ],
)
def test_model_that_cannot_be_fed_is_refused_by_name(tmp_path: Path, edit: Any, told: str) -> None:
    path = change(TinyDecoder().write(tmp_path / "model.onnx"), edit)
    with pytest.raises(UnknownInputError, match=told):
        open_decoder(path)


def test_open_vocabulary_comes_from_the_configuration(tmp_path: Path) -> None:
    tiny = TinyDecoder()
    path = change(tiny.write(tmp_path / "model.onnx"), hide_vocabulary)
    logits = OneText(open_decoder(path, vocabulary=VOCABULARY)).extend(PROMPT)
    np.testing.assert_allclose(logits, tiny.logits(PROMPT), rtol=1e-4, atol=1e-4)


def test_graph_for_one_row_makes_texts_in_turns(tmp_path: Path) -> None:
    def one_row(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            value.type.tensor_type.shape.dim[0].dim_value = 1

    for tiny in (
        TinyDecoder(positions=True),
        TinyDecoder(grouped=True, rotary=True, key_size=16, value_size=16),
    ):
        decoder = open_decoder(change(tiny.write(tmp_path / "model.onnx"), one_row))
        cache = open_cache(decoder, rows=2)
        assert not cache.joins_rows
        cache.extend(0, [1, 2, 3])
        cache.extend(1, [30])
        first, second = cache.step([0, 1], [4, 31])
        np.testing.assert_allclose(first, tiny.logits([1, 2, 3, 4]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second, tiny.logits([30, 31]), rtol=1e-4, atol=1e-4)


def test_operators_of_branches_are_read_too(tmp_path: Path) -> None:
    path = TinyDecoder(merged=True).write(tmp_path / "model.onnx")
    assert {"If", "Softmax", "Trilu"} <= find_operators(path)


def test_open_head_size_comes_from_the_configuration(tmp_path: Path) -> None:
    tiny = TinyDecoder()
    decoder = open_decoder(change(tiny.write(tmp_path / "model.onnx"), hide_size), head_size=6)
    logits = OneText(decoder).extend(PROMPT)
    np.testing.assert_allclose(logits, tiny.logits(PROMPT), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_refused_by_name(tmp_path: Path) -> None:
    def to_bfloat16(graph: onnx.GraphProto) -> None:
        name = "past_key_values.1.key"
        shape = ["batch", 1, "past", 2]
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.BFLOAT16, shape))
        present = "present.1.key"
        graph.node.append(helper.make_node("Identity", [name], [present]))
        graph.output.append(helper.make_tensor_value_info(present, TensorProto.BFLOAT16, shape))

    path = change(TinyDecoder().write(tmp_path / "model.onnx"), to_bfloat16)
    with pytest.raises(UnknownInputError, match="bfloat16"):
        open_decoder(path)
