"""Models with a tensor for each parameter: TensorRT-LLM's two kinds, and others by their names."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from iaop_core import GenerationParams
from iaop_gpu_triton.contract import TensorContract, refused, tensor
from iaop_gpu_triton.settings import PARAMS
from iaop_gpu_triton.tensors import ModelMetadata, Tensor


@frozen(kw_only=True)
class TensorNames:
    """What a kind of model calls its tensors."""

    params: Mapping[str, tuple[str, ...]]
    """Parameter → the names that its tensor may have; the first that the model lists is taken."""
    prompt: str = "text_input"
    answer: str = "text_output"
    stream: str = "stream"
    excludes_prompt: str = ""
    greedy_by_top_k: bool = False
    """Temperature 0 alone does not make the engine greedy: top_k 1 goes with it."""
    keeps_stop: bool = False
    empty_texts: tuple[str, ...] = ()
    """Texts that early versions of the model require, though they may be empty."""


ENSEMBLE = TensorNames(
    params={
        **{name: (name,) for name in PARAMS - {"stop", "seed"}},
        "seed": ("seed", "random_seed"),
        "stop": ("stop_words",),
    },
    excludes_prompt="exclude_input_in_output",
    greedy_by_top_k=True,
    keeps_stop=True,
    empty_texts=("stop_words", "bad_words"),
)
"""An ensemble or BLS model before a TensorRT-LLM engine. Spec:
github.com/triton-inference-server/tensorrtllm_backend."""

LLM_API = TensorNames(
    params={name: (f"sampling_param_{name}",) for name in PARAMS},
    stream="streaming",  # its `stop` is no stop text: it cancels the request of the same id
    excludes_prompt="sampling_param_exclude_input_from_output",
)
"""TensorRT-LLM's LLM API as a Triton model."""


def odd_names(tensors: Mapping[str, str]) -> TensorNames:
    """The names that a site gives for a model of its own kind, by role."""
    return TensorNames(
        params={role: (name,) for role, name in tensors.items() if role in PARAMS},
        prompt=tensors["prompt"],
        answer=tensors["answer"],
        stream=tensors.get("stream", ""),
        keeps_stop=True,
    )


class NamedContract(TensorContract):
    """A prompt, a tensor for each parameter, and wishes, in the dtypes that the model declares."""

    def __init__(self, metadata: ModelMetadata, names: TensorNames) -> None:
        super().__init__(metadata, prompt=names.prompt, answer=names.answer)
        self._names = names
        self._param_names = {
            param: listed[0]
            for param, choices in names.params.items()
            if (listed := [name for name in choices if name in metadata.inputs])
        }
        self.params = frozenset(self._param_names)
        self.keeps_stop = names.keeps_stop
        self.repeats_prompt = names.excludes_prompt not in metadata.inputs
        always: dict[str, object] = {
            names.excludes_prompt: True,
            **dict.fromkeys(self.wishes, True),
            **{name: "" for name in names.empty_texts if name in metadata.required},
        }
        self._always = self._listed(always)
        self._stream = {
            flag: self._listed({names.stream: flag and self.streams}) for flag in (True, False)
        }
        sent = {names.prompt, names.stream, self._param_names.get("max_tokens"), *always}
        if missing := sorted(metadata.required - sent):
            raise refused(
                metadata,
                f"it requires {', '.join(missing)}, which this backend has nothing to put into",
            )

    def request(
        self, prompt: str, params: GenerationParams, *, max_tokens: int, streamed: bool
    ) -> tuple[Tensor, ...]:
        wanted = {**params.given, "max_tokens": max_tokens}
        if self._names.greedy_by_top_k and wanted.get("temperature") == 0:
            wanted.setdefault("top_k", 1)
        inputs = self._inputs
        tensors = [tensor(inputs[self._names.prompt], prompt)]
        filled = set()
        for param, value in wanted.items():
            if name := self._param_names.get(param):
                filled.add(name)
                tensors.append(tensor(inputs[name], value, param))
        rest = (*self._stream[streamed], *self._always)
        return (*tensors, *(each for each in rest if each.spec.name not in filled))
