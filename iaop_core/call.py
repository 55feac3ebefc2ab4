"""The path of one call: route, policy, quota, slot, attempt, failover, settlement, audit.

Written once, as an asynchronous generator whose waits are given: blocking ones for `ask` and
`stream`, suspending ones for `aask` and `astream`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing

from attrs import field, frozen

from iaop_core import bridge
from iaop_core.audit import AuditLog, AuditRow, Outcome
from iaop_core.backend import Context, InferenceBackend, Mode, start_work
from iaop_core.bridge import Wait
from iaop_core.errors import (
    AuditError,
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapabilityNotSupportedError,
    ConfigurationError,
    IaopError,
    InvalidRequestError,
    RateLimitedError,
    RequestError,
    StreamInterruptedError,
)
from iaop_core.hookspecs import InferCall
from iaop_core.messages import (
    DEFAULT_MAX_TOKENS,
    GenerationParams,
    InferChunk,
    InferResult,
    Message,
    Params,
    Prompt,
    as_messages,
    estimate_tokens,
    with_context,
)
from iaop_core.plugins import PluginRegistry
from iaop_core.policy import check_policy
from iaop_core.quota import QuotaLedger, Reservation
from iaop_core.sitebackend import SiteBackend
from iaop_core.values import RouteSettings, Values

__all__ = ["Call", "Request", "Site"]

_log = logging.getLogger(__name__)

_LONGEST_MS = threading.TIMEOUT_MAX * 1000
"""What the operating system can still wait for; a longer time is taken as this one."""
_AUDIT_PATIENCE_S = 10.0
"""How long a call that has ended waits for its row, when its own time is used up."""
_BACKOFF_S = 0.2
"""Before the first retry, doubled for each further one, with jitter."""


@frozen(kw_only=True)
class Site:
    """What all calls of a gateway share."""

    values: Values
    backends: Mapping[str, SiteBackend]
    registry: PluginRegistry
    quotas: QuotaLedger
    audit: AuditLog


@frozen
class Request:
    """What the caller asks, as it was given."""

    mode: Mode
    prompt: Prompt = field(repr=False)
    context: Context = field(repr=False)
    params: Params
    route: str | None
    tenant: str | None
    timeout_ms: float | None


class Call:
    """One call, from its request to its audit row."""

    def __init__(self, site: Site, request: Request, wait: Wait) -> None:
        self._site = site
        self._request = request
        self._wait = wait
        self._id = uuid.uuid4().hex
        self._started = time.perf_counter()
        self._deadline = 0.0
        self._timeout_ms = 0.0
        self._route_name = ""
        self._tenant = ""
        self._attempts = 0
        self._last: SiteBackend | None = None
        self._on_premises: bool | None = None
        self._device = ""
        self._begun = False
        self._delivered = ""
        self._first_ms: float | None = None
        self._result: InferResult | None = None
        self._messages: tuple[Message, ...] = ()
        self._reservation: Reservation | None = None

    async def chunks(self) -> AsyncGenerator[InferChunk, None]:
        """The answer's chunks. The row is written, and the quota settled, whatever the end.

        The end is given out when its row is written: an answer that isn't recorded is not served.
        """
        error: BaseException | None = None
        end: InferChunk | None = None
        try:
            self._site.audit.check_open()
            route, params = self._read_request()
            async with aclosing(self._answer(route, params)) as chunks:
                async for chunk in chunks:
                    if chunk.result is None:
                        yield chunk
                    else:
                        end = chunk
        except BaseException as raised:
            error = raised
            raise
        finally:
            row = self._row(error)
            if self._reservation is not None:
                self._reservation.settle(row.prompt_tokens + row.completion_tokens)
            written = self._site.audit.write(row)
            if row.outcome != "abandoned":
                await self._confirm(written, error)
        if end is not None:
            yield end

    async def _confirm(self, written: Future[None], error: BaseException | None) -> None:
        """Wait for the row. When it can't be written, an answer is not served either."""
        try:
            await self._wait(written, max(self._remaining_s(), _AUDIT_PATIENCE_S))
        except IaopError:
            if error is None:
                raise
        except TimeoutError:
            if error is None:
                raise AuditError(
                    "the audit database has not taken the call's row in time; check its disk and "
                    "its server"
                ) from None

    # -- before any backend ----------------------------------------------------------------------

    def _read_request(self) -> tuple[RouteSettings, GenerationParams]:
        request, values = self._request, self._site.values
        name = values.default_route() if request.route is None else request.route
        if not isinstance(name, str) or name not in values.routes:
            raise InvalidRequestError(
                f"no route {str(name)[:40]!r}; there are: {', '.join(values.routes)}",
                param="route",
            )
        self._route_name, route = name, values.routes[name]
        if request.tenant is not None:
            if not isinstance(request.tenant, str) or request.tenant not in values.tenants:
                raise InvalidRequestError(
                    f"no tenant {str(request.tenant)[:40]!r} is in the values", param="tenant"
                )
            self._tenant = request.tenant
        timeout_ms = request.timeout_ms
        if timeout_ms is None:
            timeout_ms = route.timeout_ms or values.gateway.timeout_ms
        is_number = isinstance(timeout_ms, int | float) and not isinstance(timeout_ms, bool)
        if not is_number or not timeout_ms > 0:
            raise InvalidRequestError("timeout_ms is a number above 0", param="timeout_ms")
        self._timeout_ms = timeout_ms
        self._deadline = self._started + min(timeout_ms, _LONGEST_MS) / 1000
        self._messages = with_context(as_messages(request.prompt), request.context)
        said = [message.content for message in self._messages if message.role == "user"]
        if said and not any(said):
            raise InvalidRequestError(
                "the prompt is empty; ask something, or give a context", param="messages"
            )
        return route, GenerationParams.from_input(request.params)

    @property
    def _prompt_estimate(self) -> int:
        return sum(estimate_tokens(message.content) for message in self._messages)

    # -- the backends of the route ---------------------------------------------------------------

    async def _answer(
        self, route: RouteSettings, params: GenerationParams
    ) -> AsyncGenerator[InferChunk, None]:
        candidates = [self._site.backends[name] for name in _order(route)]
        for retry in range(self._site.values.gateway.retries + 1):
            failures: list[IaopError] = []
            again: list[SiteBackend] = []
            for backend in candidates:
                try:
                    async with aclosing(self._attempt(backend, route, params)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    backend.has_answered()
                    return
                except CapabilityNotSupportedError as error:
                    if not failures:
                        raise
                    self._tell(backend, f"is no failover for it: {error}")
                except IaopError as error:
                    if self._delivered or not error.may_fail_over:
                        raise
                    self._tell(backend, f"could not take it: {error.kind}")
                    failures.append(error)
                    if error.may_retry:
                        again.append(backend)
            pause_s = _backoff_s(retry, failures)
            out_of_retries = retry == self._site.values.gateway.retries
            if not again or out_of_retries or pause_s >= self._remaining_s():
                raise failures[0]
            candidates = again
            await self._pause(pause_s)

    def _tell(self, backend: SiteBackend, trouble: str) -> None:
        """Log it, as a warning the first time: each call would repeat it until it is mended."""
        level = logging.WARNING if backend.is_news(trouble) else logging.INFO
        _log.log(level, "request %s: backend %s %s", self._id, backend.name, trouble)

    async def _attempt(
        self, backend: SiteBackend, route: RouteSettings, params: GenerationParams
    ) -> AsyncGenerator[InferChunk, None]:
        self._last = backend
        instance = await self._make(backend)
        check_policy(self._route_name, route, backend)
        params.require_supported(instance.capabilities.params, backend=backend.name)
        await self._reserve(params)
        self._attempts += 1
        self._device = instance.capabilities.device
        call = InferCall(
            request_id=self._id,
            tenant=self._tenant,
            route=self._route_name,
            backend=backend.name,
            plugin=backend.plugin,
            model_id=backend.model.model_id,
            on_premises=instance.capabilities.on_premises,
            streamed=self._request.mode == "stream",
            attempt=self._attempts,
        )
        self._site.registry.notify("iaop_infer_started", call=call)
        error: BaseException | None = None
        try:
            await self._take_slot(backend)
            self._on_premises = self._on_premises is not False and call.on_premises
            async with aclosing(self._run(backend, instance, params)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BaseException as raised:
            error = raised
            raise
        finally:
            gone = isinstance(error, GeneratorExit | asyncio.CancelledError)
            self._site.registry.notify(
                "iaop_infer_finished",
                call=call,
                result=self._result,
                error=None if gone else error,
            )

    async def _make(self, backend: SiteBackend) -> InferenceBackend:
        """The backend's instance. Making one imports an SDK, which takes time."""
        instance = backend.find_instance()
        if instance is not None:
            return instance
        try:
            return await self._wait(bridge.in_thread(backend.instance), self._remaining_s())
        except IaopError:
            raise
        except TimeoutError:
            raise self._timed_out(backend) from None

    async def _reserve(self, params: GenerationParams) -> None:
        """Put the tenant's tokens aside, once for the whole call."""
        if self._request.tenant is not None and self._reservation is None:
            needed = self._prompt_estimate + (params.max_tokens or DEFAULT_MAX_TOKENS)
            self._reservation = await self._site.quotas.reserve(
                self._tenant, needed, self._wait, self._remaining_s()
            )

    async def _take_slot(self, backend: SiteBackend) -> None:
        limit_s = self._site.values.gateway.slot_wait_ms / 1000
        remaining_s = self._remaining_s()
        try:
            await backend.slots.acquire(self._wait, min(limit_s, remaining_s))
        except TimeoutError:
            if remaining_s <= limit_s:
                raise self._timed_out(backend) from None
            raise BackendUnavailableError(
                f"backend {backend.name!r} has had no free slot for {limit_s:g} s: all "
                f"{backend.slots.limit} are taken; try again, or raise max_concurrency or "
                "gateway.slot_wait_ms in the values",
                backend=backend.name,
                busy=True,
            ) from None

    async def _run(
        self, backend: SiteBackend, instance: InferenceBackend, params: GenerationParams
    ) -> AsyncGenerator[InferChunk, None]:
        request, slots = self._request, backend.slots
        began = time.perf_counter()
        try:
            work = start_work(
                instance,
                request.mode,
                request.prompt,
                request.context,
                params,
                on_end=slots.release,
            )
        except BaseException:
            slots.release()
            raise
        self._begun = True
        end: InferChunk | None = None
        with work:
            while True:
                try:
                    chunk = await self._wait(work.next(), self._remaining_s())
                except IaopError:
                    raise
                except (Exception, SystemExit) as error:
                    if isinstance(error, TimeoutError) and not self._remaining_s():
                        raise self._timed_out(backend) from None
                    raise BackendProtocolError(
                        f"backend {backend.name!r} raised {type(error).__name__}, which is outside "
                        "of the errors that the contract allows; tell its provider",
                        backend=backend.name,
                    ) from error
                if chunk is None:
                    break
                if not isinstance(chunk, InferChunk):
                    raise BackendProtocolError(
                        f"backend {backend.name!r} gave a {type(chunk).__name__} for an InferChunk",
                        backend=backend.name,
                    )
                if end is not None:
                    raise BackendProtocolError(
                        f"backend {backend.name!r} sent more after the end of its stream",
                        backend=backend.name,
                    )
                if chunk.result is not None:
                    end = chunk
                elif chunk.delta:
                    if self._first_ms is None and request.mode == "stream":
                        self._first_ms = (time.perf_counter() - self._started) * 1000
                    if request.mode == "stream":
                        self._delivered += chunk.delta
                        yield chunk
        if end is None or end.result is None:
            raise StreamInterruptedError(
                f"backend {backend.name!r} ended its stream without a result; the answer is not "
                "complete",
                backend=backend.name,
            )
        self._result = end.result
        if self._first_ms is None and end.result.time_to_first_token_ms is not None:
            waited_ms = (began - self._started) * 1000
            self._first_ms = waited_ms + end.result.time_to_first_token_ms
        yield end

    # -- time ------------------------------------------------------------------------------------

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - time.perf_counter())

    def _timed_out(self, backend: SiteBackend) -> BackendTimeoutError:
        return BackendTimeoutError(
            f"backend {backend.name!r} has not finished within the call's {self._timeout_ms:g} ms; "
            "lower max_tokens, or raise timeout_ms of the gateway or the route in the values",
            backend=backend.name,
            timeout_ms=self._timeout_ms,
        )

    async def _pause(self, seconds: float) -> None:
        never: Future[None] = Future()
        try:
            await self._wait(never, seconds)
        except TimeoutError:
            return

    # -- afterwards ------------------------------------------------------------------------------

    def _row(self, error: BaseException | None) -> AuditRow:
        result, last, outcome = self._result, self._last, _outcome(error)
        prompt_tokens = completion_tokens = 0
        if result is not None:
            prompt_tokens, completion_tokens = result.prompt_tokens, result.completion_tokens
        elif self._begun and (self._delivered or outcome in ("abandoned", "timed_out")):
            # The engine has worked without telling how much: what reached the caller is charged.
            prompt_tokens = self._prompt_estimate
            completion_tokens = estimate_tokens(self._delivered) if self._delivered else 0
        estimated = result.usage_estimated if result else prompt_tokens > 0
        return AuditRow(
            request_id=self._id,
            tenant=self._tenant,
            route=self._route_name,
            backend=last.name if last else "",
            plugin=last.plugin if last else "",
            model=result.model_id if result else last.model.model_id if last else "",
            on_premises=self._on_premises,
            streamed=self._request.mode == "stream",
            attempts=self._attempts,
            outcome=outcome,
            error_kind=_kind(error),
            finish_reason=result.finish_reason if result else "",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            usage_estimated=estimated,
            latency_ms=round((time.perf_counter() - self._started) * 1000, 3),
            time_to_first_token_ms=None if self._first_ms is None else round(self._first_ms, 3),
            offline=result.offline if result else False,
            device=result.device if result else self._device,
        )


def _order(route: RouteSettings) -> list[str]:
    """The route's backends in the order to try: a target by weight, the other ones, fallbacks."""
    targets = [target for target in route.targets if target.weight > 0]
    if len(targets) == 1:
        names = [targets[0].backend]
    else:
        first = random.choices(targets, [target.weight for target in targets])[0]  # noqa: S311
        names = [first.backend, *(target.backend for target in targets)]
    return list(dict.fromkeys([*names, *route.fallback]))


def _backoff_s(retry: int, failures: Sequence[IaopError]) -> float:
    told = [error.retry_after_s or 0.0 for error in failures if isinstance(error, RateLimitedError)]
    pause_s: float = _BACKOFF_S * 2**retry * random.uniform(0.5, 1.5)  # noqa: S311
    return max(pause_s, *told, 0.0)


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "ok"
    if isinstance(error, RequestError | ConfigurationError):
        return "refused"
    if isinstance(error, BackendTimeoutError):
        return "timed_out"
    return "failed" if isinstance(error, Exception) else "abandoned"


def _kind(error: BaseException | None) -> str:
    if isinstance(error, IaopError):
        return error.kind
    return "" if error is None or not isinstance(error, Exception) else type(error).__name__
