"""A tiny Llama model with random weights: as a GGUF file, and as plain numpy to compare with."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from scripted_model import byte_level

Array = np.ndarray[Any, Any]

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 96, 2, 4, 2, 16
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
EPSILON, ROPE_BASE, CONTEXT = 1e-5, 10000.0, 512


@frozen
class TinyLlama:
    """The values that the file holds, after quantization."""

    weights: dict[str, Array]
    tied: bool

    def logits(self, ids: list[int]) -> Array:
        """The logits of the last position, with no cache, straight from the definition."""
        stream = self.weights["token_embd.weight"][ids]
        count = len(ids)
        mask = np.triu(np.full((count, count), -np.inf), 1)
        for layer in range(LAYERS):
            get = lambda name, layer=layer: self.weights[f"blk.{layer}.{name}.weight"]  # noqa: E731
            x = _norm(stream, get("attn_norm"))
            q = _rotate((x @ get("attn_q").T).reshape(count, HEADS, HEAD_SIZE))
            k = _rotate((x @ get("attn_k").T).reshape(count, KV_HEADS, HEAD_SIZE))
            v = (x @ get("attn_v").T).reshape(count, KV_HEADS, HEAD_SIZE)
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = q[:, head] @ k[:, group].T / np.sqrt(HEAD_SIZE) + mask
                chances = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(chances / chances.sum(-1, keepdims=True) @ v[:, group])
            stream = stream + np.concatenate(heads, -1) @ get("attn_output").T
            x = _norm(stream, get("ffn_norm"))
            gate = x @ get("ffn_gate").T
            inner = gate / (1 + np.exp(-gate)) * (x @ get("ffn_up").T)
            stream = stream + inner @ get("ffn_down").T
        last = _norm(stream, self.weights["output_norm.weight"])[-1]
        return last @ self.weights["token_embd.weight" if self.tied else "output.weight"].T


def write_tiny_gguf(
    path: Path,
    kind: str,
    *,
    embedding: str = "",
    tied: bool = True,
    seed: int = 1,
    changes: dict[str, Any] | None = None,
    extra_tensors: tuple[str, ...] = (),
) -> TinyLlama:
    """Writes a GGUF file whose matrices are all of one type.

    Args:
        path: the file.
        kind: the type's name.
        embedding: the type of the embedding, where it is another.
        tied: whether the embedding is the head, too.
        seed: of the weights.
        changes: metadata to set; None leaves the key out.
        extra_tensors: names of vectors that no Llama has.
    """
    tokens = [byte_level(bytes([byte])) for byte in range(256)] + ["<end>", "<|x|>"]
    shapes = {"token_embd.weight": (len(tokens), WIDTH)}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes[f"{block}.attn_norm.weight"] = shapes[f"{block}.ffn_norm.weight"] = (WIDTH,)
        shapes[f"{block}.attn_q.weight"] = (HEADS * HEAD_SIZE, WIDTH)
        shapes[f"{block}.attn_k.weight"] = (KV_HEADS * HEAD_SIZE, WIDTH)
        shapes[f"{block}.attn_v.weight"] = (KV_HEADS * HEAD_SIZE, WIDTH)
        shapes[f"{block}.attn_output.weight"] = (WIDTH, HEADS * HEAD_SIZE)
        shapes[f"{block}.ffn_gate.weight"] = shapes[f"{block}.ffn_up.weight"] = (INNER, WIDTH)
        shapes[f"{block}.ffn_down.weight"] = (WIDTH, INNER)
    shapes["output_norm.weight"] = (WIDTH,)
    if not tied:
        shapes["output.weight"] = (len(tokens), WIDTH)
    shapes |= dict.fromkeys(extra_tensors, (WIDTH,))

    random = np.random.default_rng(seed)
    values, entries, data = {}, [], b""
    for name, shape in shapes.items():
        values_in = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            type_, encoded, values[name] = "F32", (1 + values_in).tobytes(), 1 + values_in
        else:
            type_ = embedding if embedding and name == "token_embd.weight" else kind
            encoded, values[name] = _encode(values_in, type_)
        entries.append((name, shape, TYPES[type_], len(data)))
        data += encoded + b"\0" * (-len(encoded) % 32)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.freq_base": ROPE_BASE,
        "llama.rope.dimension_count": HEAD_SIZE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 256,
        **(changes or {}),
    }
    if "ab" not in tokens:
        metadata["tokenizer.ggml.merges"] = []
    metadata = {key: value for key, value in metadata.items() if value is not None}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    for name, shape, number, offset in entries:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + sizes + struct.pack("<IQ", number, offset)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    # llama.cpp keeps rotated pairs side by side; the definition above wants the halves apart.
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        for layer in range(LAYERS):
            key = f"blk.{layer}.{name}.weight"
            pairs = values[key].reshape(heads, HEAD_SIZE // 2, 2, WIDTH)
            values[key] = pairs.swapaxes(1, 2).reshape(heads * HEAD_SIZE, WIDTH)
    return TinyLlama(values, tied)


def _encode(values: Array, kind: str) -> tuple[bytes, Array]:
    """The bytes of a matrix, and the values that they stand for, block by block."""
    if kind == "F32":
        return values.tobytes(), values
    if kind == "F16":
        half = values.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    encoded, back = b"", np.empty_like(values)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 32):
            block = values[row, start : start + 32]
            part, back[row, start : start + 32] = _encode_block(block, kind)
            encoded += part
    return encoded, back


def _encode_block(block: Array, kind: str) -> tuple[bytes, Array]:
    if kind == "Q8_0":
        step = np.float16(np.abs(block).max() / 127)
        numbers = np.clip(np.round(block / np.float32(step)), -128, 127).astype(np.int8)
        return step.tobytes() + numbers.tobytes(), numbers * np.float32(step)
    low, high = float(block.min()), float(block.max())
    if kind == "Q4_0":
        step, base = np.float16(max(-low, high) / 7), np.float16(0)
        numbers = np.clip(np.round(block / np.float32(step)) + 8, 0, 15).astype(np.uint8)
        back = (numbers.astype(np.float32) - 8) * np.float32(step)
        head = step.tobytes()
    else:
        step, base = np.float16((high - low) / 15), np.float16(low)
        numbers = np.clip(np.round((block - base) / np.float32(step)), 0, 15).astype(np.uint8)
        back = numbers * np.float32(step) + np.float32(base)
        head = step.tobytes() + base.tobytes()
    return head + bytes(numbers[i] | numbers[i + 16] << 4 for i in range(16)), back


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def _rotate(x: Array) -> Array:
    half = HEAD_SIZE // 2
    angles = np.outer(np.arange(len(x)), ROPE_BASE ** -(np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_value(item) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 8)
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _string(value)
