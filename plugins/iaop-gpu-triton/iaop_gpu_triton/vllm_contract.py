"""The tensors of Triton's vLLM backend."""

from __future__ import annotations

import json

from iaop_core import GenerationParams
from iaop_gpu_triton.contract import TensorContract, tensor
from iaop_gpu_triton.settings import PARAMS
from iaop_gpu_triton.tensors import ModelMetadata, Tensor


class VllmContract(TensorContract):
    """`text_input`, `stream` and `sampling_parameters`, a JSON text, go in.

    With them `exclude_input_in_output` and the `return_…` wishes where the model lists them;
    `text_output`, and what was wished for, comes out. Spec:
    github.com/triton-inference-server/vllm_backend.
    """

    params = PARAMS

    def __init__(self, metadata: ModelMetadata) -> None:
        super().__init__(metadata, prompt="text_input", answer="text_output")
        self._excludes_input = "exclude_input_in_output" in metadata.inputs
        self._always = self._listed(dict.fromkeys(("exclude_input_in_output", *self.wishes), True))
        self._stream = {flag: self._listed({"stream": flag}) for flag in (True, False)}

    def request(
        self, prompt: str, params: GenerationParams, *, max_tokens: int, streamed: bool
    ) -> tuple[Tensor, ...]:
        sampling = {**params.given, "max_tokens": max_tokens}
        # A plain answer of a model that can't leave out its input would begin with the prompt, a
        # streamed one does not: its parts are asked for and joined.
        stream = self._stream[streamed or not self._excludes_input]
        return (
            tensor(self._inputs["text_input"], prompt),
            tensor(self._inputs["sampling_parameters"], json.dumps(sampling, ensure_ascii=False)),
            *stream,
            *self._always,
        )
