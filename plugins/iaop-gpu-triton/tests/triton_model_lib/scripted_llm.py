"""A language model whose answer is written in its prompt.

It runs inside Triton's Python backend. A prompt without a script is answered by its own words, one
token each. A script is a JSON object between ``[[`` and ``]]`` anywhere in the prompt; its keys are
the fields of ``Script``. What a request sent and what became of it stays in memory under the
script's ``tag``; the prompt ``[[{"report": "TAG"}]]`` answers with that record as JSON.
"""

import json
import re
import threading
import time

from llm_tensors import (
    FINAL,
    NOT_ENDED,
    EnsembleRequest,
    LlmApiRequest,
    OddRequest,
    VllmRequest,
    error_response,
)

SCRIPT = re.compile(r"\[\[(\{.*\})\]\]", re.DOTALL)
CANCEL_POLL_S = 0.02
UNENDED_S = 20.0


class Script:
    """What the prompt asks of the model; class attributes are the defaults."""

    tag = ""  # key of this request's record
    report = ""  # answer with the record of this tag
    about_model = False  # answer with the model's version and its parameter `greeting`
    tokens = None  # texts to send, default: the prompt's words
    repeat = 1  # each token's text that many times over
    first_delay_s = 0.0  # before the first token
    delay_s = 0.0  # before each further token
    fail_after = None  # an error after that many tokens
    error_text = "scripted failure"  # or its words as a list, so that the prompt has no such text
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
            self.tokens = re.findall(r"\s*\S+\s*", prompt)
        self.tokens = [token * self.repeat for token in self.tokens]
        if isinstance(self.error_text, list):
            self.error_text = " ".join(self.error_text)


REQUESTS = {
    "sampling_parameters": VllmRequest,
    "max_tokens": EnsembleRequest,
    "sampling_param_max_tokens": LlmApiRequest,
    "PROMPT": OddRequest,
}


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        inputs = {tensor["name"] for tensor in config["input"]}
        self.request_class = next(kind for name, kind in REQUESTS.items() if name in inputs)
        self.version = args["model_version"]
        self.greeting = config.get("parameters", {}).get("greeting", {}).get("string_value", "")
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
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
            return job.answer_once()
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
        self.sender = sender
        self.asked = model.request_class(request)
        self.script = Script(self.asked.prompt)
        tokens, limit = self.script.tokens, self.asked.max_tokens
        self.texts = tokens[:limit]
        self.finish_reason = "length" if len(tokens) > limit else "stop"
        if self.script.about_model:
            self.texts = [f"{model.version} {model.greeting}"]
        if self.script.report:
            self.texts = [json.dumps(model.records.get(self.script.report, {}))]
        self.record = {
            "sent_values": self.asked.sent,
            "shapes": self.asked.shapes,
            "stream": self.asked.streaming,
            "sent": 0,
            "outcome": "running",
            "runs": model.records.get(self.script.tag, {}).get("runs", 0) + 1,
        }
        if self.script.tag:
            model.records[self.script.tag] = self.record

    def answer_once(self):
        script, asked = self.script, self.asked
        time.sleep(script.first_delay_s)
        if script.fail_after is not None:
            return error_response(script.error_text)
        before = asked.prompt if asked.repeats_input else ""
        data = before.encode() + b"".join(text.encode() for text in self.texts)
        if script.raw_hex:
            data = bytes.fromhex(script.raw_hex)
        return self.response(data, self.finish_reason, len(self.texts))

    def run(self):
        try:
            self.send_all()
        except ClientLeftError:
            self.record["outcome"] = "cancelled"
            self.sender.send(flags=FINAL)

    def send_all(self):
        script, sent_tokens = self.script, 0
        fails = script.fail_after is not None
        parts = self.parts()
        for number, (part, tokens) in enumerate(parts):
            self.wait(script.delay_s if number else script.first_delay_s)
            if fails and sent_tokens >= script.fail_after:
                break
            is_end = number == len(parts) - 1 and not fails
            response = self.response(part, self.finish_reason if is_end else NOT_ENDED, tokens)
            has_flag = is_end and script.end == "flag_on_last"
            self.sender.send(response, flags=FINAL if has_flag else 0)
            sent_tokens += tokens
            self.record["sent"] = sent_tokens
        if fails:
            self.fail()
            return
        self.record["outcome"] = "finished"
        if script.end == "never":
            self.wait(UNENDED_S)
        if script.end != "flag_on_last" or not parts:
            self.sender.send(flags=FINAL)

    def parts(self):
        """The pieces to send, with the tokens in each."""
        if self.script.raw_hex:
            return [(bytes.fromhex(self.script.raw_hex), 1)]
        pieces = [(text.encode(), 1) for text in self.texts]
        if self.asked.repeats_input:
            pieces.insert(0, (self.asked.prompt.encode(), 0))
        if not self.asked.streaming:
            pieces = [(b"".join(piece for piece, _ in pieces), len(self.texts))]
        if self.script.split_bytes:
            size, whole = self.script.split_bytes, b"".join(piece for piece, _ in pieces)
            pieces = [(whole[at : at + size], 1) for at in range(0, len(whole), size)]
        return pieces

    def response(self, text, finish_reason, new_tokens):
        return self.asked.response(
            None if self.script.omit_output else text,
            finish_reason=finish_reason,
            prompt_tokens=len(self.asked.prompt.split()),
            new_tokens=new_tokens,
        )

    def fail(self):
        self.record["outcome"] = "failed"
        ends = self.script.end_after_error
        self.sender.send(error_response(self.script.error_text), flags=FINAL if ends else 0)
        if not ends:
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
