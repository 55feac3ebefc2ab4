"""Which tensors a language model takes and gives: told from its metadata, never from its name."""

from __future__ import annotations

import json
from collections.abc import Iterable

from attrs import frozen

from iaop_core import GenerationParams
from iaop_core.errors import BackendProtocolError, ModelLoadError
from iaop_gpu_triton.settings import NAME
from iaop_gpu_triton.tensors import ModelMetadata, Response, Tensor, TensorSpec, Value

_NOT_ENDED = "None"


@frozen
class Piece:
    """What one response adds to the answer; None is what the server does not tell."""

    text: bytes
    """UTF-8; may begin or end within a character."""
    prompt_tokens: int | None
    new_tokens: int | None
    finish_reason: str | None
    """None too while the answer goes on."""


class VllmContract:
    """The tensors of Triton's vLLM backend.

    `text_input`, `stream` and `sampling_parameters` (a JSON text) go in, with
    `exclude_input_in_output` and the `return_…` wishes where the model lists them; `text_output`,
    and what was wished for, comes out. Spec: github.com/triton-inference-server/vllm_backend.
    """

    _WISHES = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")

    def __init__(self, metadata: ModelMetadata) -> None:
        self._model = metadata.name
        self._inputs = metadata.inputs
        for spec, datatype in (
            (metadata.inputs.get("text_input"), "BYTES"),
            (metadata.inputs.get("sampling_parameters"), "BYTES"),
            (metadata.outputs.get("text_output"), "BYTES"),
        ):
            if spec is None or spec.datatype != datatype:
                raise _refused(metadata, "the vLLM contract needs text_input and text_output texts")
        self.tells_finish_reason = {"return_finish_reason"} <= metadata.inputs.keys() and {
            "finish_reason"
        } <= metadata.outputs.keys()

    def request(
        self, prompt: str, params: GenerationParams, *, max_tokens: int, streamed: bool
    ) -> tuple[Tensor, ...]:
        """The inputs for one answer, only those that the model lists."""
        excludes_input = "exclude_input_in_output" in self._inputs
        sampling = {**params.given, "max_tokens": max_tokens}
        values: dict[str, Value] = {
            "text_input": prompt.encode(),
            # A plain answer of a model that can't leave out its input would begin with the prompt,
            # a streamed one does not: its parts are asked for and joined.
            "stream": streamed or not excludes_input,
            "sampling_parameters": json.dumps(sampling, ensure_ascii=False).encode(),
            "exclude_input_in_output": True,
            **dict.fromkeys(self._WISHES, True),
        }
        return tuple(
            Tensor(self._inputs[name], value)
            for name, value in values.items()
            if name in self._inputs
        )

    def read(self, response: Response) -> Piece:
        """What a response says. Raises `BackendProtocolError` when its text is missing."""
        texts = response.outputs.get("text_output")
        if texts is None:
            raise BackendProtocolError(
                f"a response of model {self._model!r} lacks the tensor text_output that its "
                "metadata promises; the model on the Triton server is at fault",
                backend=NAME,
            )
        reasons = response.outputs.get("finish_reason", ())
        reason = b"".join(_texts(reasons)).decode("utf-8", "replace")
        return Piece(
            text=b"".join(_texts(texts)),
            prompt_tokens=_total(response.outputs.get("num_input_tokens")),
            new_tokens=_total(response.outputs.get("num_output_tokens")),
            finish_reason=None if reason in ("", _NOT_ENDED) else reason,
        )


def contract_of(metadata: ModelMetadata) -> VllmContract:
    """The contract that the model's tensors show.

    Raises `ModelLoadError`, naming the tensors, for a contract that this backend does not speak.
    """
    inputs = metadata.inputs.keys()
    if "sampling_parameters" in inputs:
        return VllmContract(metadata)
    if "sampling_param_max_tokens" in inputs:
        raise _refused(
            metadata,
            "these are the tensors of TensorRT-LLM's LLM API, which this "
            "version does not speak; serve the model by Triton's vLLM backend",
        )
    if {"text_input", "max_tokens"} <= inputs:
        raise _refused(
            metadata,
            "these are the tensors of a TensorRT-LLM ensemble or BLS model, "
            "which this version does not speak; serve the model by Triton's "
            "vLLM backend",
        )
    if "input_ids" in inputs and "text_input" not in inputs:
        raise _refused(
            metadata,
            "it takes token ids: a raw engine, no text model; name the "
            "ensemble or BLS model in front of it",
        )
    raise _refused(
        metadata,
        "these are the tensors of no known kind of language model; the "
        "vLLM contract has the input sampling_parameters",
    )


def _refused(metadata: ModelMetadata, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"model {metadata.name!r} can't be used: {reason}. Its inputs are "
        f"{_listed(metadata.inputs.values())}; its outputs {_listed(metadata.outputs.values())}",
        backend=NAME,
        model=metadata.name,
    )


def _listed(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} ({spec.datatype})" for spec in specs) or "none"


def _texts(values: tuple[Value, ...]) -> list[bytes]:
    if not all(isinstance(value, bytes) for value in values):
        raise BackendProtocolError("an output that should be text is none", backend=NAME)
    return [value for value in values if isinstance(value, bytes)]


def _total(values: tuple[Value, ...] | None) -> int | None:
    if not values:
        return None
    return sum(int(value) for value in values)
