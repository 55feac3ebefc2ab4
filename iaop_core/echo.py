"""The built-in backend `echo`: answers with the prompt, for trying things out."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from attrs import field, frozen, validators

from iaop_core.backend import Context, InferenceBackend
from iaop_core.capabilities import BackendCapabilities, BackendHealth
from iaop_core.hookspecs import BackendSpec, hookimpl
from iaop_core.messages import (
    DEFAULT_MAX_TOKENS,
    GenerationParams,
    InferChunk,
    InferResult,
    Params,
    Prompt,
    as_messages,
    with_context,
)

__all__ = ["EchoBackend", "EchoSettings"]

# A word with the space after it is one token of this backend; it counts them exactly.
_TOKEN = re.compile(r"\s*\S+\s*|\s+")


@frozen(kw_only=True)
class EchoSettings:
    """Settings of `echo`."""

    delay_ms: float = field(default=0.0, validator=validators.ge(0))
    """How long each token takes."""
    max_concurrency: int = field(default=64, validator=validators.ge(1))


class EchoBackend(InferenceBackend):
    """Says the last message again, word for word. Unlike the others it loads itself when asked."""

    name = "echo"

    def __init__(self, settings: EchoSettings | None = None) -> None:
        self._settings = settings or EchoSettings()
        self._model = ""

    def __repr__(self) -> str:
        return f"<EchoBackend loaded={bool(self._model)}>"

    @property
    def capabilities(self) -> BackendCapabilities:
        return _capabilities(self._settings)

    def load_model(self, model_id: str = "") -> None:
        self._model = model_id or "echo"

    def unload(self) -> None:
        self._model = ""

    def health_check(self) -> BackendHealth:
        return BackendHealth(healthy=True, detail=f"loaded={bool(self._model)}")

    def stream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> Iterator[InferChunk]:
        started = time.perf_counter()
        params = GenerationParams.from_input(params)
        params.require_supported(self.capabilities.params, backend=self.name)
        messages = as_messages(prompt)
        if not self._model:
            self.load_model()
        limit = params.max_tokens or DEFAULT_MAX_TOKENS
        tokens = _TOKEN.findall(messages[-1].content)
        first_ms = None
        for token in tokens[:limit]:
            if self._settings.delay_ms:
                time.sleep(self._settings.delay_ms / 1000)
            first_ms = first_ms or _elapsed_ms(started)
            yield InferChunk(token)
        yield InferChunk(
            "",
            InferResult(
                text="".join(tokens[:limit]),
                backend_name=self.name,
                model_id=self._model,
                prompt_tokens=sum(
                    len(_TOKEN.findall(message.content))
                    for message in with_context(messages, context)
                ),
                completion_tokens=min(len(tokens), limit),
                latency_ms=_elapsed_ms(started),
                finish_reason="length" if len(tokens) > limit else "stop",
                device="cpu",
                time_to_first_token_ms=first_ms,
            ),
        )


def _elapsed_ms(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _capabilities(settings: EchoSettings) -> BackendCapabilities:
    return BackendCapabilities(
        streaming=True,
        max_concurrency=settings.max_concurrency,
        on_premises=True,
        device="cpu",
    )


@hookimpl
def iaop_backends() -> Sequence[BackendSpec]:
    return [
        BackendSpec(
            name="echo",
            summary="Answers with the prompt; built in, for trying things out",
            api_version="1.0",
            capabilities=_capabilities(EchoSettings()),
            settings_class=EchoSettings,
            factory=EchoBackend,
        )
    ]
