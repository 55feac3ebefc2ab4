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

    def request(
        self, prompt: str, params: GenerationParams, *, max_tokens: int, streamed: bool
    ) -> tuple[Tensor, ...]:
        excludes_input = "exclude_input_in_output" in self._inputs
        sampling = {**params.given, "max_tokens": max_tokens}
        values: dict[str, object] = {
            "text_input": prompt,
            # A plain answer of a model that can't leave out its input would begin with the prompt,
            # a streamed one does not: its parts are asked for and joined.
            "stream": streamed or not excludes_input,
            "sampling_parameters": json.dumps(sampling, ensure_ascii=False),
            "exclude_input_in_output": True,
            **dict.fromkeys(self.wishes, True),
        }
        inputs = self._inputs
        return tuple(tensor(inputs[name], values[name]) for name in values if name in inputs)
