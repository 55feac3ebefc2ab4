"""What the kinds of language model have in common: texts go in, texts come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from attrs import frozen

from iaop_core import GenerationParams
from iaop_core.errors import BackendProtocolError, InvalidRequestError, ModelLoadError
from iaop_gpu_triton.settings import NAME
from iaop_gpu_triton.tensors import (
    INTEGER_RANGES,
    ModelMetadata,
    Response,
    Tensor,
    TensorSpec,
    Value,
)

_NOT_ENDED = "None"  # the finish reason of a response that is not the last


@frozen
class Piece:
    """What one response adds to the answer; None is what the server does not tell."""

    text: bytes
    """UTF-8; may begin or end within a character."""
    prompt_tokens: int | None
    new_tokens: int | None
    finish_reason: str | None
    """None too while the answer goes on."""


class TensorContract(ABC):
    """Which tensors carry a prompt, the parameters and an answer."""

    params: frozenset[str]
    """The generation parameters that the model takes."""
    repeats_prompt = False
    """The model may begin its answer with the prompt, and can't be told not to."""
    keeps_stop = False
    """A stop text that the engine has found may stand at the end of the answer."""

    wishes = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")

    def __init__(self, metadata: ModelMetadata, *, prompt: str, answer: str) -> None:
        self._model = metadata.name
        self._inputs = metadata.inputs
        self._answer = answer
        for kind, specs, name in (
            ("input", metadata.inputs, prompt),
            ("output", metadata.outputs, answer),
        ):
            spec = specs.get(name)
            if spec is None or spec.datatype != "BYTES":
                raise refused(metadata, f"its {kind} {name} should be a text")
        self.tells_finish_reason = (
            "return_finish_reason" in metadata.inputs and "finish_reason" in metadata.outputs
        )
        self.streams = metadata.decoupled is not False
        """The model may answer in several responses."""

    def _listed(self, values: Mapping[str, object]) -> tuple[Tensor, ...]:
        """The values whose tensors the model lists."""
        inputs = self._inputs
        return tuple(tensor(inputs[name], values[name]) for name in values if name in inputs)

    @abstractmethod
    def request(
        self, prompt: str, params: GenerationParams, *, max_tokens: int, streamed: bool
    ) -> tuple[Tensor, ...]:
        """The inputs for one answer, only those that the model lists.

        Raises `InvalidRequestError` for a value that a tensor can't hold.
        """

    def read(self, response: Response) -> Piece:
        """What a response says. Raises `BackendProtocolError` when its text is missing."""
        outputs = response.outputs
        texts = outputs.get(self._answer)
        if texts is None:
            raise BackendProtocolError(
                f"a response of model {self._model!r} lacks the tensor {self._answer} that its "
                "metadata promises; the model on the Triton server is at fault",
                backend=NAME,
            )
        reason = _text(outputs.get("finish_reason", ())).decode("utf-8", "replace")
        return Piece(
            _text(texts),
            _total(outputs.get("num_input_tokens")),
            _total(outputs.get("num_output_tokens")),
            None if reason in ("", _NOT_ENDED) else reason,
        )


def refused(metadata: ModelMetadata, reason: str) -> ModelLoadError:
    """The error for a model whose tensors can't be used, telling them all."""
    return ModelLoadError(
        f"model {metadata.name!r} can't be used: {reason}. Its inputs are "
        f"{_shown(metadata.inputs.values())}; its outputs {_shown(metadata.outputs.values())}",
        backend=NAME,
        model=metadata.name,
    )


def tensor(spec: TensorSpec, value: object, param: str = "") -> Tensor:
    """The value, or the texts of a sequence, as the tensor that the model declares.

    Raises `InvalidRequestError` with `param` for what it can't hold.
    """
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if len(values) > 1 and spec.shape[-1] not in (-1, len(values)):
        raise InvalidRequestError(
            f"{param or spec.name} has {len(values)} values, and the model's tensor {spec.name} "
            f"takes {spec.shape[-1]}",
            backend=NAME,
            param=param,
        )
    return Tensor(spec, tuple(_converted(spec, each, param) for each in values))


def _converted(spec: TensorSpec, value: object, param: str) -> Value:
    if spec.datatype == "BYTES" and isinstance(value, str):
        return value.encode()
    if spec.datatype == "BOOL" and isinstance(value, bool):
        return value
    if spec.datatype.startswith("FP") and isinstance(value, int | float):
        return float(value)
    if spec.datatype in INTEGER_RANGES and isinstance(value, int):
        low, high = INTEGER_RANGES[spec.datatype]
        if low <= value <= high:
            return int(value)
        if param == "max_tokens":
            return high  # as good as no limit
    raise InvalidRequestError(
        f"{param or spec.name} does not fit into the model's tensor {spec.name} ({spec.datatype})",
        backend=NAME,
        param=param,
    )


def _shown(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} ({spec.datatype})" for spec in specs) or "none"


def _text(values: tuple[Value, ...]) -> bytes:
    try:
        return b"".join(values)  # type: ignore[arg-type]
    except TypeError as error:
        raise BackendProtocolError("an output that should be text is none", backend=NAME) from error


def _total(values: tuple[Value, ...] | None) -> int | None:
    return sum(map(int, values)) if values else None
