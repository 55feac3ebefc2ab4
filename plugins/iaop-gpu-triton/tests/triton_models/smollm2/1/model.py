"""SmolLM2-135M-Instruct on ONNX Runtime, with the vLLM backend's tensors.

A real language model of the smallest kind, so that real text comes through a real server. A prompt
that holds no chat markup is taken as one user turn, as a front with a chat template does.
"""

import os
import sys
import threading

# The stub ignores PYTHONPATH, and numpy 2 kills it at the first BYTES tensor.
sys.path[:0] = os.environ["IAOP_TRITON_MODEL_PATH"].split(os.pathsep)

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from llm_tensors import FINAL, NOT_ENDED, VllmRequest, error_response  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

FOLDER = os.environ["IAOP_TRITON_SMOLLM2"]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CONTEXT_TOKENS = 8192
EOS = 2
HONOURED = {
    *("max_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self.session = onnxruntime.InferenceSession(f"{FOLDER}/model.onnx", options)
        self.tokenizer = Tokenizer.from_file(f"{FOLDER}/tokenizer.json")
        inputs = {entry.name: entry.shape for entry in self.session.get_inputs()}
        self.empty_cache = {
            name: np.zeros((1, shape[1], 0, shape[3]), dtype=np.float32)
            for name, shape in inputs.items()
            if name.startswith("past_key_values.")
        }
        self.outputs = [entry.name for entry in self.session.get_outputs()]

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        try:
            self.generate(VllmRequest(request), sender)
        except Exception as error:
            sender.send(error_response(str(error)), flags=FINAL)

    def generate(self, asked, sender):
        if refused := asked.sampling.keys() - HONOURED:
            raise ValueError(f"this model can't honour {', '.join(sorted(refused))}")
        text = asked.prompt if "<|im_start|>" in asked.prompt else TEMPLATE % asked.prompt
        prompt_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(prompt_ids) >= CONTEXT_TOKENS:
            raise ValueError(
                f"The decoder prompt (length {len(prompt_ids)}) is longer than the maximum model "
                f"length of {CONTEXT_TOKENS}."
            )
        stops = asked.sampling.get("stop") or []
        held = max(map(len, stops), default=1) - 1  # of the text that could begin a stop
        sent = asked.prompt if asked.repeats_input else ""
        answer = sent
        sent_length = unsent_tokens = 0
        ids = []
        reason = "length"
        for token in self.tokens(prompt_ids, asked):
            if sender.is_cancelled():
                reason = "abort"
                break
            unsent_tokens += 1
            if token == EOS:
                reason = "stop"
                break
            ids.append(token)
            answer = sent + self.tokenizer.decode(ids).rstrip("\ufffd")
            found = [at for stop in stops if (at := answer.find(stop, len(sent))) >= 0]
            if found:
                answer, reason = answer[: min(found)], "stop"
                break
            ready = len(answer) - held
            if asked.streaming and ready > sent_length:
                delta = answer[sent_length:ready]
                sender.send(self.response(asked, delta, NOT_ENDED, prompt_ids, unsent_tokens))
                sent_length, unsent_tokens = ready, 0
        rest = answer[sent_length:]
        sender.send(self.response(asked, rest, reason, prompt_ids, unsent_tokens), flags=FINAL)

    def response(self, asked, text, reason, prompt_ids, new_tokens):
        return asked.response(
            text, finish_reason=reason, prompt_tokens=len(prompt_ids), new_tokens=new_tokens
        )

    def tokens(self, prompt_ids, asked):
        chooser = Chooser(asked.sampling, prompt_ids)
        cache, ids, length = self.empty_cache, prompt_ids, 0
        for _ in range(min(asked.max_tokens, CONTEXT_TOKENS - len(prompt_ids))):
            length += len(ids)
            feed = {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones((1, length), dtype=np.int64),
                **cache,
            }
            values = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
            cache = {
                name: values[name.replace("past_key_values", "present")]
                for name in self.empty_cache
            }
            token = chooser.choose(values["logits"][0, -1])
            yield token
            ids = [token]


class Chooser:
    """The next token from its logits: greedy at temperature 0, else drawn; vLLM's default is 1."""

    def __init__(self, sampling, prompt_ids):
        self.sampling = sampling
        self.draw = np.random.default_rng(sampling.get("seed"))
        self.seen = set(prompt_ids)
        self.made = {}

    def choose(self, logits):
        logits = self.penalized(logits)
        token = self.chosen(logits)
        self.seen.add(token)
        self.made[token] = self.made.get(token, 0) + 1
        return token

    def penalized(self, logits):
        logits, get = logits.copy(), self.sampling.get
        if repetition := get("repetition_penalty"):
            seen = list(self.seen)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / repetition, values * repetition)
        for token, count in self.made.items():
            logits[token] -= get("presence_penalty", 0) + count * get("frequency_penalty", 0)
        return logits

    def chosen(self, logits):
        get = self.sampling.get
        temperature = get("temperature", 1.0)
        if not temperature:
            return int(np.argmax(logits))
        order = np.argsort(-logits)[: get("top_k")]
        weights = np.exp((logits[order] - logits[order[0]]) / temperature)
        weights /= weights.sum()
        inside = np.cumsum(weights) - weights < get("top_p", 1.0)
        inside &= weights >= weights[0] * get("min_p", 0)
        return int(self.draw.choice(order[inside], p=weights[inside] / weights[inside].sum()))
