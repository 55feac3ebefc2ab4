"""The tensors of Triton's vLLM backend, as a Python model reads and writes them."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
NOT_ENDED = "None"


class VllmRequest:
    """What one request asks for."""

    def __init__(self, request):
        tensors = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
        self.names = sorted(tensors)
        self.prompt = tensors["text_input"][0].decode()
        self.sampling_text = tensors.get("sampling_parameters", [b"{}"])[0].decode()
        self.sampling = json.loads(self.sampling_text)
        self.max_tokens = self.sampling.get("max_tokens", 16)  # vLLM's own default
        self.streaming = bool(tensors.get("stream", [False])[0])
        excludes_input = tensors.get("exclude_input_in_output", [None])[0]
        if self.streaming and excludes_input is not None and not excludes_input:
            raise ValueError("a stream cannot repeat its input")
        self.repeats_input = not self.streaming and not excludes_input
        self._wished = {
            name.removeprefix("return_")
            for name, wish in tensors.items()
            if name.startswith("return_") and wish[0]
        }

    def response(self, text, *, finish_reason, prompt_tokens, new_tokens):
        """A response of the model; without a text (None) it breaks the contract."""
        values = {
            "num_input_tokens": np.array([prompt_tokens], dtype=np.uint32),
            "num_output_tokens": np.array([new_tokens], dtype=np.uint32),
            "finish_reason": np.array([finish_reason.encode()], dtype=object),
        }
        values = {name: value for name, value in values.items() if name in self._wished}
        if text is not None:
            data = text if isinstance(text, bytes) else text.encode()
            values["text_output"] = np.array([data], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in values.items()])


def error_response(message):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("text_output", np.array([b"N/A"], dtype=object))],
        error=pb_utils.TritonError(message),
    )
