"""The real model says what the reference implementation says, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_text import OneText

from iaop_onnx_local import OnnxLocalBackend
from iaop_onnx_local.importer.blocks import dequantize, to_blocks
from iaop_onnx_local.importer.gguf import GgufFile
from iaop_onnx_local.model import LocalModel
from iaop_onnx_local.settings import OnnxLocalSettings

REFERENCE = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text("utf-8"))
ANSWERS = REFERENCE["results"]
SMALL_GAP = 0.2
"""Logits this close may change places when activations are rounded to 8 bits."""


def greedy(model: LocalModel, answer: dict[str, Any]) -> list[int]:
    """64 tokens after the prompt, past every end."""
    text = OneText(model.decoder, len(answer["prompt_ids"]) + 64)
    pending, ids = answer["prompt_ids"], []
    for _ in range(64):
        ids.append(int(text.extend(pending).argmax()))
        pending = ids[-1:]
    return ids


@pytest.fixture(scope="module")
def exact(smollm2_fp32: Path) -> LocalModel:
    return LocalModel.load(str(smollm2_fp32), OnnxLocalSettings(device="cpu"))


@pytest.fixture(scope="module")
def quantized(smollm2: Path) -> LocalModel:
    return LocalModel.load(str(smollm2), OnnxLocalSettings(device="cpu"))


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_prompt_ids_equal_the_references(exact: LocalModel, answer: dict[str, Any]) -> None:
    from iaop_core import GenerationParams, Message

    request = exact.prepare([Message("user", answer["prompt"])], GenerationParams())
    assert request.prompt_ids == answer["prompt_ids"]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_fp32_greedy_tokens_equal_the_references(exact: LocalModel, answer: dict[str, Any]) -> None:
    assert greedy(exact, answer) == answer["greedy_64_ignore_eos"]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_quantized_greedy_tokens_part_only_at_a_small_gap(
    quantized: LocalModel, answer: dict[str, Any]
) -> None:
    expected, gaps = answer["greedy_64_ignore_eos"], answer["top1_top2_gap"]
    actual = greedy(quantized, answer)
    parted = next((n for n in range(64) if actual[n] != expected[n]), None)
    if parted is not None:
        assert gaps[parted] < SMALL_GAP, f"parted at step {parted}"


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_first_logits_are_near_the_references(
    exact: LocalModel, quantized: LocalModel, answer: dict[str, Any]
) -> None:
    expected = answer["first_step_logits_0_8"]
    for model, tolerance in ((exact, 1e-3), (quantized, 1.0)):
        logits = OneText(model.decoder).extend(answer["prompt_ids"])
        np.testing.assert_allclose(logits[:8], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_backend_says_the_references_text(smollm2_fp32: Path, answer: dict[str, Any]) -> None:
    with OnnxLocalBackend(device="cpu") as backend:
        backend.load_model(smollm2_fp32.name)
        result = backend.infer(answer["prompt"], params={"max_tokens": 64})
    ids = answer["greedy_until_eos"]
    assert result.text == answer["text_out"].removesuffix("<|im_end|>")
    assert result.completion_tokens == len(ids)
    assert result.finish_reason == ("stop" if ids[-1] == REFERENCE["eos_token_id"] else "length")
    assert result.prompt_tokens == len(answer["prompt_ids"])


def test_prompt_in_chunks_gives_the_same_logits(exact: LocalModel) -> None:
    ids = (ANSWERS[0]["prompt_ids"] * 8)[:300]
    whole = OneText(exact.decoder, 300).extend(ids).copy()
    text = OneText(exact.decoder, 300)
    for start in range(0, 300, 70):
        parts = text.extend(ids[start : start + 70])
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-3)


def test_blocks_of_the_real_file_keep_every_value(smollm2: Path) -> None:
    source = next((smollm2.parents[1] / "gguf").glob("SmolLM2*.gguf"))
    with GgufFile(source) as gguf:
        for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "token_embd.weight"):
            tensor = gguf.tensors[name]
            blocks = to_blocks(tensor)
            numbers = blocks.values
            if blocks.bits == 4:
                pairs = np.stack([numbers & 15, numbers >> 4], -1)
                numbers = pairs.reshape(*numbers.shape[:2], 32)
            zero = 8 if blocks.bits == 4 else 128
            values = (numbers.astype(np.float32) - zero) * blocks.scales[..., None]
            if blocks.offsets is not None:
                values += blocks.offsets[..., None]
            np.testing.assert_allclose(
                values.reshape(tensor.shape), dequantize(tensor), rtol=0, atol=1e-6
            )
