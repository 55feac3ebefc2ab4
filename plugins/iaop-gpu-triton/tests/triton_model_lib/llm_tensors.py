"""The tensors of the three kinds of language model, as a Python model reads and writes them.

Each class is one kind's request: `prompt`, `max_tokens`, `streaming`, `repeats_input` and what was
sent, read from its tensors; `response` makes the kind's response.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
NOT_ENDED = "None"


class Request:
    """What all kinds share; a kind says what its tensors are called."""

    stream = "stream"
    excludes_input = "exclude_input_in_output"
    max_tokens_tensor = "max_tokens"
    count_type = np.int32
    answer = "text_output"
    batched = False

    def __init__(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self.shapes = {name: list(array.shape) for name, array in tensors.items()}
        self.sent = {name: array.ravel().tolist() for name, array in tensors.items()}
        self.sent = {name: [plain(v) for v in values] for name, values in self.sent.items()}
        self.prompt = self.sent[self.prompt_tensor()][0]
        self.streaming = bool(self.first(self.stream, False))
        self.max_tokens = self.read_max_tokens()
        excludes = self.first(self.excludes_input, None)
        self.repeats_input = not excludes
        self.check(excludes)
        self._wished = {
            name.removeprefix("return_")
            for name, wish in self.sent.items()
            if name.startswith("return_") and wish[0]
        }

    def first(self, name, default):
        return self.sent.get(name, [default])[0]

    def prompt_tensor(self):
        return "text_input"

    def read_max_tokens(self):
        return self.sent[self.max_tokens_tensor][0]

    def check(self, excludes):
        """Refuse what the kind refuses."""

    def response(self, text, *, finish_reason, prompt_tokens, new_tokens):
        """A response of the model; without a text (None) it breaks the contract."""
        values = {
            "num_input_tokens": np.array([prompt_tokens], dtype=self.count_type),
            "num_output_tokens": np.array([new_tokens], dtype=self.count_type),
            "finish_reason": np.array([finish_reason.encode()], dtype=object),
        }
        values = {name: value for name, value in values.items() if name in self._wished}
        if text is not None:
            data = text if isinstance(text, bytes) else text.encode()
            values[self.answer] = np.array([data], dtype=object)
        if self.batched:
            values = {name: value.reshape(1, 1) for name, value in values.items()}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in values.items()])


class VllmRequest(Request):
    """Triton's vLLM backend: all parameters in one JSON text."""

    count_type = np.uint32

    def read_max_tokens(self):
        self.sampling = json.loads(self.first("sampling_parameters", "{}"))
        return self.sampling.get("max_tokens", 16)  # vLLM's own default

    def check(self, excludes):
        if self.streaming and excludes is not None and not excludes:
            raise ValueError("a stream cannot repeat its input")
        self.repeats_input = not self.streaming and not excludes


class EnsembleRequest(Request):
    """A TensorRT-LLM ensemble or BLS model: batched, a tensor for each parameter."""

    batched = True


class LlmApiRequest(Request):
    """TensorRT-LLM's LLM API."""

    stream = "streaming"
    excludes_input = "sampling_param_exclude_input_from_output"
    max_tokens_tensor = "sampling_param_max_tokens"

    def check(self, excludes):
        if self.first("stop", False):
            raise ValueError("the tensor stop cancels a request and was set")


class OddRequest(Request):
    """A text model of nobody else's kind, which repeats its prompt."""

    max_tokens_tensor = "LIMIT"
    answer = "COMPLETION"

    def prompt_tensor(self):
        return "PROMPT"

    def read_max_tokens(self):
        return self.first("LIMIT", 256)


def plain(value):
    return value.decode() if isinstance(value, bytes) else value


def error_response(message):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("text_output", np.array([b"N/A"], dtype=object))],
        error=pb_utils.TritonError(message),
    )
