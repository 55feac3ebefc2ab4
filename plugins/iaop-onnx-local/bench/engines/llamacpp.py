"""llama.cpp through `xllamacpp`, its server in this process: continuous batching in its slots."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import xllamacpp
from protocol import Answer, Clock, Request, run_clients, serve


class LlamaCpp:
    def load(self, *, model: str, threads: int, slots: int) -> dict[str, Any]:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel, params.n_ctx = slots, slots * 1024
        params.cache_prompt, params.cache_ram_mib = False, 0  # each prompt is read whole
        self._server = xllamacpp.Server(params)
        return {"xllamacpp": version("xllamacpp")}

    def run(self, requests: list[Request]) -> list[Answer]:
        return run_clients(requests, self._answer)

    def _answer(self, request: Request, clock: Clock, piece: Callable[[], None]) -> Answer:
        texts: list[str] = []
        usage: dict[str, Any] = {}

        def receive(event: dict[str, Any]) -> None:
            texts.append(event["choices"][0]["text"])
            usage.update(event.get("usage", {}))
            if texts[-1]:
                piece()

        self._server.handle_completions(
            {
                "prompt": request["ids"],
                "n_predict": request["new_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            },
            receive,
        )
        read_before = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "count": usage["completion_tokens"],
            "prompt_tokens": usage["prompt_tokens"] - read_before,
            "text": "".join(texts),
        }


if __name__ == "__main__":
    serve(LlamaCpp())
