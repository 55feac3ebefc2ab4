"""`GpuTritonBackend`: language models on NVIDIA Triton Inference Server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from attrs import frozen

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
from iaop_core.errors import (
    BackendUnavailableError,
    IaopError,
    ModelLoadError,
    ModelNotLoadedError,
)
from iaop_core.messages import Params, Prompt, as_messages, with_context
from iaop_gpu_triton import _errors
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.answer import Answer
from iaop_gpu_triton.contract import VllmContract, contract_of
from iaop_gpu_triton.prompt import prompt_text
from iaop_gpu_triton.settings import NAME, PARAMS, GpuTritonSettings
from iaop_gpu_triton.tensors import ModelState, Response, Tensor
from iaop_gpu_triton.transport import Transport

_log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 1800.0  # a large model takes minutes to come from a disk
_PROBE_TIMEOUT_S = 5.0


@frozen
class _LoadedModel:
    name: str
    contract: VllmContract
    by_us: bool
    """Loaded through the repository API by this backend, which therefore unloads it too."""


class GpuTritonBackend(InferenceBackend):
    """Runs a language model on a Triton server, over gRPC or HTTP.

    The arguments are the fields of `GpuTritonSettings`, which says what each means. The model on
    the server must have the tensors of Triton's vLLM backend; `load_model` refuses others. Where
    the client libraries can't be imported the backend answers from the offline kernel, with a
    warning in the log and `offline=True` in every result.

    Besides what `InferenceBackend` tells: `ValuesError` for a wrong `server_url`, `ValueError` for
    other settings out of range.
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
        )
        self._address = ServerAddress.from_url(server_url, prefer_grpc=prefer_grpc)
        self._timeout_s = timeout_ms / 1000
        self._kernel = self._offline_kernel()
        self._transport: Transport | None = None
        self._loaded: _LoadedModel | None = None
        self._lifecycle = asyncio.Lock()
        self._limits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        model = self._loaded.name if self._loaded else self._settings.model_name
        offline = " offline=True" if self._kernel else ""
        return (
            f"<GpuTritonBackend {self.name!r} server={str(self._address)!r} model={model!r} "
            f"loaded={self._is_loaded()}{offline}>"
        )

    def _offline_kernel(self) -> OfflineKernel | None:
        if not self._settings.offline:
            try:
                self._transport_class()
            except ImportError as error:
                _log.warning(
                    "backend %r is OFFLINE and answers without a model: the client library for %s "
                    "can't be imported (%s); pip install 'tritonclient[grpc]' aiohttp",
                    self.name,
                    self._address.protocol,
                    error,
                )
            else:
                return None
        return OfflineKernel("gpu", backend_name=self.name)

    def _transport_class(self) -> Callable[[str], Transport]:
        if self._address.protocol == "grpc":
            from iaop_gpu_triton.grpc_transport import GrpcTransport

            return GrpcTransport
        from iaop_gpu_triton.http_transport import HttpTransport

        return HttpTransport

    @property
    def capabilities(self) -> BackendCapabilities:
        return self._settings.capabilities

    @property
    def offline(self) -> bool:
        """Whether the offline kernel answers in the place of the server."""
        return self._kernel is not None

    # -- lifecycle ----------------------------------------------------------------------------

    def load_model(self, model_id: str = "") -> None:
        """Bind a model of the server, loading it there when it is not ready.

        Loading needs the server's `--model-control-mode=explicit`, and may take half an hour. With
        a model that the server had ready itself, nothing is changed on the server, and `unload`
        leaves it there. Raises `ModelLoadError` for a model that is unknown, can't be loaded, or
        has tensors other than the vLLM contract's; `BackendUnavailableError`,
        `BackendTimeoutError` when the server can't be asked.
        """
        model = model_id or self._settings.model_name
        if self._kernel is not None:
            if not self._kernel.is_model_ready(model):
                self._kernel.load(model)
            return
        bridge.run(self._load(model))

    async def _load(self, model: str) -> None:
        async with self._lifecycle:
            transport = self._open_transport()
            try:
                before = self._loaded
                ready = await transport.model_ready(
                    model, self._settings.model_version, timeout_s=self._timeout_s
                )
                if ready and before is not None and before.name == model:
                    return
                self._loaded = await self._bind(transport, model, load=not ready)
                if before is not None and before.name != model:
                    await self._let_go(transport, before)
            finally:
                if self._loaded is None:
                    await self._close_transport()

    async def _bind(self, transport: Transport, model: str, *, load: bool) -> _LoadedModel:
        if load:
            await self._load_on_server(transport, model)
        try:
            metadata = await transport.model_metadata(
                model, self._settings.model_version, timeout_s=self._timeout_s
            )
            return _LoadedModel(model, contract_of(metadata), by_us=load)
        except IaopError:
            if load:
                await self._unload_on_server(transport, model)
            raise

    async def _load_on_server(self, transport: Transport, model: str) -> None:
        version = self._settings.model_version
        states = await transport.repository_index(timeout_s=self._timeout_s)
        known = [state for state in states if state.name == model]
        if any(state.state == "LOADING" for state in known):
            raise BackendUnavailableError(
                f"model {model!r} is being loaded by the Triton server at "
                f"{self._address.host_port}; try again when it is ready",
                backend=self.name,
            )
        try:
            await transport.load(model, timeout_s=_LOAD_TIMEOUT_S)
        except _errors.LoadingNotAllowedError as error:
            raise ModelLoadError(
                f"model {model!r}{_version(version)} is not ready on the Triton server at "
                f"{self._address.host_port}, which allows no loading by its clients (its "
                f"--model-control-mode is not explicit); {_offered(states)}",
                backend=self.name,
                model=model,
            ) from error
        except ModelLoadError as error:
            if known:
                raise
            raise ModelLoadError(
                f"{error}; {_offered(states)}", backend=self.name, model=model
            ) from error
        if not await transport.model_ready(model, version, timeout_s=self._timeout_s):
            states = await transport.repository_index(timeout_s=self._timeout_s)
            await self._unload_on_server(transport, model)
            versions = [state.version for state in states if state.name == model]
            raise ModelLoadError(
                f"model {model!r} has no version {version!r} that is ready on the Triton server at "
                f"{self._address.host_port}; its versions: {', '.join(versions) or 'none'}",
                backend=self.name,
                model=model,
            )

    async def _let_go(self, transport: Transport, loaded: _LoadedModel) -> None:
        if loaded.by_us:
            await self._unload_on_server(transport, loaded.name)

    async def _unload_on_server(self, transport: Transport, model: str) -> None:
        try:
            await transport.unload(model, timeout_s=self._timeout_s)
        except IaopError as error:
            _log.warning("model %r may still be loaded on the Triton server: %s", model, error)

    def unload(self) -> None:
        """Release the model; on the server too when this backend loaded it there.

        Calls under way end with an error. A server that can't be reached is a warning in the log.
        """
        if self._kernel is not None:
            self._kernel.unload()
        elif self._transport is not None:
            bridge.run(self._unload())

    async def _unload(self) -> None:
        async with self._lifecycle:
            loaded, self._loaded = self._loaded, None
            if loaded is not None and self._transport is not None:
                await self._let_go(self._transport, loaded)
            await self._close_transport()

    def _open_transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._new_transport()
        return self._transport

    def _new_transport(self) -> Transport:
        return self._transport_class()(self._address.host_port)

    async def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        for limit in self._limits:  # calls under way end here and now
            if not limit.expired():
                limit.reschedule(0)
        while self._limits:  # noqa: ASYNC110 - a matter of a few rounds of the loop
            await asyncio.sleep(0)
        await transport.close()

    def _is_loaded(self) -> bool:
        if self._kernel is not None:
            return self._kernel.is_model_ready()
        return self._loaded is not None

    # -- health -------------------------------------------------------------------------------

    def health_check(self) -> BackendHealth:
        """Whether the server lives and the loaded model is ready; asks both, for 5 s at most."""
        try:
            if self._kernel is not None:
                live, ready = self._kernel.is_server_live(), self._kernel.is_model_ready()
            else:
                live, ready = bridge.run(self._probe(), _PROBE_TIMEOUT_S)
        except Exception as error:
            return BackendHealth(False, f"probe_error: {error or type(error).__name__}")
        loaded = self._is_loaded()
        detail = f"server_live={live}, model_ready={ready}, loaded={loaded}"
        if self._kernel is not None:
            detail += ", offline=True"
        return BackendHealth(live and ready and loaded, detail)

    async def _probe(self) -> tuple[bool, bool]:
        timeout_s = min(self._timeout_s, _PROBE_TIMEOUT_S)
        loaded, transport = self._loaded, self._transport
        if loaded is not None and transport is not None:
            return (
                await transport.server_live(timeout_s=timeout_s),
                await transport.model_ready(
                    loaded.name, self._settings.model_version, timeout_s=timeout_s
                ),
            )
        transport = self._new_transport()
        try:
            return await transport.server_live(timeout_s=timeout_s), False
        finally:
            await transport.close()

    # -- inference ----------------------------------------------------------------------------

    async def ainfer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """One whole answer, within `timeout_ms`."""
        async with aclosing(self._chunks(prompt, context, params, streamed=False)) as chunks:
            async for chunk in chunks:
                if chunk.result is not None:
                    return chunk.result
        raise AssertionError("an answer ends with its result or with an error")

    async def astream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> AsyncIterator[InferChunk]:
        """The answer as the model makes it; `timeout_ms` is for each wait, not for the whole."""
        async with aclosing(self._chunks(prompt, context, params, streamed=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self, prompt: Prompt, context: Context, params: Params, *, streamed: bool
    ) -> AsyncGenerator[InferChunk, None]:
        wanted = GenerationParams.from_input(params)
        wanted.require_supported(PARAMS, backend=self.name)
        messages = as_messages(prompt)
        max_tokens = wanted.max_tokens or self._settings.max_tokens
        if self._kernel is not None:
            result = self._kernel.infer(messages, context, max_tokens=max_tokens)
            yield InferChunk(result.text)
            yield InferChunk("", result)
            return
        loaded, transport = self._loaded, self._transport
        if loaded is None or transport is None:
            raise ModelNotLoadedError(
                f"backend {self.name!r} has no model loaded; call load_model() first",
                backend=self.name,
            )
        text = prompt_text(with_context(messages, context))
        answer = Answer(
            model=loaded.name,
            prompt=text,
            max_tokens=max_tokens,
            needs_reason=loaded.contract.tells_finish_reason,
        )
        tensors = loaded.contract.request(
            text,
            wanted,
            max_tokens=max_tokens,
            # A server that looks after its client only when it sends should send often: else a
            # plain answer that nobody waits for any more would be made to its end.
            streamed=streamed or not transport.cancels_at_once,
        )
        responses = self._responses(transport, loaded.name, tensors, streamed=streamed)
        async with aclosing(responses):
            async for response in responses:
                delta = answer.add(loaded.contract.read(response))
                if delta and streamed:
                    yield InferChunk(delta)
        yield InferChunk("", answer.result(streamed=streamed))

    async def _responses(
        self, transport: Transport, model: str, tensors: tuple[Tensor, ...], *, streamed: bool
    ) -> AsyncGenerator[Response, None]:
        """The model's responses, each within the time limit; of a plain answer, all of them."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._timeout_s
        answering = False
        responses = transport.generate(model, self._settings.model_version, tensors)
        async with aclosing(responses):
            while True:
                if transport is not self._transport:
                    raise self._gone(answering)
                limit = asyncio.timeout_at(deadline)
                self._limits.add(limit)
                try:
                    async with limit:
                        response = await anext(responses, None)
                except IaopError:  # of which one is a TimeoutError
                    raise
                except TimeoutError as error:
                    if transport is not self._transport:
                        raise self._gone(answering) from error
                    what = "further response" if answering else "response"
                    raise self._out_of_time(transport, what if streamed else "answer") from error
                finally:
                    self._limits.discard(limit)
                if response is None:
                    return
                answering = True
                yield response
                if streamed:
                    deadline = now() + self._timeout_s

    def _out_of_time(self, transport: Transport, what: str) -> IaopError:
        connected = transport.is_connected()
        transport.reconnect()  # the peer may be gone without a word
        if not connected:
            ms = self._settings.timeout_ms
            return _errors.unreachable(self._address.host_port, f"no connection within {ms} ms")
        return _errors.timed_out(self._address.host_port, self._timeout_s, what)

    def _gone(self, answering: bool) -> IaopError:
        reason = "the backend was unloaded"
        return _errors.lost(self._address.host_port, reason, answering=answering)


def _version(version: str) -> str:
    return f" version {version!r}" if version else ""


def _offered(states: Iterable[ModelState]) -> str:
    names = sorted({state.name for state in states})
    return f"its repository has: {', '.join(names) or 'no models'}"
