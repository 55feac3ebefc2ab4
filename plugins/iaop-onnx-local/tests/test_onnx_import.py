"""GGUF files become ONNX models that compute what the file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_text import OneText
from tiny_llama import CONTEXT, write_tiny_gguf
from tokenizers import Tokenizer

from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.importer.folder import import_gguf, is_imported
from iaop_onnx_local.importer.gguf import GgufError, GgufFile
from iaop_onnx_local.session import open_session

IDS = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def logits_of(folder: Path, ids: list[int], *, steps: bool = False) -> np.ndarray[Any, Any]:
    """The logits after the ids, taken in one step or one by one."""
    path = folder / "model.onnx"
    opened = open_session(path, device="cpu", threads=1)
    text = OneText(Decoder(opened, path, head_size=None, kv_heads=None))
    if not steps:
        return text.extend(ids).copy()
    for number in ids:
        logits = text.extend([number])
    return logits.copy()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_fp32_import_computes_the_files_model(tmp_path: Path, kind: str, tied: bool) -> None:
    llama = write_tiny_gguf(tmp_path / "tiny.gguf", kind, tied=tied)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="fp32")
    expected = llama.logits(IDS)
    np.testing.assert_allclose(logits_of(tmp_path / "out", IDS), expected, rtol=1e-4, atol=1e-4)
    stepped = logits_of(tmp_path / "out", IDS, steps=True)
    np.testing.assert_allclose(stepped, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("embedding", ["", "Q8_0", "F16"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_kept_weights_compute_the_files_model(tmp_path: Path, kind: str, embedding: str) -> None:
    llama = write_tiny_gguf(tmp_path / "tiny.gguf", kind, embedding=embedding)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    expected = llama.logits(IDS)
    # Products with quantized weights run on 8-bit activations.
    quantized = kind.startswith("Q") or embedding.startswith("Q")
    tolerance = 0.05 * np.abs(expected).max() if quantized else 1e-4
    actual = logits_of(tmp_path / "out", IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    stepped = logits_of(tmp_path / "out", IDS, steps=True)
    np.testing.assert_allclose(stepped, expected, rtol=0, atol=tolerance)


def test_kept_weights_are_no_larger_than_their_blocks(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "Q4_0")
    kept = import_gguf(tmp_path / "tiny.gguf", tmp_path / "kept")
    whole = import_gguf(tmp_path / "tiny.gguf", tmp_path / "whole", dtype="fp32")
    assert kept.size_bytes < whole.size_bytes


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32", extra_tensors=("blk.0.surprise",))
    with pytest.raises(GgufError, match=r"no place for: blk\.0\.surprise"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def test_folder_that_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(FileExistsError):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine"]
    made = import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "tiny.gguf"]
    assert is_imported(tmp_path / "out", sha256=made.source_sha256, dtype="keep")
    assert not is_imported(tmp_path / "out", sha256=made.source_sha256, dtype="fp32")


def test_progress_counts_every_byte_of_the_source(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")
    done: list[int] = []
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", advance=done.append)
    size = (tmp_path / "tiny.gguf").stat().st_size
    assert sum(done) == pytest.approx(size, abs=64 * len(done))
    assert len(done) > 10


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": "two"}, "'llama.block_count' is a str"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.attention.head_count_kv": 4}, r"has shape \(32, 64\)"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"tokenizer.ggml.eos_token_id": None}, "ends an answer"),
    ],
    ids=str,
)
def test_file_that_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32", changes=changes)
    with pytest.raises(GgufError, match=told):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


@pytest.mark.parametrize("length", [0, 3, 20, 400, 5000])
def test_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[:length])
    with pytest.raises(GgufError, match=r"cut short|not a GGUF file"):
        GgufFile(tmp_path / "tiny.gguf")


def test_tokenizer_keeps_control_tokens_and_ends(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": True}
    changes["tokenizer.ggml.eot_token_id"] = 97
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32", changes=changes)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("hé<end>").ids == [257, 104, 0xC3, 0xA9, 256]
    assert tokenizer.decode([104, 256]) == "h"
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [256, 97]
    genai = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert genai["model"]["context_length"] == CONTEXT


def test_digits_are_split_one_by_one_for_smollm(tmp_path: Path) -> None:
    tokens = [chr(97 + n) for n in range(26)] + [*"0123456789", "Ġ", "12", "ab"]
    tokens += [f"<{n}>" for n in range(258 - len(tokens))]
    changes = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens}
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32", changes=changes)
    with GgufFile(tmp_path / "tiny.gguf") as gguf:
        gguf.metadata["tokenizer.ggml.merges"] = ["1 2", "a b"]
        from iaop_onnx_local.importer.tokenizer import build_tokenizer

        assert build_tokenizer(gguf).encode("ab12").tokens == ["ab", "1", "2"]


def test_cli_imports_a_file_and_reports_in_json(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    command = [sys.executable, "-m", "iaop_onnx_local.cli", "import", "tiny.gguf", "out"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stderr == b""
    assert json.loads(done.stdout)["folder"] == "out"
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert again.returncode == 1
    assert b"--force" in again.stderr
