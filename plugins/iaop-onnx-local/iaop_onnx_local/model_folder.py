"""What a model folder says: which file runs, where texts end, how long they may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from iaop_core.errors import ModelLoadError
from iaop_onnx_local.cache import models_folder

__all__ = ["ModelFolder", "find_model_folder"]


def find_model_folder(model_id: str) -> ModelFolder:
    """Finds the folder of a model id: a path, or a name in the cache folder.

    Raises:
        ModelLoadError: there is none; the message says how to make one.
    """
    path = Path(model_id).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        raise ModelLoadError(
            f"{path} is a GGUF file; convert it once with "
            f"'iaop-onnx import {path} FOLDER' and give the folder as the model",
            model=model_id,
        )
    if path.is_dir():
        return ModelFolder.read(path, model_id)
    if path.name == model_id and (models_folder() / model_id).is_dir():
        return ModelFolder.read(models_folder() / model_id, model_id)
    there = sorted(p.name for p in models_folder().glob("[!.]*") if p.is_dir())
    raise ModelLoadError(
        f"there is no model {model_id!r}: neither a folder of that path, nor a name in "
        f"{models_folder()} (which holds {', '.join(there) or 'nothing'}). "
        "'iaop-onnx fetch smollm2-135m-instruct' downloads a small model; "
        "'iaop-onnx import FILE.gguf FOLDER' converts one of your own",
        model=model_id,
    )


@frozen(slots=True)
class ModelFolder:
    """The configuration files of a model folder; a file that isn't there is an empty mapping."""

    path: Path
    model_id: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    genai_config: dict[str, Any]
    """The part `model` of `genai_config.json`."""
    tokenizer_config: dict[str, Any]

    @classmethod
    def read(cls, path: Path, model_id: str) -> ModelFolder:
        return cls(
            path=path,
            model_id=model_id,
            config=_read_json(path / "config.json", model_id),
            generation_config=_read_json(path / "generation_config.json", model_id),
            genai_config=_read_json(path / "genai_config.json", model_id).get("model", {}),
            tokenizer_config=_read_json(path / "tokenizer_config.json", model_id),
        )

    def find_model_file(self, chosen: str) -> Path:
        """The ONNX file to run; `chosen` is relative to the folder, or empty.

        Raises:
            ModelLoadError: it isn't there, or nothing says which of several it is.
        """
        named: str = self.genai_config.get("decoder", {}).get("filename", "")
        usual = [chosen] if chosen else [named, "model.onnx", "onnx/model.onnx"]
        for name in filter(None, usual):
            if (self.path / name).is_file():
                return self.path / name
        there = sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*.onnx"))
        wanted = chosen or "model.onnx or onnx/model.onnx"
        raise self.fail(
            f"there is no {wanted}; "
            + (f"set model_file to one of {', '.join(there)}" if there else "it holds no ONNX file")
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer.

        Raises:
            ModelLoadError: no file names one.
        """
        for config in (self.generation_config, self.genai_config, self.config):
            found = config.get("eos_token_id")
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        raise self.fail("none of its files names an eos_token_id, so an answer would never end")

    def context_length(self, chosen: int) -> int:
        """Tokens of prompt and answer together; `chosen` may only lower it (0: not chosen).

        Raises:
            ModelLoadError: the model was made for less than chosen, or doesn't say.
        """
        length = self.genai_config.get("context_length") or self._text_config.get(
            "max_position_embeddings"
        )
        if not isinstance(length, int):
            raise self.fail("neither genai_config.json nor config.json tells the context length")
        if chosen > length:
            raise self.fail(f"context_length is set to {chosen}, but the model ends at {length}")
        return chosen or length

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like, as a chat template names them."""
        tokens = {}
        for name, value in self.tokenizer_config.items():
            if name.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    tokens[name] = text
        return tokens

    @property
    def kv_heads(self) -> int | None:
        """How many heads the cache has, as far as a file says it."""
        return self._size("num_key_value_heads")

    @property
    def head_size(self) -> int | None:
        """The numbers of a head, as far as a file says it."""
        return self._size("head_size", "head_dim")

    def _size(self, *names: str) -> int | None:
        for config in (self.genai_config.get("decoder", {}), self._text_config):
            for name in names:
                if isinstance(config.get(name), int):
                    return int(config[name])
        return None

    @property
    def _text_config(self) -> dict[str, Any]:
        """The part of `config.json` on the language model, of those that see or hear besides."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part

    def find_chat_template(self) -> str | None:
        """The model's chat template: its own file first, then the tokenizer's configuration.

        Of several named ones it is the one named `default`.
        """
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None

    def fail(self, why: str) -> ModelLoadError:
        return ModelLoadError(
            f"model {self.model_id!r} in {self.path} can't be loaded: {why}", model=self.model_id
        )


def _read_json(path: Path, model_id: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}", model=model_id) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object", model=model_id)
    return value
