"""A real ONNX decoder that says a script: at each length of the text, the next token is given.

So a test chooses the tokens; tokenizer, session, cache, sampling and streaming are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PROMPT = "!"
"""A prompt of one token."""
END = "<end>"


def byte_level(data: bytes) -> str:
    """The spelling of bytes in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    spelling = {byte: chr(byte) for byte in shown}
    spelling |= {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    return "".join(spelling[byte] for byte in data)


def write_scripted_model(
    folder: Path,
    script: Sequence[bytes],
    *,
    ends: bool = True,
    context_length: int = 1000,
    logits: np.ndarray[Any, Any] | None = None,
    prompt_tokens: Sequence[str] = (),
) -> Path:
    """Writes a model folder.

    Args:
        folder: where; it is made.
        script: the tokens that the model says, each by its bytes, after a prompt of one token.
        ends: whether the end token follows; else the last token is said for ever.
        context_length: of the model.
        logits: `[positions, vocabulary]` in place of those that say the script.
        prompt_tokens: further tokens that prompts may hold.
    """
    folder.mkdir(parents=True)
    tokens = dict.fromkeys([END, PROMPT, *prompt_tokens, *(byte_level(part) for part in script)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context_length}))
    if logits is None:
        said = [vocabulary[byte_level(part)] for part in script] + [0] * ends
        logits = np.zeros((len(said), len(vocabulary)), np.float32)
        logits[np.arange(len(said)), said] = 10
    onnx.save(_graph(logits), folder / "model.onnx")
    return folder


def _graph(logits: np.ndarray[Any, Any]) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(logits.dtype)
    cache = ["batch", 1, "past", 2]
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["total"], start=1, end=2),
        helper.make_node("Sub", ["total", "one"], ["place"]),
        helper.make_node("Min", ["place", "highest"], ["row"]),
        helper.make_node("Gather", ["table", "row"], ["chosen"], axis=0),
        helper.make_node("Unsqueeze", ["chosen", "zero"], ["logits"]),
        # The cache grows by the ids themselves, so a wrong length would fail.
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "axes"], ["cells"]),
        helper.make_node("Expand", ["cells", "pair"], ["pairs"]),
    ]
    for part in ("key", "value"):
        inputs = [f"past_key_values.0.{part}", "pairs"]
        nodes.append(helper.make_node("Concat", inputs, [f"present.0.{part}"], axis=2))
    constants = {
        "one": np.array([1]),
        "zero": np.array([0]),
        "highest": np.array([len(logits) - 1]),
        "axes": np.array([1, 3]),
        "pair": np.array([1, 1, 1, 2]),
        "table": logits,
    }
    ids = ["batch", "sequence"]
    graph = helper.make_graph(
        nodes,
        "scripted",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ids),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *(
                helper.make_tensor_value_info(f"past_key_values.0.{part}", TensorProto.FLOAT, cache)
                for part in ("key", "value")
            ),
        ],
        [
            helper.make_tensor_value_info("logits", kind, ["batch", 1, logits.shape[1]]),
            *(
                helper.make_tensor_value_info(
                    f"present.0.{part}", TensorProto.FLOAT, ["batch", 1, "present", 2]
                )
                for part in ("key", "value")
            ),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
