"""What a model folder says: which file runs, where texts end, how long they may be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from iaop_core.errors import ModelLoadError
from iaop_onnx_local.cache import models_folder

__all__ = ["ModelFolder", "find_model_folder"]

_PLACES: Final = ("model", "onnx/model", "decoder_model_merged", "onnx/decoder_model_merged")
"""Where model files stand, as the usual exporters write them, the first one first; `.onnx` or
`_VARIANT.onnx` follows."""
_VARIANT: Final = re.compile(r"[A-Za-z0-9]\w*")


def find_model_folder(model_id: str) -> ModelFolder:
    """Finds the folder of a model id: a path, or a name in the cache folder.

    Raises:
        ModelLoadError: there is none; the message says how to make one.
    """
    path = Path(model_id).expanduser()
    # Not Path's own questions, which raise for a name that is too long.
    if path.suffix == ".gguf" and os.path.isfile(path):
        raise ModelLoadError(
            f"{path} is a GGUF file; convert it once with "
            f"'iaop-onnx import {path} FOLDER' and give the folder as the model",
            model=model_id,
        )
    if os.path.isdir(path):
        return ModelFolder.read(path, model_id)
    if path.name == model_id and os.path.isdir(models_folder() / model_id):
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

    def find_model_file(self, chosen: str = "") -> Path:
        """The ONNX file to run.

        Args:
            chosen: a file's path in the folder, or the name of a variant of the weights: `q4` is
                `model_q4.onnx` or `onnx/model_q4.onnx`. Empty: the file that `genai_config.json`
                names, else `model.onnx`, `onnx/model.onnx`, or a merged decoder in their place;
                else the only one there is.

        Raises:
            ModelLoadError: it isn't there, or nothing says which of several it is.
        """
        there = sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*.onnx"))
        named: str = self.genai_config.get("decoder", {}).get("filename", "")
        if not chosen:
            usual = [named, *(f"{place}.onnx" for place in _PLACES)]
        elif _VARIANT.fullmatch(chosen):
            usual = [chosen, *(f"{place}_{chosen}.onnx" for place in _PLACES)]
        else:
            usual = [chosen]
        for name in filter(None, usual):
            if (self.path / name).is_file():
                return self.path / name
        if len(there) == 1 and not chosen:
            return self.path / there[0]
        wanted = f"no {chosen}" if chosen else "neither model.onnx nor onnx/model.onnx"
        raise self.fail(
            f"there is {wanted}; "
            + (
                f"set model_file to one of {', '.join(there)}, or to a variant's name, such as q4 "
                "for model_q4.onnx"
                if there
                else "it holds no ONNX file"
            )
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer.

        `generation_config.json` says so, else `genai_config.json`, else `config.json`; else it is
        the tokenizer's `eos_token`.

        Raises:
            ModelLoadError: no file names one.
        """
        configs = (self.generation_config, self.genai_config, self.config, self._text_config)
        for config in configs:
            found = config.get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if not ids or not all(type(each) is int for each in ids):
                    raise self.fail(f"its eos_token_id is no token or list of tokens: {found!r}")
                return frozenset(ids)
        found = self._special_token_id(self.special_tokens.get("eos_token", ""))
        if found is None:
            raise self.fail(
                "none of its files names an eos_token_id or a tokenizer's eos_token, so an answer "
                "would never end"
            )
        return frozenset([found])

    def _special_token_id(self, text: str) -> int | None:
        added = _read_json(self.path / "tokenizer.json", self.model_id).get("added_tokens", [])
        return next((each["id"] for each in added if each.get("content") == text), None)

    def context_length(self, chosen: int) -> int:
        """Tokens of prompt and answer together; `chosen` may only lower it (0: not chosen).

        Raises:
            ModelLoadError: the model was made for less than chosen, or neither says it.
        """
        length = self._size("max_position_embeddings", "n_positions")
        length = self.genai_config.get("context_length") or length or chosen
        if not length:
            raise self.fail(
                "neither genai_config.json nor config.json tells the context length; set "
                "context_length"
            )
        if chosen > length:
            raise self.fail(f"context_length is set to {chosen}, but the model ends at {length}")
        return chosen or int(length)

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

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows, as far as a file says it."""
        return self.genai_config.get("vocab_size") or self._size("vocab_size")

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

    def find_chat_template(self, chosen: str = "") -> str | None:
        """The source of a chat template, or None where the model has none.

        As transformers has it, the folder's own files come before the tokenizer's configuration,
        and of several templates the one named `default` is taken.

        Args:
            chosen: a Jinja file's path, or the name of one of the model's templates.

        Raises:
            ModelLoadError: the one that was chosen isn't there, or there are several and none is
                the default.
        """
        if chosen and (file := Path(chosen).expanduser()).is_file():
            return self._read_template(file)
        templates = self._chat_templates()
        if not chosen and not templates:
            return None
        name = chosen or "default"
        if name not in templates:
            raise self.fail(
                f"there is no chat template {name!r}: neither a file of that path, nor one of the "
                f"model's own ({', '.join(templates) or 'it has none'}); set chat_template"
            )
        return templates[name]

    def _chat_templates(self) -> dict[str, str]:
        templates: dict[str, str] = {}
        given = self.tokenizer_config.get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            try:
                templates = {str(each["name"]): str(each["template"]) for each in given}
            except (KeyError, TypeError):
                raise self.fail(
                    "the chat_template of tokenizer_config.json is no list of names and templates"
                ) from None
        if (file := self.path / "chat_template.jinja").is_file():
            more = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
            templates = {path.stem: self._read_template(path) for path in more}
            templates["default"] = self._read_template(file)
        return templates

    def _read_template(self, path: Path) -> str:
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise self.fail(f"{path} can't be read: {error}") from error

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
