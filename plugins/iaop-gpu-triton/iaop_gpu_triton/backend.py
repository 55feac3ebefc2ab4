"""`GpuTritonBackend`: language models on NVIDIA Triton Inference Server."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from attrs import asdict, evolve

from iaop_core import (
    BackendCapabilities,
    BackendHealth,
    GenerationParams,
    InferChunk,
    InferenceBackend,
    InferResult,
    OfflineKernel,
    bridge,
)
from iaop_core.backend import Context
from iaop_core.chat_template import ChatTemplate, ChatTemplateError
from iaop_core.errors import BackendUnavailableError, ModelLoadError, ValuesError
from iaop_core.messages import Params, Prompt, as_messages, with_context
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.call import Call, Question, time_limits
from iaop_gpu_triton.credentials import Credentials
from iaop_gpu_triton.progress import Progress
from iaop_gpu_triton.prompt import PromptLayout
from iaop_gpu_triton.replica import Replica, ReplicaState, TransportFactory, not_loaded
from iaop_gpu_triton.replicas import Replicas
from iaop_gpu_triton.settings import NAME, PARAMS, GpuTritonSettings

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 6.0


class GpuTritonBackend(InferenceBackend):
    """Runs a language model on one Triton server or several, over gRPC or HTTP.

    The arguments are the fields of `GpuTritonSettings`, which says what each means; `settings` are
    those that are not written out here. The model on the server must have the tensors of a contract
    that the plugin knows, or of one that the values tell; `load_model` refuses others. Where the
    client libraries can't be imported the backend answers from the offline kernel, with a warning
    in the log and `offline=True` in every result.

    Besides what `InferenceBackend` tells: `ValuesError` for settings that are wrong or contradict
    each other.
    """

    name = NAME

    def __init__(
        self,
        server_url: str = "triton:8001",
        model_name: str = "llm-70b-onnx",
        model_version: str = "",
        prefer_grpc: bool = True,
        max_concurrency: int = 16,
        timeout_ms: int = 30_000,
        max_tokens: int = 256,
        offline: bool = False,
        **settings: Any,
    ) -> None:
        self._settings = GpuTritonSettings(
            server_url=server_url,
            model_name=model_name,
            model_version=model_version,
            prefer_grpc=prefer_grpc,
            max_concurrency=max_concurrency,
            timeout_ms=timeout_ms,
            max_tokens=max_tokens,
            offline=offline,
            **settings,
        )
        self._addresses = [
            ServerAddress.from_url(server_url, prefer_grpc=prefer_grpc),
            *(
                ServerAddress.from_url(url, prefer_grpc=prefer_grpc, setting="replica_urls")
                for url in self._settings.replica_urls
            ),
        ]
        if self._settings.compression != "none" and any(
            address.protocol == "http" for address in self._addresses
        ):
            raise ValuesError(
                "compression is for gRPC: Triton's generate endpoint takes no compressed request",
                path="compression",
            )
        self._kernel = self._offline_kernel()
        self._process_id = 0
        self._made_replicas: Replicas | None = None
        self._plain_limits = time_limits(self._settings, streamed=False)
        self._stream_limits = time_limits(self._settings, streamed=True)
        self._layout = PromptLayout(None, send_bos=True)
        self._progress = Progress()
        self._model = ""

    @classmethod
    def from_settings(cls, settings: GpuTritonSettings) -> GpuTritonBackend:
        """A backend with these settings."""
        return cls(**asdict(settings, recurse=False))

    def __repr__(self) -> str:
        model = self._model or self._settings.model_name
        servers = ", ".join(map(str, self._addresses))
        offline = " offline=True" if self._kernel else ""
        return (
            f"<GpuTritonBackend {self.name!r} server={servers!r} model={model!r} "
            f"loaded={self._is_loaded()}{offline}>"
        )

    def _offline_kernel(self) -> OfflineKernel | None:
        if not self._settings.offline:
            try:
                for address in self._addresses:
                    self._transport_factory(address)
            except ImportError as error:
                _log.warning(
                    "backend %r is OFFLINE and answers without a model: the client library can't "
                    "be imported (%s); pip install 'tritonclient[grpc]' aiohttp",
                    self.name,
                    error,
                )
            else:
                return None
        return OfflineKernel("gpu", backend_name=self.name)

    def _transport_factory(self, address: ServerAddress) -> TransportFactory:
        credentials = Credentials(self._settings)
        if address.protocol == "grpc":
            from iaop_gpu_triton.grpc_transport import GrpcTransport

            return partial(GrpcTransport, address, self._settings, credentials)
        from iaop_gpu_triton.http_transport import HttpTransport

        return partial(HttpTransport, address, self._settings, credentials)

    @property
    def capabilities(self) -> BackendCapabilities:
        """What the backend can do: with a loaded model, the parameters that this one takes."""
        capabilities = self._settings.capabilities
        if self._made_replicas is None:
            return capabilities
        taken = [r.loaded.contract.params for r in self._made_replicas.all if r.loaded is not None]
        return evolve(capabilities, params=PARAMS.intersection(*taken))

    @property
    def offline(self) -> bool:
        """Whether the offline kernel answers in the place of the server."""
        return self._kernel is not None

    # -- lifecycle ----------------------------------------------------------------------------

    def load_model(self, model_id: str = "") -> None:
        """Bind a model of the server, loading it there when it is not ready.

        Loading needs the server's `--model-control-mode=explicit`, and may take half an hour. With
        a model that the server had ready itself, nothing is changed on the server, and `unload`
        leaves it there. Of several servers, one at least must have the model. Raises
        `ModelLoadError` for a model that is unknown, can't be loaded or has tensors of no known
        contract, and for a chat template that can't be used; `BackendUnavailableError`,
        `BackendTimeoutError` when the server can't be asked.
        """
        self._check_process()
        model = model_id or self._settings.model_name
        layout = PromptLayout(self._template(model), send_bos=self._settings.send_bos)
        if self._kernel is None:
            bridge.run(self._load(model))
            bridge.close_at_exit(self)
        elif not self._kernel.is_model_ready(model):
            self._kernel.load(model)
        self._layout, self._model = layout, model

    def _template(self, model: str) -> ChatTemplate | None:
        if not self._settings.chat_template:
            return None
        try:
            return ChatTemplate.from_path(self._settings.chat_template)
        except ChatTemplateError as error:
            raise ModelLoadError(
                f"{error}; it is the setting chat_template", backend=self.name, model=model
            ) from error

    async def _load(self, model: str) -> None:
        await self._replicas().load(model)

    def _replicas(self) -> Replicas:
        if self._made_replicas is None:
            self._process_id = os.getpid()
            self._made_replicas = Replicas(
                [
                    Replica(address, self._settings, self._transport_factory(address))
                    for address in self._addresses
                ]
            )
        return self._made_replicas

    def unload(self) -> None:
        """Release the model; on the server too when this backend loaded it there.

        Calls under way end with an error. A server that can't be reached is a warning in the log.
        In a forked process nothing is released: all of it is the parent's.
        """
        if self._kernel is not None:
            self._kernel.unload()
        elif self._made_replicas is not None and os.getpid() == self._process_id:
            bridge.run(self._made_replicas.unload())
        self._model = ""

    def _check_process(self) -> None:
        if self._made_replicas is not None and os.getpid() != self._process_id:
            raise BackendUnavailableError(
                f"backend {self.name!r} was in use before this process was forked, and its "
                "connections are the parent's; make a backend in each process",
                backend=self.name,
            )

    def _is_loaded(self) -> bool:
        if self._kernel is not None:
            return self._kernel.is_model_ready()
        return bool(self._model)

    # -- health -------------------------------------------------------------------------------

    def health_check(self) -> BackendHealth:
        """Whether a server lives, has the loaded model ready, and answers calls with it.

        Asks all servers, for 5 s at most. Three calls in a row that failed, the last within 30 s,
        make the backend unhealthy too: `progressing=False`. The facts tell of the calls
        (`Progress.facts`) and, for each server, of Triton's own statistics.
        """
        try:
            if self._kernel is not None:
                live, ready = self._kernel.is_server_live(), self._kernel.is_model_ready()
                detail = f"server_live={live}, model_ready={ready}, loaded={ready}, offline=True"
                return BackendHealth(live and ready, detail)
            self._check_process()
            states = bridge.run(self._probe(), _PROBE_TIMEOUT_S)
        except Exception as error:
            return BackendHealth(False, f"probe_error: {str(error) or type(error).__name__}")
        return self._health(states)

    async def _probe(self) -> list[ReplicaState]:
        return await self._replicas().probe()

    def _health(self, states: list[ReplicaState]) -> BackendHealth:
        stuck, loaded = self._progress.is_stuck, self._is_loaded()
        live, ready = any(s.live for s in states), any(s.ready for s in states)
        facts = {
            **self._progress.facts(),
            "servers": [
                {
                    "url": str(replica.address),
                    "live": state.live,
                    "model_ready": state.ready,
                    "in_flight": replica.in_flight,
                    "error": state.error,
                    "statistics": list(state.statistics),
                }
                for replica, state in zip(self._replicas().all, states, strict=True)
            ],
        }
        if not ready and all(state.error for state in states):
            return BackendHealth(False, f"probe_error: {states[0].error}", facts)
        detail = f"server_live={live}, model_ready={ready}, loaded={loaded}"
        if len(states) > 1:
            detail += f", servers_ready={sum(s.ready for s in states)}/{len(states)}"
        if stuck:
            detail += ", progressing=False"
        return BackendHealth(live and ready and loaded and not stuck, detail, facts)

    # -- inference ----------------------------------------------------------------------------

    async def ainfer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """One whole answer, within `total_timeout_ms`, or `timeout_ms`."""
        question = self._question(prompt, context, params, streamed=False)
        if isinstance(question, InferResult):
            return question
        call = self._call(question)
        try:
            while await call.next_delta() is not None:
                pass
            return call.result()
        finally:
            call.leave()

    async def astream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> AsyncIterator[InferChunk]:
        """The answer as the model makes it; the settings' time limits are for each wait."""
        question = self._question(prompt, context, params, streamed=True)
        if isinstance(question, InferResult):
            yield InferChunk(question.text)
            yield InferChunk("", question)
            return
        call = self._call(question)
        try:
            while (delta := await call.next_delta()) is not None:
                if delta:
                    yield InferChunk(delta)
            yield InferChunk("", call.result())
        finally:
            call.leave()

    def _question(
        self, prompt: Prompt, context: Context, params: Params, *, streamed: bool
    ) -> Question | InferResult:
        """What to ask the server; offline, the kernel's answer."""
        wanted = GenerationParams.from_input(params)
        wanted.require_supported(PARAMS, backend=self.name)
        messages = as_messages(prompt)
        max_tokens = wanted.max_tokens or self._settings.max_tokens
        if self._kernel is not None:
            return self._kernel.infer(messages, context, max_tokens=max_tokens)
        self._check_process()
        if not self._model:
            raise not_loaded()
        text = self._layout.text(with_context(messages, context))
        return Question(text, wanted, max_tokens, streamed)

    def _call(self, question: Question) -> Call:
        return Call(
            question,
            self._replicas(),
            self._progress,
            self._stream_limits if question.streamed else self._plain_limits,
            strips_prompt=self._settings.strip_prompt,
        )
