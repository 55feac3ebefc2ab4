"""onnxruntime-genai: its generator, started anew for each batch of what has arrived by then."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai
from protocol import Answer, Clock, Request, serve

_MAX_BATCH = 8


class Genai:
    def load(self, *, model: str, threads: int, end_ids: list[int]) -> dict[str, Any]:
        config = onnxruntime_genai.Config(model)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self._pad_id = end_ids[0]
        return {n: version(n) for n in ("onnxruntime-genai", "onnxruntime", "numpy")}

    def run(self, requests: list[Request]) -> list[Answer]:
        clock = Clock()
        waiting = sorted(range(len(requests)), key=lambda n: requests[n]["arrives_s"])
        answers: dict[int, Answer] = {}
        while waiting:
            clock.wait_until(requests[waiting[0]]["arrives_s"])
            now = clock()
            batch = [n for n in waiting[:_MAX_BATCH] if requests[n]["arrives_s"] <= now]
            waiting = waiting[len(batch) :]
            made = self._run_batch([requests[n] for n in batch], clock)
            answers.update(zip(batch, made, strict=True))
        return [answers[n] for n in range(len(requests))]

    def _run_batch(self, requests: list[Request], clock: Clock) -> list[Answer]:
        longest = max(len(request["ids"]) for request in requests)
        steps = max(request["new_tokens"] for request in requests)
        # Shorter prompts are padded on the right, as the library's own tokenizer does it.
        ids = np.full((len(requests), longest), self._pad_id, np.int32)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request["ids"])] = request["ids"]
        began, pieces, chosen = clock(), [], []
        params = onnxruntime_genai.GeneratorParams(self._model)
        total = longest + steps
        # The smallest length is the largest: the end of text is never chosen.
        params.set_search_options(
            do_sample=False, batch_size=len(requests), max_length=total, min_length=total
        )
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens(ids)
        while len(pieces) < steps:
            generator.generate_next_token()
            chosen.append(generator.get_next_tokens().tolist())
            pieces.append(clock())
        return [
            {
                "submitted": request["arrives_s"],
                "began": began,
                "pieces": pieces[: request["new_tokens"]],
                "first": pieces[0],
                "ended": pieces[request["new_tokens"] - 1],
                "count": request["new_tokens"],
                "prompt_tokens": len(request["ids"]),
                "ids": [step[row] for step in chosen[: request["new_tokens"]]],
            }
            for row, request in enumerate(requests)
        ]


if __name__ == "__main__":
    serve(Genai())
