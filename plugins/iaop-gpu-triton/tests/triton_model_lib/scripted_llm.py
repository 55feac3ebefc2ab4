"""A language model whose answer is written in its prompt, with the vLLM backend's tensors.

It runs inside Triton's Python backend. A prompt without a script is answered by its own words, one
token each. A script is a JSON object between ``[[`` and ``]]`` anywhere in the prompt; its keys are
the fields of ``Script``. What a request sent and what became of it stays in memory under the
script's ``tag``; the prompt ``[[{"report": "TAG"}]]`` answers with that record as JSON.
"""

import json
import re
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SCRIPT = re.compile(r"\[\[(\{.*\})\]\]", re.DOTALL)
NO_FINISH = "None"
CANCEL_POLL_S = 0.02
UNENDED_S = 20.0


class Script:
    """What the prompt asks of the model; class attributes are the defaults."""

    tag = ""  # key of this request's record
    report = ""  # answer with the record of this tag
    tokens = None  # texts to send, default: the prompt's words
    repeat = 1  # each token's text that many times over
    first_delay_s = 0.0  # before the first token
    delay_s = 0.0  # before each further token
    fail_after = None  # an error after that many tokens
    error_text = "scripted failure"
    end_after_error = True  # send the final flag with the error
    end = "flag_on_last"  # or "empty_final", or "never": no final flag for UNENDED_S
    split_bytes = 0  # send the text in pieces of that many bytes
    raw_hex = ""  # send these bytes instead of the tokens
    omit_output = False  # leave text_output out of the responses

    def __init__(self, prompt):
        found = SCRIPT.search(prompt)
        values = json.loads(found[1]) if found else {}
        for key, value in values.items():
            if not hasattr(Script, key):
                raise ValueError(f"the script has no field {key!r}")
            setattr(self, key, value)
        if self.tokens is None:
            self.tokens = re.findall(r"\S+\s*", prompt)
        self.tokens = [token * self.repeat for token in self.tokens]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.outputs = {output["name"] for output in config["output"]}
        self.records = {}

    def execute(self, requests):
        if not self.decoupled:
            return [self.answer_once(request) for request in requests]
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()
        return None

    def answer_once(self, request):
        try:
            job = Job(self, request, sender=None)
            return job.response("".join(job.texts), job.finish_reason, len(job.texts))
        except Exception as error:
            return error_response(str(error))

    def answer(self, request):
        sender = request.get_response_sender()
        try:
            Job(self, request, sender).run()
        except Exception as error:
            sender.send(error_response(str(error)), flags=FINAL)


class Job:
    """One request: what it asked for, and sending the answer."""

    def __init__(self, model, request, sender):
        self.model, self.sender = model, sender
        tensors = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
        self.prompt = tensors["text_input"][0].decode()
        self.streaming = bool(flag(tensors, "stream", False))
        self.excludes_input = flag(tensors, "exclude_input_in_output", None)
        self.returns_input_count = flag(tensors, "return_num_input_tokens", False)
        self.returns_output_count = flag(tensors, "return_num_output_tokens", False)
        self.returns_finish_reason = flag(tensors, "return_finish_reason", False)
        sampling_text = tensors.get("sampling_parameters", [b"{}"])[0].decode()
        sampling = json.loads(sampling_text)
        if self.streaming and self.excludes_input is not None and not self.excludes_input:
            raise ValueError("a stream cannot repeat its input")
        self.script = Script(self.prompt)
        limit = sampling.get("max_tokens", 16)  # vLLM's own default
        self.texts = self.script.tokens[:limit]
        self.finish_reason = "length" if len(self.script.tokens) > limit else "stop"
        self.record = {
            "tensors": sorted(tensors),
            "sampling_parameters": sampling_text,
            "stream": self.streaming,
            "sent": 0,
            "outcome": "running",
        }
        if self.script.report:
            self.texts = [json.dumps(model.records.get(self.script.report, {}))]
        if self.script.tag:
            model.records[self.script.tag] = self.record

    def run(self):
        try:
            self.send_all()
        except ClientLeftError:
            self.record["outcome"] = "cancelled"
            self.sender.send(flags=FINAL)

    def send_all(self):
        script, sent_tokens = self.script, 0
        parts = self.parts()
        for number, (part, tokens, is_last) in enumerate(parts):
            self.wait(script.first_delay_s if number == 0 else script.delay_s)
            if script.fail_after is not None and sent_tokens >= script.fail_after:
                break
            ends_here = is_last and script.fail_after is None and script.end == "flag_on_last"
            reason = self.finish_reason if is_last and script.fail_after is None else NO_FINISH
            response = self.response(part, reason, tokens)
            self.sender.send(response, flags=FINAL if ends_here else 0)
            sent_tokens += tokens
            self.record["sent"] = sent_tokens
        if script.fail_after is not None:
            self.fail()
            return
        self.record["outcome"] = "finished"
        if script.end == "never":
            self.wait(UNENDED_S)
        if script.end != "flag_on_last" or not parts:
            self.sender.send(flags=FINAL)

    def parts(self):
        """The pieces to send as (bytes, tokens in it, is the last)."""
        if self.script.raw_hex:
            return [(bytes.fromhex(self.script.raw_hex), 1, True)]
        pieces = [(text.encode(), 1) for text in self.texts]
        if not self.streaming:
            whole = b"".join(piece for piece, _ in pieces)
            if not self.excludes_input:
                whole = self.prompt.encode() + whole
            pieces = [(whole, len(pieces))]
        if self.script.split_bytes:
            size, whole = self.script.split_bytes, b"".join(piece for piece, _ in pieces)
            pieces = [(whole[at : at + size], 1) for at in range(0, len(whole), size)]
        return [(*piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]

    def response(self, text, finish_reason, token_count):
        values = {}
        if not self.script.omit_output:
            data = text if isinstance(text, bytes) else text.encode()
            values["text_output"] = np.array([data], dtype=object)
        if self.returns_input_count:
            count = len(self.prompt.split())
            values["num_input_tokens"] = np.array([count], dtype=np.uint32)
        if self.returns_output_count:
            values["num_output_tokens"] = np.array([token_count], dtype=np.uint32)
        if self.returns_finish_reason:
            values["finish_reason"] = np.array([finish_reason.encode()], dtype=object)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, v) for name, v in values.items() if name in self.model.outputs]
        )

    def fail(self):
        self.record["outcome"] = "failed"
        if self.script.end_after_error:
            self.sender.send(error_response(self.script.error_text), flags=FINAL)
        else:
            self.sender.send(error_response(self.script.error_text))
            self.wait(UNENDED_S)
            self.sender.send(flags=FINAL)

    def wait(self, seconds):
        until = time.monotonic() + seconds
        while True:
            if self.sender.is_cancelled():
                raise ClientLeftError
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, CANCEL_POLL_S))


class ClientLeftError(Exception):
    """The request was cancelled."""


def flag(tensors, name, default):
    return tensors[name][0] if name in tensors else default


def error_response(message):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("text_output", np.array([b"N/A"], dtype=object))],
        error=pb_utils.TritonError(message),
    )
