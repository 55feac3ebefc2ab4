"""One server, and the model on it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from attrs import frozen

from iaop_core import GenerationParams
from iaop_core.errors import (
    BackendUnavailableError,
    IaopError,
    ModelLoadError,
    ModelNotLoadedError,
    ValuesError,
)
from iaop_gpu_triton import _errors
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.contract import TensorContract
from iaop_gpu_triton.detection import contract_of
from iaop_gpu_triton.response_stream import ResponseStream, TimeLimits, Waited
from iaop_gpu_triton.settings import NAME, GpuTritonSettings
from iaop_gpu_triton.tensors import ModelState
from iaop_gpu_triton.transport import Transport

_log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 1800.0  # a large model takes minutes to come from a disk
_PROBE_TIMEOUT_S = 5.0
_SKIP_S = 5.0
"""How long other servers are preferred to one that could not be reached or fell silent."""

TransportFactory: TypeAlias = Callable[[], Transport]


@frozen
class LoadedModel:
    """A model that a server has ready."""

    name: str
    contract: TensorContract
    by_us: bool
    """Loaded through the repository API by this backend, which keeps it and unloads it too."""


@frozen
class ReplicaState:
    """What a probe of a server tells."""

    live: bool
    ready: bool
    error: str
    """Why it could not be asked, or not to the end; else empty."""
    statistics: tuple[Mapping[str, Any], ...]
    """Of each version of the model, as `_statistics` lists them."""


class Replica:
    """A server of the model. Used on core's event loop only."""

    def __init__(
        self, address: ServerAddress, settings: GpuTritonSettings, new_transport: TransportFactory
    ) -> None:
        self.address = address
        self.loaded: LoadedModel | None = None
        self.in_flight = 0
        self._settings = settings
        self._shown = address.host_port
        self._ask_timeout_s = settings.timeout_ms / 1000
        self._new_transport = new_transport
        self._transport: Transport | None = None
        self._lifecycle = asyncio.Lock()
        self._streams: set[ResponseStream] = set()
        self._skipped_until = 0.0
        self._recovery: asyncio.Task[None] | None = None

    # -- the model ------------------------------------------------------------------------------

    async def load(self, model: str) -> None:
        """Bind the model, loading it when it is not ready; the former one goes after that.

        Raises `ModelLoadError`, `BackendUnavailableError`, `BackendTimeoutError`,
        `CredentialsRefusedError`, `ValuesError`.
        """
        async with self._lifecycle:
            transport = self._open_transport()
            before = self.loaded
            try:
                same = before is not None and before.name == model
                ready = await transport.model_ready(
                    model, self._settings.model_version, timeout_s=self._ask_timeout_s
                )
                overridden = bool(self._settings.load_config) and not same
                by_us = not ready or overridden
                if by_us:
                    await self._load_on_server(transport, model)
                contract = await self._contract(transport, model, unload=by_us)
                kept = before is not None and same and before.by_us
                self.loaded = LoadedModel(model, contract, by_us or kept)
                if before is not None and not same:
                    await self._let_go(transport, before)
            except _errors.UnreachableError:
                self.skip()
                raise
            finally:
                if self.loaded is None:
                    await self._close_transport()

    async def _contract(self, transport: Transport, model: str, *, unload: bool) -> TensorContract:
        try:
            metadata = await transport.model_metadata(
                model, self._settings.model_version, timeout_s=self._ask_timeout_s
            )
            return contract_of(metadata, self._settings.tensors)
        except IaopError:
            if unload:
                await self._unload_on_server(transport, model)
            raise

    async def _load_on_server(self, transport: Transport, model: str) -> None:
        version = self._settings.model_version
        states = await transport.repository_index(timeout_s=self._ask_timeout_s)
        known = [state for state in states if state.name == model]
        if any(state.state == "LOADING" for state in known):
            raise BackendUnavailableError(
                f"model {model!r} is being loaded by the Triton server at {self._shown}; try again "
                "when it is ready",
                backend=NAME,
            )
        config = self._settings.load_config
        try:
            await transport.load(
                model,
                config=json.dumps(config) if config else "",
                files=self._load_files(),
                timeout_s=_LOAD_TIMEOUT_S,
            )
        except _errors.LoadingNotAllowedError as error:
            ready = any(state.state == "READY" for state in known)
            raise ModelLoadError(
                f"model {model!r}{_version(version)} "
                + ("can't be loaded with load_config" if ready and config else "is not ready")
                + f" on the Triton server at {self._shown}, which allows no loading by its clients "
                f"(its --model-control-mode is not explicit); {_offered(states, model)}",
                backend=NAME,
                model=model,
            ) from error
        except ModelLoadError as error:
            if not known:
                more = f"it has no such model; {_offered(states, model)}"
            elif config:
                more = "load_config takes the place of its whole configuration"
            else:
                more = "that server's log may say more"
            raise ModelLoadError(f"{error}; {more}", backend=NAME, model=model) from error
        if not await transport.model_ready(model, version, timeout_s=self._ask_timeout_s):
            states = await transport.repository_index(timeout_s=self._ask_timeout_s)
            if not any(state.state == "READY" for state in known):
                await self._unload_on_server(transport, model)
            raise ModelLoadError(
                f"model {model!r} has no version {version!r} that is ready on the Triton server at "
                f"{self._shown}; {_offered(states, model)}",
                backend=NAME,
                model=model,
            )

    def _load_files(self) -> dict[str, bytes]:
        files = {}
        for name, path in self._settings.load_files.items():
            try:
                files[name] = Path(path).expanduser().read_bytes()
            except OSError as error:
                raise ValuesError(
                    f"load_files.{name} can't be read: {error.strerror}", path="load_files"
                ) from error
        return files

    async def _let_go(self, transport: Transport, loaded: LoadedModel) -> None:
        if loaded.by_us:
            await self._unload_on_server(transport, loaded.name)

    async def _unload_on_server(self, transport: Transport, model: str) -> None:
        try:
            await transport.unload(model, timeout_s=self._ask_timeout_s)
        except IaopError as error:
            _log.warning("model %r may still be loaded on the Triton server: %s", model, error)

    async def unload(self) -> None:
        """Release the model, on the server too when it was loaded from here.

        Calls under way end with an error. A server that can't be reached is a warning in the log.
        """
        if self._recovery is not None:
            self._recovery.cancel()
        async with self._lifecycle:
            loaded, self.loaded = self.loaded, None
            for stream in self._streams:
                stream.fail(
                    _errors.lost(
                        self._shown, "the backend was unloaded", answering=stream.answering
                    )
                )
            if loaded is not None and self._transport is not None:
                await self._let_go(self._transport, loaded)
            await self._close_transport()

    async def recover(self, error: IaopError, timeout_s: float) -> bool:
        """After `ModelGoneError` and `ModelChangedError`: whether another try is worth while.

        A model that was loaded from here, and that the server has lost by a restart, is loaded
        again; who waits for that longer than `timeout_s` gets a `BackendUnavailableError`.
        """
        loaded = self.loaded
        gone = isinstance(error, _errors.ModelGoneError)
        if loaded is None or (gone and not loaded.by_us):
            return False
        if not gone and not isinstance(error, _errors.ModelChangedError):
            return False
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.ensure_future(self.load(loaded.name))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._recovery)
        except TimeoutError:
            if not self._recovery.done():
                raise BackendUnavailableError(
                    f"model {loaded.name!r} is being loaded again by the Triton server at "
                    f"{self._shown}; try again when it is ready",
                    backend=NAME,
                ) from error
            raise
        except asyncio.CancelledError:
            if not self._recovery.cancelled():
                raise
            return False  # the backend was unloaded
        except ModelLoadError as failure:
            raise BackendUnavailableError(str(failure), backend=NAME) from failure
        return True

    def _open_transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._new_transport()
        return self._transport

    async def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    # -- calls ----------------------------------------------------------------------------------

    @property
    def is_skipped(self) -> bool:
        """Other servers are to be preferred for now."""
        return asyncio.get_running_loop().time() < self._skipped_until

    def skip(self) -> None:
        """Prefer other servers for five seconds."""
        self._skipped_until = asyncio.get_running_loop().time() + _SKIP_S

    async def start(
        self,
        prompt: str,
        params: GenerationParams,
        *,
        max_tokens: int,
        streamed: bool,
        limits: TimeLimits,
    ) -> ResponseStream:
        """Send a request for one answer."""
        loaded, transport = self.loaded, self._transport
        if loaded is None or transport is None:
            raise not_loaded()
        contract = loaded.contract
        tensors = contract.request(
            prompt,
            params,
            max_tokens=max_tokens,
            # A server that looks after its client only when it sends should send often: else a
            # plain answer that nobody waits for any more would be made to its end.
            streamed=streamed or not transport.cancels_at_once,
        )
        try:
            stream = await transport.generate(
                loaded.name,
                self._settings.model_version,
                tensors,
                prompt=prompt,
                single=not contract.streams,
            )
        except _errors.UnreachableError:
            self.skip()
            raise
        self._streams.add(stream)
        stream.watch(limits, self._timed_out)
        if self._transport is not transport:
            stream.fail(_errors.lost(self._shown, "the backend was unloaded", answering=False))
        return stream

    def finish(self, stream: ResponseStream) -> None:
        """The caller has its answer, or has gone."""
        self._streams.discard(stream)
        stream.leave()

    def _timed_out(self, waited: Waited, limit_s: float) -> IaopError:
        self.skip()
        if self._transport is not None:
            self._transport.reconnect()  # the peer may be gone without a word
        return _errors.timed_out(self._shown, limit_s, waited)

    # -- health ---------------------------------------------------------------------------------

    async def probe(self) -> ReplicaState:
        """Ask the server for its life, and for the loaded model.

        For 5 s at most, or `timeout_ms` where that is less. Never raises core's errors: what has
        been told by then stands, with the error.
        """
        limit_s = min(self._ask_timeout_s, _PROBE_TIMEOUT_S)
        version = self._settings.model_version
        live = ready = False
        statistics: list[Mapping[str, Any]] = []
        error = ""
        loaded, transport = self.loaded, self._transport
        temporary = transport is None
        try:
            if transport is None:
                transport = self._new_transport()
            async with asyncio.timeout(limit_s):
                live = await transport.server_live(timeout_s=limit_s)
                if loaded is not None:
                    ready = await transport.model_ready(loaded.name, version, timeout_s=limit_s)
                if ready and loaded is not None:
                    statistics = await transport.model_statistics(
                        loaded.name, version, timeout_s=limit_s
                    )
        except ModelLoadError:  # gone between the questions
            ready = False
        except IaopError as failure:
            error = str(failure)
        except TimeoutError:
            error = str(_errors.timed_out(self._shown, limit_s, "answer to all questions"))
        finally:
            if temporary and transport is not None:
                await transport.close()
        return ReplicaState(live, ready, error, tuple(map(_statistics, statistics)))


def not_loaded() -> ModelNotLoadedError:
    return ModelNotLoadedError(
        f"backend {NAME!r} has no model loaded; call load_model() first", backend=NAME
    )


def _statistics(told: Mapping[str, Any]) -> dict[str, Any]:
    """Triton's statistics of a model version, counts as numbers and times in milliseconds."""
    times = told.get("inference_stats") or {}
    return {
        "version": str(told.get("version", "")),
        "inferences": int(told.get("inference_count", 0)),
        "executions": int(told.get("execution_count", 0)),
        **{
            name: {
                "count": int(duration.get("count", 0)),
                "ms": round(int(duration.get("ns", 0)) / 1e6, 3),
            }
            for name, duration in times.items()
        },
    }


def _version(version: str) -> str:
    return f" version {version!r}" if version else ""


def _offered(states: Iterable[ModelState], model: str) -> str:
    states = list(states)
    versions = [
        f"{state.version or 'none'} ({(state.state or 'not loaded').lower()})"
        for state in states
        if state.name == model
    ]
    if versions:
        return f"its versions: {', '.join(versions)}"
    names = sorted({state.name for state in states})
    return f"its repository has: {', '.join(names) or 'no models'}"
