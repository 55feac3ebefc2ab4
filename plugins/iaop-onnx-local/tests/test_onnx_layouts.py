"""Models in every layout are fed what their sessions ask for: each row is as if it were alone.

`IAOP_ONNX_MODELS` adds real model folders to the check of batched against single answers: paths,
separated as in `PATH`. They are run on the CPU and need memory and time as their size has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_text import open_cache
from tiny_decoders import TinyDecoder

from iaop_onnx_local.cache_buffer import DeviceBuffer, DeviceCopier
from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.kv_cache import ROUNDING, KvCache
from iaop_onnx_local.model_folder import find_model_folder
from iaop_onnx_local.session import open_session

GROUPED: dict[str, Any] = {"grouped": True, "key_size": 16, "value_size": 16}
LAYOUTS = {
    "plain": TinyDecoder(),
    "plain-positions": TinyDecoder(positions=True),
    "plain-positions-last": TinyDecoder(positions=True, last_only=True),
    "plain-positions-keep": TinyDecoder(positions=True, keep="num_logits_to_keep"),
    "plain-int32": TinyDecoder(positions=True, id_type=np.int32),
    "plain-fp16": TinyDecoder(positions=True, key_size=5, type=np.float16),
    "merged": TinyDecoder(merged=True),
    "merged-positions": TinyDecoder(
        merged=True, positions=True, names="past_key_values.0.decoder.{}"
    ),
    "grouped-positions": TinyDecoder(**GROUPED, positions=True),
    "grouped-rotary": TinyDecoder(**GROUPED, rotary=True),
    "grouped-rotary-last": TinyDecoder(**GROUPED, rotary=True, last_only=True),
    "grouped-rotary-keep": TinyDecoder(**GROUPED, rotary=True, keep="logits_to_keep", keep_1d=True),
    "grouped-one-kv-head": TinyDecoder(**GROUPED, rotary=True, kv_heads=1),
    "grouped-fp16": TinyDecoder(**GROUPED, rotary=True, type=np.float16),
}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [30], [8, 9, 7, 9]]


def tiny_cache(tiny: TinyDecoder, path: Path, rows: int) -> KvCache:
    opened = open_session(tiny.write(path / "model.onnx"), device="cpu", threads=1)
    decoder = Decoder(opened, path / "model.onnx")
    return open_cache(decoder, rows=rows)


def close_to(tiny: TinyDecoder, actual: Any, ids: list[int]) -> int:
    """Checks logits against the definition; returns the likeliest token."""
    expected = tiny.logits(ids)
    tolerance = 1e-4 if tiny.type is np.float32 else 0.1
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual.dtype == tiny.type
    return int(expected.argmax())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_text_equals_the_definition(tmp_path: Path, layout: str) -> None:
    tiny = LAYOUTS[layout]
    cache = tiny_cache(tiny, tmp_path, 1)
    ids = list(TEXTS[0])
    logits = cache.extend(0, ids)
    for _ in range(16):
        ids.append(close_to(tiny, logits, ids))
        logits = cache.extend(0, ids[-1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_in_parts_equals_the_definition(tmp_path: Path, layout: str) -> None:
    tiny = LAYOUTS[layout]
    cache = tiny_cache(tiny, tmp_path, 2)
    ids = TEXTS[0]
    for begin in range(0, len(ids), 4):
        logits = cache.extend(1, ids[begin : begin + 4])
        close_to(tiny, logits, ids[: begin + 4])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_different_lengths_equal_the_definition(tmp_path: Path, layout: str) -> None:
    tiny = LAYOUTS[layout]
    cache = tiny_cache(tiny, tmp_path, len(TEXTS))
    texts = [list(ids) for ids in TEXTS]
    for row, ids in enumerate(texts):
        ids.append(close_to(tiny, cache.extend(row, ids), ids))
    for step in range(12):
        rows = [0, 1, 2] if step < 6 else [0, 2]  # one leaves
        for row, logits in zip(rows, cache.step(rows, [texts[r][-1] for r in rows]), strict=True):
            texts[row].append(close_to(tiny, logits, texts[row]))
    cache.cut(1, 0)  # and another one comes
    texts[1] = [11, 12, 13]
    texts[1].append(close_to(tiny, cache.extend(1, texts[1]), texts[1]))
    for _ in range(4):
        for row, logits in enumerate(cache.step([0, 1, 2], [ids[-1] for ids in texts])):
            texts[row].append(close_to(tiny, logits, texts[row]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beginning_of_a_row_serves_another_text(tmp_path: Path, layout: str) -> None:
    tiny = LAYOUTS[layout]
    cache = tiny_cache(tiny, tmp_path, 2)
    cache.extend(0, TEXTS[0])
    cache.copy(0, 1, 5)
    close_to(tiny, cache.extend(1, [20, 21]), [*TEXTS[0][:5], 20, 21])
    cache.cut(0, 7)
    close_to(tiny, cache.extend(0, [22]), [*TEXTS[0][:7], 22])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "grouped" in name])
def test_cache_in_a_devices_memory_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    copier = DeviceCopier("cpu", ["CPUExecutionProvider"])

    def make_buffers(decoder: Decoder, rows: int, capacity: int) -> list[DeviceBuffer]:
        return [DeviceBuffer(tensor, rows, capacity, copier) for tensor in decoder.cache]

    monkeypatch.setattr("iaop_onnx_local.shared_cache.make_buffers", make_buffers)
    test_beginning_of_a_row_serves_another_text(tmp_path, layout)
    test_rows_of_different_lengths_equal_the_definition(tmp_path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_go_together_where_the_graph_tells_them_apart(tmp_path: Path, layout: str) -> None:
    tiny = LAYOUTS[layout]
    cache = tiny_cache(tiny, tmp_path, 2)
    assert cache.joins_rows == (tiny.grouped or tiny.positions)
    assert cache.difference() < (ROUNDING if tiny.type is np.float32 else 0.05)
    assert cache.decoder.last_logits_only == (tiny.last_only or bool(tiny.keep))


# -- real folders -------------------------------------------------------------------------------

REAL = [path for path in os.environ.get("IAOP_ONNX_MODELS", "").split(os.pathsep) if path]
NONE = pytest.param("", marks=pytest.mark.skip(reason="IAOP_ONNX_MODELS names none"))


@pytest.mark.parametrize("path", REAL or [NONE])
def test_rows_of_a_real_model_are_as_if_each_were_alone(path: str) -> None:
    folder = find_model_folder(path)
    file = folder.find_model_file("")
    opened = open_session(file, device="cpu", threads=0)
    decoder = Decoder(opened, file, head_size=folder.head_size, kv_heads=folder.kv_heads)
    cache = open_cache(decoder, rows=4, capacity=64)
    random = np.random.default_rng(1)
    texts = [random.integers(0, decoder.vocabulary, n).tolist() for n in (30, 3, 17)]
    for row, ids in enumerate(texts):
        cache.extend(row, ids)
    together = [np.array(row, np.float32) for row in cache.step([0, 1, 2], [5, 6, 7])]
    for row, ids in enumerate(texts):
        cache.cut(3, 0)
        alone = np.array(cache.extend(3, [*ids, 5 + row]), np.float32)
        error = np.sqrt(np.mean((alone - together[row]) ** 2)) / alone.std()
        # Quantized kernels for one row round otherwise than those for several.
        assert error < 0.25, f"row {row}: {error}"
