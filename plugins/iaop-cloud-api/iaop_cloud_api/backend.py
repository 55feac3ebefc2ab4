"""The backend `cloud-api`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from iaop_cloud_api.request import request_body
from iaop_cloud_api.settings import CloudApiSettings, capabilities_of
from iaop_core import (
    BackendCapabilities,
    BackendHealth,
    GenerationParams,
    InferChunk,
    InferenceBackend,
    InferResult,
    OfflineKernel,
    as_messages,
    bridge,
    estimate_tokens,
    with_context,
)
from iaop_core.backend import Context
from iaop_core.errors import (
    BackendProtocolError,
    IaopError,
    ModelLoadError,
    ModelNotLoadedError,
)
from iaop_core.messages import Message, Params, Prompt

if TYPE_CHECKING:
    from iaop_cloud_api.endpoint import Endpoint, ModelList
    from iaop_cloud_api.reply import Answer

__all__ = ["CloudApiBackend"]

_log = logging.getLogger(__name__)

_PROBE_MS = 2_000.0
_CLOSE_S = 5.0
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class CloudApiBackend(InferenceBackend):
    """One model of an OpenAI-compatible endpoint (`POST {base_url}/chat/completions`).

    `CloudApiBackend(base_url=…)` is short for `CloudApiBackend(CloudApiSettings(base_url=…))`.
    Where aiohttp can't be imported the backend is an offline one, and says so in a warning.
    Raises `ValuesError` for wrong settings.

    Loading a model binds its name; with `verify_model` the endpoint is asked for it first.
    """

    name = "cloud-api"

    def __init__(self, settings: CloudApiSettings | None = None, **fields: Any) -> None:
        if settings is not None and fields:
            raise TypeError("give CloudApiBackend either settings or their fields, not both")
        self._settings = settings or CloudApiSettings(**fields)
        self._model = ""
        self._kernel: OfflineKernel | None = None
        endpoint = None if self._settings.offline else _endpoint(self._settings, self.name)
        if endpoint is None:
            self._kernel = OfflineKernel("cloud", backend_name=self.name)
        else:
            self._endpoint = endpoint

    def __repr__(self) -> str:
        return (
            f"<CloudApiBackend base_url={self._settings.base_url!r} loaded={bool(self._model)}"
            f" model={self._model!r}{' offline' if self._kernel else ''}>"
        )

    @property
    def capabilities(self) -> BackendCapabilities:
        return capabilities_of(self._settings, offline=self.offline)

    @property
    def offline(self) -> bool:
        """Whether the offline kernel answers in the place of the endpoint."""
        return self._kernel is not None

    def load_model(self, model_id: str = "") -> None:
        """Bind the model's name, having read the secrets and certificates. No network is used.

        With `verify_model` the endpoint must list the name. Raises `ModelLoadError` for no name or
        one that is not listed, `ValuesError` for a secret or certificate that can't be used, and
        what the endpoint's answer to `GET /models` is.
        """
        model = model_id or self._settings.model
        if not model:
            raise ModelLoadError(
                f"backend {self.name!r} has no model to load; give the setting model, or a name "
                "that the endpoint knows",
                backend=self.name,
            )
        if model == self._model:
            return
        if self._kernel is not None:
            self._kernel.load(model)
        else:
            self._endpoint.check()
            self._warn_of_clear_text()
            if self._settings.verify_model:
                bridge.run(self._endpoint.verify(model))
        self._model = model

    def unload(self) -> None:
        """Forget the model and close the connections; calls that are under way fail."""
        self._model = ""
        if self._kernel is not None:
            self._kernel.unload()
            return
        closing = bridge.submit(self._endpoint.close())
        if not bridge.on_core_loop():
            closing.result(_CLOSE_S)

    def close(self) -> None:
        self.unload()
        if self._kernel is not None:
            self._kernel.stop_server()

    def health_check(self) -> BackendHealth:
        """Ask the endpoint for its list of models, which costs nothing, for 2 s at most.

        Healthy is an endpoint that lists the loaded model or, with `model_list="absent"`, one that
        answers with neither a refusal of the credentials nor a failure.
        """
        if self._kernel is not None:
            live, ready = self._kernel.is_server_live(), self._kernel.is_model_ready()
            return _health(live, ready, loaded=bool(self._model), more=", offline=True")
        try:
            listed = bridge.run(self._probe(), _PROBE_MS / 1000 + 1)
        except Exception as error:  # whatever it is, it is a fact about health and never raised
            what = str(error) if isinstance(error, IaopError) else type(error).__name__
            return BackendHealth(healthy=False, detail=f"probe_error: {what}")
        return self._health_by(listed)

    async def _probe(self) -> ModelList:
        try:
            return await self._endpoint.models(_PROBE_MS)
        finally:
            if not self._model:  # a backend without a model keeps no connection open
                await self._endpoint.close()

    async def ainfer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        started = time.perf_counter()
        model, messages, given = self._checked(prompt, context, params)
        if self._kernel is not None:
            return self._kernel.infer(prompt, context, max_tokens=given.max_tokens)
        body = self._body(model, messages, given, stream=False)
        answer = await self._endpoint.answer(body, model=model, top_logprobs=_wanted(given))
        _check_form(answer, given, self.name)
        return self._result(model, messages, answer, started)

    async def astream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> AsyncIterator[InferChunk]:
        started = time.perf_counter()
        model, messages, given = self._checked(prompt, context, params)
        if self._kernel is not None:
            result = self._kernel.infer(prompt, context, max_tokens=given.max_tokens)
            yield InferChunk(result.text)
            yield InferChunk("", result)
            return
        body = self._body(model, messages, given, stream=True)
        first_ms = None
        items = self._endpoint.stream(body, model=model, top_logprobs=_wanted(given))
        async with aclosing(items) as stream:
            async for item in stream:
                if isinstance(item, InferChunk):
                    if first_ms is None:
                        first_ms = _elapsed_ms(started)
                    yield item
                else:
                    _check_form(item, given, self.name)
                    result = self._result(model, messages, item, started, first_ms)
                    yield InferChunk("", result, item.untold)

    def _checked(
        self, prompt: Prompt, context: Context, params: Params
    ) -> tuple[str, tuple[Message, ...], GenerationParams]:
        if not self._model:
            raise ModelNotLoadedError(
                f"backend {self.name!r} has no model loaded; call load_model() first",
                backend=self.name,
            )
        given = GenerationParams.from_input(params)
        given.require_supported(self.capabilities.params, backend=self.name)
        return self._model, with_context(as_messages(prompt), context), given

    def _body(
        self, model: str, messages: tuple[Message, ...], given: GenerationParams, *, stream: bool
    ) -> bytes:
        return request_body(
            model,
            messages,
            given,
            max_tokens=self._settings.max_tokens,
            max_tokens_field=self._settings.max_tokens_field,
            stream=stream,
            stream_usage=self._settings.stream_usage,
        )

    def _result(
        self,
        model: str,
        messages: tuple[Message, ...],
        answer: Answer,
        started: float,
        first_ms: float | None = None,
    ) -> InferResult:
        prompt_tokens, completion_tokens = answer.prompt_tokens, answer.completion_tokens
        estimated = prompt_tokens is None or completion_tokens is None
        if prompt_tokens is None:
            prompt_tokens = estimate_tokens("\n".join(turn.content for turn in messages))
        if completion_tokens is None:
            completion_tokens = estimate_tokens(answer.text)
        return InferResult(
            text=answer.text,
            backend_name=self.name,
            model_id=model,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            latency_ms=_elapsed_ms(started),
            finish_reason=answer.finish_reason or "stop",
            usage_estimated=estimated,
            time_to_first_token_ms=first_ms,
            logprobs=answer.logprobs,
        )

    def _health_by(self, listed: ModelList) -> BackendHealth:
        loaded, status = bool(self._model), listed.status
        ready, why = True, ""
        if status >= 500:
            ready, why = False, f"GET /models answers {status}"
        elif status in (401, 402, 403, 407):
            ready, why = False, f"the credentials are refused with {status}"
        elif status == 429:  # it is there, and only calls can tell more
            why = "GET /models answers 429"
        elif self._settings.model_list == "required":
            if listed.names is None:
                ready = False
                why = f"GET /models answers {status} and no list; model_list=absent allows that"
            elif loaded and self._model not in listed.names:
                ready, why = False, f"none of the {len(listed.names)} models listed is this one"
        return _health(
            status < 500, ready and loaded, loaded=loaded, more=f", {why}" if why else ""
        )

    def _warn_of_clear_text(self) -> None:
        parts = urlsplit(self._settings.base_url)
        if (
            parts.scheme == "http"
            and parts.hostname not in _LOOPBACK
            and not self._settings.on_premises
        ):
            _log.warning(
                "%s: base_url is http: prompts%s leave the site in clear text; use https, or set "
                "on_premises if the endpoint is on site",
                self.name,
                " and the key" if self._settings.api_key else "",
            )


def _wanted(given: GenerationParams) -> int | None:
    """How many alternatives of each token to tell; None: no log probabilities."""
    return (given.top_logprobs or 0) if given.logprobs else None


def _check_form(answer: Answer, given: GenerationParams, name: str) -> None:
    """Raise `BackendProtocolError` for a finished answer that was to be JSON and is none.

    Endpoints that do not know `response_format` pass over it in silence. Whether JSON keeps to its
    schema is the endpoint's word.
    """
    wanted = given.response_format
    if wanted is None or answer.finish_reason != "stop":
        return
    with suppress(ValueError, RecursionError):  # that error holds the answer
        value = json.loads(answer.text)
        if wanted.type == "json_schema" or isinstance(value, dict):
            return
    raise BackendProtocolError(
        f"backend {name!r}: the endpoint was asked for JSON (response_format) and answered "
        "something else; name the parameters that it honours in the setting params",
        backend=name,
    )


def _endpoint(settings: CloudApiSettings, name: str) -> Endpoint | None:
    try:
        from iaop_cloud_api.endpoint import Endpoint
    except ImportError as error:
        _log.warning(
            "%s answers OFFLINE, without any model: aiohttp can't be imported (%s); "
            "pip install 'aiohttp>=3.12,<4'",
            name,
            error,
        )
        return None
    return Endpoint(settings, backend=name)


def _health(live: bool, ready: bool, *, loaded: bool, more: str = "") -> BackendHealth:
    detail = f"server_live={live}, model_ready={ready}, loaded={loaded}{more}"
    return BackendHealth(healthy=live and ready and loaded, detail=detail)


def _elapsed_ms(started: float) -> float:
    return (time.perf_counter() - started) * 1000
