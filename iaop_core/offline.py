"""A stand-in for an engine that touches nothing outside the process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from iaop_core.errors import ModelNotLoadedError
from iaop_core.messages import (
    DEFAULT_MAX_TOKENS,
    InferResult,
    Prompt,
    as_messages,
    estimate_tokens,
)

__all__ = ["OfflineKernel"]

_SOURCES_SHOWN = 3


class OfflineKernel:
    """A deterministic kernel with the life of a real one: server, model, inference.

    `tag` is the word that marks the answers, the backend's own: `gpu`, `onnx`, `cloud`.
    """

    def __init__(self, tag: str, *, backend_name: str = "") -> None:
        self._tag = tag
        self._backend_name = backend_name or tag
        self._live = False
        self._model: str | None = None

    def __repr__(self) -> str:
        return f"<OfflineKernel {self._tag} live={self._live} model={self._model!r}>"

    def start_server(self) -> None:
        self._live = True

    def stop_server(self) -> None:
        self._live = False
        self._model = None

    def load(self, model_id: str) -> None:
        """Load the model; starts the server when it is not live."""
        self.start_server()
        self._model = model_id

    def unload(self) -> None:
        self._model = None

    def is_server_live(self) -> bool:
        return self._live

    def is_model_ready(self, model_id: str | None = None) -> bool:
        """Whether that model (any, without an id) is loaded and the server is live."""
        return self._live and self._model is not None and model_id in (None, self._model)

    def infer(
        self,
        prompt: Prompt,
        context: Sequence[str] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> InferResult:
        """Answer `[TAG:MODEL] PROMPT` and a line `[来源: SOURCE]` for each of three sources.

        The prompt (of a chat: its last message) is cut to `max_tokens` characters, 256 by default,
        which then is the finish reason `length`. Tokens are `estimate_tokens` of the texts.
        Raises `ModelNotLoadedError` before `load`.
        """
        started = time.perf_counter()
        if not self.is_model_ready():
            raise ModelNotLoadedError(
                f"backend {self._backend_name!r} has no model loaded; call load_model() first",
                backend=self._backend_name,
            )
        asked = as_messages(prompt)[-1].content
        shown = asked[: DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens]
        lines = [f"[{self._tag}:{self._model}] {shown}"]
        lines += [f"[来源: {source}]" for source in (context or ())[:_SOURCES_SHOWN]]
        text = "\n".join(lines)
        latency_ms = (time.perf_counter() - started) * 1000
        return InferResult(
            text=text,
            backend_name=self._backend_name,
            model_id=self._model or "",
            prompt_tokens=estimate_tokens(asked),
            completion_tokens=estimate_tokens(text),
            latency_ms=latency_ms,
            finish_reason="length" if len(shown) < len(asked) else "stop",
            usage_estimated=True,
            offline=True,
            time_to_first_token_ms=latency_ms,
        )
