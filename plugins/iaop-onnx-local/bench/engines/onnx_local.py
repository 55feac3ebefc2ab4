"""This plugin's backend, used as an application uses it: chat messages in, a stream out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from protocol import Answer, Clock, Request, run_clients, serve

from iaop_onnx_local import OnnxLocalBackend


class OnnxLocal:
    def load(self, *, model: str, threads: int, end_ids: list[int]) -> dict[str, Any]:
        self._backend = OnnxLocalBackend(device="cpu", threads=threads)
        self._backend.load_model(model)
        # An answer goes on to its whole length, whatever the model would say.
        self._bias = dict.fromkeys(end_ids, -100)
        return {name: version(name) for name in ("iaop-onnx-local", "onnxruntime", "numpy")}

    def run(self, requests: list[Request]) -> list[Answer]:
        return run_clients(requests, self._answer)

    def join(self, running: list[Request], newcomer: Request, after: int) -> dict[str, Any]:
        """Sends the newcomer when each running answer has `after` pieces.

        Returns:
            The newcomer's answer, and when the pieces of the running ones came until it was
            `sent`. The running answers are cancelled after it.
        """
        clock, ready, enough = Clock(), threading.Semaphore(0), threading.Event()

        def run(request: Request) -> list[float]:
            pieces: list[float] = []
            stream = self._stream(request)
            for chunk in stream:
                if enough.is_set():
                    break
                if chunk.delta:
                    pieces.append(clock())
                    if len(pieces) == after:
                        ready.release()
            stream.close()
            return pieces

        with ThreadPoolExecutor(len(running)) as pool:
            futures = [pool.submit(run, request) for request in running]
            try:
                for _ in running:
                    if not ready.acquire(timeout=120):
                        raise TimeoutError("the running answers did not come so far")
                sent = clock()
                (answer,) = self.run([newcomer])
            finally:
                enough.set()
            return {"newcomer": answer, "running": [f.result() for f in futures], "sent": sent}

    def _stream(self, request: Request) -> Any:
        return self._backend.stream(
            request["messages"],
            params={
                "max_tokens": request["new_tokens"],
                "temperature": 0,
                "logit_bias": self._bias,
            },
        )

    def _answer(self, request: Request, clock: Clock, piece: Callable[[], None]) -> Answer:
        submitted, result = clock(), None
        for chunk in self._stream(request):
            if chunk.delta:
                piece()
            result = chunk.result or result
        assert result is not None
        return {
            # The first tokens may add no text yet: then the engine's own time is the earlier one.
            "first": submitted + result.time_to_first_token_ms / 1000,
            "count": result.completion_tokens,
            "prompt_tokens": result.prompt_tokens,
            "text": result.text,
        }


if __name__ == "__main__":
    serve(OnnxLocal())
