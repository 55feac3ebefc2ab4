"""Model folders as people have them: which file runs, where texts end, which template holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from scripted_model import END, PROMPT, write_scripted_model
from tiny_decoders import TinyDecoder

from iaop_core.errors import ModelLoadError
from iaop_onnx_local import OnnxLocalBackend
from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.model_folder import ModelFolder
from iaop_onnx_local.session import open_session


def folder_with(path: Path, *files: str, **configs: Any) -> ModelFolder:
    for name in files:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()
    for name, config in configs.items():
        (path / f"{name}.json").write_text(json.dumps(config))
    return ModelFolder.read(path, "m")


# -- the file -----------------------------------------------------------------------------------

VARIANTS = (
    "onnx/model.onnx",
    "onnx/model_fp16.onnx",
    "onnx/model_q4.onnx",
    "onnx/model_q4f16.onnx",
)


@pytest.mark.parametrize(
    ("files", "chosen", "expected"),
    [
        (("model.onnx", "onnx/model.onnx"), "", "model.onnx"),
        (VARIANTS, "", "onnx/model.onnx"),
        (VARIANTS, "q4", "onnx/model_q4.onnx"),
        (VARIANTS, "fp16", "onnx/model_fp16.onnx"),
        (VARIANTS, "onnx/model_q4f16.onnx", "onnx/model_q4f16.onnx"),
        (("model_quantized.onnx", "model.onnx"), "quantized", "model_quantized.onnx"),
        (
            ("onnx/decoder_model.onnx", "onnx/decoder_model_merged.onnx"),
            "",
            "onnx/decoder_model_merged.onnx",
        ),
        (("onnx/model_q4.onnx",), "", "onnx/model_q4.onnx"),
    ],
)
def test_file_is_the_default_or_the_variant(
    tmp_path: Path, files: tuple[str, ...], chosen: str, expected: str
) -> None:
    folder = folder_with(tmp_path, *files)
    assert folder.find_model_file(chosen) == tmp_path / expected


def test_file_that_genai_config_names_comes_first(tmp_path: Path) -> None:
    genai_config = {"model": {"decoder": {"filename": "decoder.onnx"}}}
    folder = folder_with(tmp_path, "decoder.onnx", "model.onnx", genai_config=genai_config)
    assert folder.find_model_file() == tmp_path / "decoder.onnx"


@pytest.mark.parametrize("chosen", ["", "int8", "onnx/nope.onnx"])
def test_file_that_is_not_there_lists_those_that_are(tmp_path: Path, chosen: str) -> None:
    folder = folder_with(tmp_path, *VARIANTS[1:])
    with pytest.raises(ModelLoadError) as caught:
        folder.find_model_file(chosen)
    for part in (chosen or "model.onnx", *VARIANTS[1:], "model_file"):
        assert part in str(caught.value)


def test_variant_is_chosen_by_the_settings(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    (folder / "model.onnx").rename(folder / "model_q4.onnx")
    (folder / "model.onnx").write_text("another one")
    with OnnxLocalBackend(device="cpu", model_file="q4") as backend:
        backend.load_model(str(folder))
        assert backend.infer(PROMPT).text == "a"


def test_missing_weights_file_is_a_load_error_that_names_it(tmp_path: Path) -> None:
    path = TinyDecoder().write(tmp_path / "model.onnx")
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=2048
    )
    open_session(path, device="cpu", threads=1)
    (tmp_path / "w.data").unlink()
    with pytest.raises(ModelLoadError, match=r"w\.data"):
        open_session(path, device="cpu", threads=1)


# -- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, {7, 8}),
        ({"config": {"eos_token_id": 7}, "genai_config": {"model": {"eos_token_id": [1]}}}, {1}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [2, 3]}}, {2, 3}),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": None}}, {0}),
        (
            {
                "tokenizer_config": {"eos_token": {"content": "</s>"}},
                "tokenizer": {"added_tokens": [{"id": 9, "content": "</s>"}]},
            },
            {9},
        ),
    ],
)
def test_ends_are_those_that_the_files_name(
    tmp_path: Path, configs: dict[str, Any], expected: set[int]
) -> None:
    assert folder_with(tmp_path, **configs).end_token_ids == expected


@pytest.mark.parametrize("value", ["2", [], [1, "2"], True, 2.0])
def test_end_that_is_no_token_is_a_load_error(tmp_path: Path, value: Any) -> None:
    folder = folder_with(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        _ = folder.end_token_ids


def test_folder_with_neither_config_nor_generation_config_runs(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    with pytest.raises(ModelLoadError, match="set context_length"):
        OnnxLocalBackend(device="cpu").load_model(str(folder))
    with OnnxLocalBackend(device="cpu", context_length=100) as backend:
        backend.load_model(str(folder))
        result = backend.infer(PROMPT)
        assert (result.text, result.finish_reason) == ("a", "stop")


# -- sizes that a graph leaves open -------------------------------------------------------------


def test_sizes_that_the_graph_leaves_open_come_from_genai_config(tmp_path: Path) -> None:
    tiny = TinyDecoder(grouped=True, rotary=True, key_size=16, value_size=16)
    path = tiny.write(tmp_path / "model.onnx")
    model = onnx.load(path)
    for value in [*model.graph.input, *model.graph.output]:
        shape = value.type.tensor_type.shape
        if value.name == "logits":
            shape.dim[2].dim_param = "vocabulary"
        elif len(shape.dim) == 4:
            shape.dim[1].dim_param, shape.dim[3].dim_param = "heads", "size"
    onnx.save(model, path)
    decoder = {"head_size": 16, "num_key_value_heads": 2}
    folder = folder_with(
        tmp_path, genai_config={"model": {"vocab_size": 40, "decoder": decoder}}, config={}
    )
    opened = open_session(path, device="cpu", threads=1)
    sizes = {"head_size": folder.head_size, "kv_heads": folder.kv_heads}
    made = Decoder(opened, path, **sizes, vocabulary=folder.vocabulary)
    assert (made.vocabulary, made.cache_bytes_per_token) == (40, 2 * 2 * 16 * 4)
    assert [(each.heads, each.size) for each in made.cache] == [(2, 16)] * 2
    assert np.dtype(made.logits_type) == np.float32


# -- chat templates -----------------------------------------------------------------------------

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("given", "files", "chosen", "expected"),
    [
        ("A", {}, "", "A"),
        ("A", {"chat_template.jinja": "F"}, "", "F"),
        (None, {"chat_template.jinja": "F"}, "", "F"),
        (NAMED, {}, "", "D"),
        (NAMED, {}, "tool_use", "T"),
        (NAMED, {"chat_template.jinja": "F"}, "default", "F"),
        ("A", {"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "R"}, "rag", "R"),
        (None, {}, "", None),
    ],
)
def test_template_is_found_in_the_references_order(
    tmp_path: Path, given: Any, files: dict[str, str], chosen: str, expected: str | None
) -> None:
    folder = folder_with(tmp_path, *files, tokenizer_config={"chat_template": given})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert folder.find_chat_template(chosen) == expected


@pytest.mark.parametrize("chosen", ["", "rag"])
def test_template_that_is_not_there_lists_those_that_are(tmp_path: Path, chosen: str) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": NAMED[1:]})
    with pytest.raises(ModelLoadError, match=r"tool_use.*set chat_template") as caught:
        folder.find_chat_template(chosen)
    assert (chosen or "default") in str(caught.value)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"temperature": -1}])
def test_recommended_sampling_that_makes_no_sense_is_a_load_error(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    config = {"eos_token_id": 0, "do_sample": True, **wrong}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="generation_config"):
        OnnxLocalBackend(device="cpu").load_model(str(folder))


def test_name_too_long_for_a_path_is_no_model() -> None:
    with pytest.raises(ModelLoadError, match="there is no model"):
        OnnxLocalBackend(device="cpu").load_model("a" * 5000)
