"""The gateway: one face for applications, whatever backend the values choose."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from iaop_core import bridge
from iaop_core.audit import AuditLog, Usage
from iaop_core.backend import Context
from iaop_core.bridge import Wait
from iaop_core.call import Call, Request, Site
from iaop_core.capabilities import BackendHealth
from iaop_core.errors import IaopError, InvalidRequestError
from iaop_core.messages import InferChunk, InferResult, Params, Prompt
from iaop_core.plugins import PluginRegistry
from iaop_core.policy import check_policy
from iaop_core.quota import QuotaLedger
from iaop_core.sitebackend import SiteBackend
from iaop_core.values import RouteSettings, Values

__all__ = ["GatewayHealth", "LLMGateway"]

_log = logging.getLogger(__name__)
_HEALTH_LIMIT_S = 2.0


@frozen
class GatewayHealth:
    """Healthy when every route has a healthy backend; `backends` has each one's own."""

    healthy: bool
    backends: Mapping[str, BackendHealth]

    def __bool__(self) -> bool:
        return self.healthy


class LLMGateway:
    """Answers prompts through the backends that the values name.

    ::

        with LLMGateway.from_values("values.yaml") as gateway:
            print(gateway.ask("What is a canary release?"))

    As a context manager it loads the models and closes at the end; one that nobody closes is closed
    when the process ends. Every method that takes time has an asynchronous twin, with an `a` before
    its name. One gateway may be used from many threads and event loops at once.
    """

    def __init__(self, values: Values, *, registry: PluginRegistry | None = None) -> None:
        """Check the backends of all routes, without importing an SDK or opening a connection.

        Raises `ValuesError` for wrong settings and `PluginLoadError` for an add-on. A backend's
        plugin that can't be used is an error when a route that names it is loaded or called.
        """
        registry = registry or PluginRegistry()
        registry.load_addons()
        routed = {name: None for route in values.routes.values() for name in _members(route)}
        backends = {name: SiteBackend(name, values, registry) for name in routed}
        audit = AuditLog(values.audit.url)
        self._site = Site(
            values=values,
            backends=backends,
            registry=registry,
            quotas=QuotaLedger(values.tenants, audit),
            audit=audit,
        )
        bridge.close_at_exit(self)

    @classmethod
    def from_values(
        cls,
        values: Values | Mapping[str, Any] | str | Path,
        *,
        registry: PluginRegistry | None = None,
    ) -> Self:
        """A gateway from a values file (YAML or TOML), a mapping, or checked values."""
        return cls(Values.load(values), registry=registry)

    @property
    def values(self) -> Values:
        return self._site.values

    # -- answers ---------------------------------------------------------------------------------

    def ask(
        self,
        prompt: Prompt,
        context: Context = None,
        *,
        route: str | None = None,
        tenant: str | None = None,
        params: Params = None,
        timeout_ms: float | None = None,
    ) -> InferResult:
        """One whole answer.

        `prompt` is a string (one user turn) or chat messages, `context` a sequence of source texts.
        `route` and `tenant` are names in the values; without a route the default one is taken.
        `timeout_ms` is for the whole call, in place of the values'. Raises `iaop_core.errors`.
        """
        request = Request("infer", prompt, context, params, route, tenant, timeout_ms)
        return bridge.drive(self._ask(request, bridge.block))

    def stream(
        self,
        prompt: Prompt,
        context: Context = None,
        *,
        route: str | None = None,
        tenant: str | None = None,
        params: Params = None,
        timeout_ms: float | None = None,
    ) -> Iterator[InferChunk]:
        """As `ask`, in deltas as they are made; the last chunk carries the whole result.

        The call begins with the first chunk that is asked for. Closing the iterator cancels it.
        """
        request = Request("stream", prompt, context, params, route, tenant, timeout_ms)
        chunks: Any = Call(self._site, request, bridge.block).chunks()
        try:
            while True:
                try:
                    chunk = bridge.drive(anext(chunks))
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            bridge.drive(chunks.aclose())

    async def aask(
        self,
        prompt: Prompt,
        context: Context = None,
        *,
        route: str | None = None,
        tenant: str | None = None,
        params: Params = None,
        timeout_ms: float | None = None,
    ) -> InferResult:
        """As `ask`. Cancelling the task cancels the call."""
        request = Request("infer", prompt, context, params, route, tenant, timeout_ms)
        return await self._ask(request, bridge.suspend)

    async def astream(
        self,
        prompt: Prompt,
        context: Context = None,
        *,
        route: str | None = None,
        tenant: str | None = None,
        params: Params = None,
        timeout_ms: float | None = None,
    ) -> AsyncIterator[InferChunk]:
        """As `stream`. Closing the generator, or cancelling the task, cancels the call."""
        request = Request("stream", prompt, context, params, route, tenant, timeout_ms)
        chunks: Any = Call(self._site, request, bridge.suspend).chunks()
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _ask(self, request: Request, wait: Wait) -> InferResult:
        result: InferResult | None = None
        chunks: Any = Call(self._site, request, wait).chunks()
        async with aclosing(chunks):
            async for chunk in chunks:
                result = chunk.result
        assert result is not None  # a call ends with its result or an error
        return result

    # -- models ----------------------------------------------------------------------------------

    def load(self, *, route: str | None = None) -> None:
        """Load the models of all routes, or of one, at the same time.

        Raises the errors of plugin selection for any backend of these routes, before any model is
        loaded. A route that is left without any loaded backend raises the error of its first
        target; a failure that leaves others is logged, and shown by `health`. Raises `AuditError`
        when the audit database can't be opened, or the gateway is closed.
        """
        bridge.drive(self._load(route, bridge.block))

    async def aload(self, *, route: str | None = None) -> None:
        """As `load`."""
        await self._load(route, bridge.suspend)

    async def _load(self, route: str | None, wait: Wait) -> None:
        self._site.audit.check_open()
        routes = self._site.values.routes
        if route is not None and route not in routes:
            raise InvalidRequestError(
                f"no route {route!r}; there are: {', '.join(routes)}", param="route"
            )
        wanted = {name: _members(routes[name]) for name in routes if route in (None, name)}
        names = dict.fromkeys(name for members in wanted.values() for name in members)
        for name in names:
            self._site.backends[name].require_plugin()
        loads = {name: bridge.in_thread(self._site.backends[name].load) for name in names}
        failures: dict[str, IaopError] = {}
        for name, load in loads.items():
            try:
                await wait(load)
            except IaopError as error:
                failures[name] = error
        for name, members in wanted.items():
            for member in members:
                if member not in failures:
                    check_policy(name, routes[name], self._site.backends[member])
        for members in wanted.values():
            if all(name in failures for name in members):
                raise failures[members[0]]
        for name, failure in failures.items():
            _log.error("backend %s is not loaded: %s", name, failure)
        await wait(self._site.audit.opened)

    def health(self) -> GatewayHealth:
        """The health of every backend, all asked at once, in about two seconds at most."""
        return bridge.drive(self._health(bridge.block))

    async def ahealth(self) -> GatewayHealth:
        """As `health`."""
        return await self._health(bridge.suspend)

    async def _health(self, wait: Wait) -> GatewayHealth:
        probes = {name: backend.health() for name, backend in self._site.backends.items()}
        deadline = time.monotonic() + _HEALTH_LIMIT_S
        backends = {}
        for name, probe in probes.items():
            try:
                backends[name] = await wait(probe, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                backends[name] = BackendHealth(
                    healthy=False, detail=f"probe_error: no answer within {_HEALTH_LIMIT_S:g} s"
                )
        healthy = all(
            any(backends[name].healthy for name in _members(route))
            for route in self._site.values.routes.values()
        )
        return GatewayHealth(healthy, backends)

    def usage(self, *, since: str = "", tenant: str | None = None) -> list[Usage]:
        """Calls and tokens by day, tenant and backend, from the audit log."""
        return bridge.drive(bridge.block(self._site.audit.usage(since=since, tenant=tenant)))

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every backend and write what is left of the audit. Safe to call again.

        Calls and `load` raise `AuditError` afterwards. A stream that is still open loses its row,
        which is logged: close it first.
        """
        for backend in self._site.backends.values():
            backend.close()
        self._site.audit.close()

    async def aclose(self) -> None:
        """As `close`."""
        await bridge.suspend(bridge.in_thread(self.close))

    def __enter__(self) -> Self:
        try:
            self.load()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await self.aload()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _members(route: RouteSettings) -> list[str]:
    """The backends of a route: its targets, then its fallbacks."""
    return list(dict.fromkeys([*(target.backend for target in route.targets), *route.fallback]))
