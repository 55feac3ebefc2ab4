"""Converts a GGUF file to a model folder that `onnx-local` loads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from iaop_onnx_local.importer.gguf import GgufFile
from iaop_onnx_local.importer.graph import LlamaShape, write_llama_graph
from iaop_onnx_local.importer.tokenizer import build_tokenizer, special_token_ids
from iaop_onnx_local.importer.weights import Dtype
from iaop_onnx_local.importer.writer import MODEL_FILE

__all__ = ["ImportedModel", "file_sha256", "import_gguf", "is_imported"]

_RECORD_FILE: Final = "import.json"
_FORMAT: Final = 2
"""Raised when the same source would be converted to something else."""


@frozen(slots=True)
class ImportedModel:
    """What a conversion made."""

    folder: Path
    dtype: Dtype
    source_sha256: str
    size_bytes: int
    seconds: float


def import_gguf(
    source: Path,
    folder: Path,
    *,
    dtype: Dtype = "keep",
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> ImportedModel:
    """Converts a GGUF file of the Llama family to ONNX, tokenizer and chat template included.

    The folder appears whole or not at all: everything is written beside it first.

    Args:
        source: the GGUF file (weights in Q4_0, Q4_1, Q8_0, F16 or F32).
        folder: the model folder to make.
        dtype: `keep` keeps every weight as the file encodes it; `fp32` dequantizes all.
        overwrite: replaces a folder that is there already.
        advance: told the number of source bytes each time some are done.

    Raises:
        GgufError: the file can't be imported; the message says what stands in the way.
        FileExistsError: the folder is there and `overwrite` is false.
        OSError: reading or writing failed.
    """
    started = time.perf_counter()
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        with GgufFile(source) as gguf:
            shape = LlamaShape.of(gguf)
            _write_texts(gguf, shape, part)
            weights = sum(tensor.raw.nbytes for tensor in gguf.tensors.values())
            advance(source.stat().st_size - weights)
            write_llama_graph(gguf, shape, part, dtype=dtype, advance=advance)
        digest = file_sha256(source)
        record = {"format": _FORMAT, "source": source.name, "sha256": digest, "dtype": dtype}
        _write_json(part / _RECORD_FILE, record)
        _put_in_place(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return ImportedModel(folder, dtype, digest, size, time.perf_counter() - started)


def is_imported(folder: Path, *, sha256: str, dtype: Dtype) -> bool:
    """Tells whether the folder holds what `import_gguf` would make of that source today."""
    try:
        record = json.loads((folder / _RECORD_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    expected = {"format": _FORMAT, "sha256": sha256, "dtype": dtype}
    return isinstance(record, dict) and record.items() >= expected.items()


def _write_texts(gguf: GgufFile, shape: LlamaShape, folder: Path) -> None:
    ids = special_token_ids(gguf)
    texts = gguf.get("tokenizer.ggml.tokens", list)
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"), pretty=False)
    tokens = {"bos_token": ids.get("bos_token_id"), "eos_token": ids["eos_token_id"][0]}
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context_length,
        "clean_up_tokenization_spaces": False,
        **{name: texts[number] for name, number in tokens.items() if number is not None},
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "genai_config.json", _genai_config(shape, ids))
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):  # base models have none
        (folder / "chat_template.jinja").write_text(template, "utf-8", newline="")


def _genai_config(shape: LlamaShape, ids: dict[str, Any]) -> dict[str, Any]:
    """What onnxruntime-genai reads, so that the folder serves there too."""
    return {
        "model": {
            "type": "llama",
            "context_length": shape.context_length,
            "vocab_size": shape.vocabulary,
            "bos_token_id": ids.get("bos_token_id", ids["eos_token_id"][0]),
            "pad_token_id": ids.get("pad_token_id", ids["eos_token_id"][0]),
            "eos_token_id": ids["eos_token_id"],
            "decoder": {
                "filename": MODEL_FILE,
                "session_options": {"provider_options": []},
                "head_size": shape.head_size,
                "hidden_size": shape.width,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "num_hidden_layers": shape.layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": shape.context_length,
            "past_present_share_buffer": True,
        },
    }


def _put_in_place(part: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.parent / f".{folder.name}.{os.getpid()}.old"
        folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old)
    else:
        part.rename(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
