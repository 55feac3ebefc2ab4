"""The way to one OpenAI-compatible endpoint, over aiohttp, on core's event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from attrs import frozen

from iaop_cloud_api import _errors
from iaop_cloud_api.reply import Answer, StreamReply, read_answer
from iaop_cloud_api.settings import CloudApiSettings, sendable
from iaop_cloud_api.sse import EventTooLongError, SseReader
from iaop_core import InferChunk
from iaop_core.errors import (
    BackendProtocolError,
    BackendUnavailableError,
    IaopError,
    ModelLoadError,
    ServiceError,
    ValuesError,
)

__all__ = ["Endpoint", "ModelList"]

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MAX_LIST_BYTES = 8 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
# Many servers (uvicorn and Node among them) close a connection that was idle for 5 s. A request
# that meets the closing is lost with an error that forbids sending it again, so be the first.
_KEEPALIVE_S = 4.0
# After the text's end only the usage and [DONE] are owed; an answer is not failed for lack of them.
_TRAILER_MS = 2_000.0
# After [DONE] the end of the body is under way. Reading it leaves the connection fit for reuse.
_END_OF_BODY_MS = 100.0
_EVENTS = "text/event-stream"
_STREAM_TYPES = {"", _EVENTS, "text/plain", "application/octet-stream"}


@frozen
class ModelList:
    """What `GET /models` answered: the status, and the names, or None when there is no list."""

    status: int
    names: frozenset[str] | None


class Endpoint:
    """Sends requests with the settings' credentials; every failure is one of core's errors.

    The coroutines run on core's event loop. The session is made with the first of them.
    """

    def __init__(self, settings: CloudApiSettings, *, backend: str) -> None:
        self._settings = settings
        self._backend = backend
        parts = urlsplit(settings.base_url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._tls: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closings = 0

    def check(self) -> None:
        """Read the secrets and certificates. Raises `ValuesError` for one that can't be used."""
        self._headers("application/json")
        self._proxy()
        self._tls_context()

    async def answer(self, body: bytes, *, model: str, top_logprobs: int | None = None) -> Answer:
        """Post a request that is not streamed; `top_logprobs` as for `read_answer`."""
        limit_ms = self._settings.timeout_ms
        deadline = _now() + limit_ms / 1000
        async with self._slot(deadline):
            response = await self._post(body, "application/json", deadline, model=model)
            try:
                reply = await self._read(response, deadline, limit_ms, _MAX_ANSWER_BYTES)
            finally:
                response.release()
        return read_answer(reply, backend=self._backend, top_logprobs=top_logprobs)

    async def stream(
        self, body: bytes, *, model: str, top_logprobs: int | None = None
    ) -> AsyncGenerator[InferChunk | Answer]:
        """Post a streamed request: yields the texts as they come, and last the whole answer.

        Closing the generator closes the connection, which is how an endpoint learns of it.
        """
        limit_ms = self._settings.timeout_ms
        deadline = _now() + limit_ms / 1000
        async with self._slot(deadline):
            response = await self._post(body, _EVENTS, deadline, model=model)
            try:
                await self._check_stream_type(response, deadline)
                events = SseReader()
                reply = StreamReply(backend=self._backend, top_logprobs=top_logprobs)
                started = trailing = False
                while not reply.done:
                    try:
                        piece = await self._step(
                            response.content.readany(), deadline, limit_ms, in_stream=True
                        )
                    except ServiceError:
                        if trailing:
                            break
                        raise
                    if not piece:
                        break
                    for data in self._events(events, piece):
                        started = True
                        if text := reply.read(data):
                            yield InferChunk(text, logprobs=reply.told())
                        if reply.done:
                            break
                    if started and not trailing:
                        trailing = reply.finished
                        limit_ms = _TRAILER_MS if trailing else self._settings.idle_timeout_ms
                        deadline = _now() + limit_ms / 1000
                if text := reply.rest():
                    yield InferChunk(text, logprobs=reply.told())
                answer = reply.answer()
                if reply.done:
                    await self._read_to_end(response)
            finally:
                response.release()  # closes the connection unless the body was read to its end
        yield answer

    async def models(self, timeout_ms: float) -> ModelList:
        """Ask for the list of models, which costs nothing. Never waits for a free slot."""
        response, body = await self._get_models(timeout_ms)
        return ModelList(response.status, _names(body) if response.status == 200 else None)

    async def verify(self, model: str) -> None:
        """Raise `ModelLoadError` unless the endpoint lists the model; or the error it answers."""
        response, body = await self._get_models(self._settings.timeout_ms)
        if response.status != 200:
            raise self._refusal(response, body, model)
        names = _names(body)
        if names is None or model not in names:
            what = "no list of models" if names is None else f"{len(names)} models without it"
            raise ModelLoadError(
                f"backend {self._backend!r} can't verify the model {model!r}: {self.origin} lists "
                f"{what}; check model and base_url, or set verify_model to false",
                backend=self._backend,
                model=model,
            )

    async def close(self) -> None:
        """Close every connection; calls that are under way fail. A later call opens new ones."""
        self._adopt_loop()
        self._closings += 1
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        self._adopt_loop()
        slots, closings = self._slots, self._closings
        try:
            async with asyncio.timeout_at(deadline):
                await slots.acquire()
        except TimeoutError:
            raise BackendUnavailableError(
                f"backend {self._backend!r}: none of its max_concurrency="
                f"{self._settings.max_concurrency} slots came free within "
                f"timeout_ms={self._settings.timeout_ms:g}; nothing was sent",
                backend=self._backend,
            ) from None
        try:
            if self._closings != closings:
                raise BackendUnavailableError(
                    f"backend {self._backend!r} was unloaded while the call waited for a slot; "
                    "nothing was sent",
                    backend=self._backend,
                )
            yield
        finally:
            slots.release()

    async def _post(
        self, body: bytes, accept: str, deadline: float, *, model: str
    ) -> aiohttp.ClientResponse:
        """Send the request; returns the answer with status 200, its body still to be read."""
        limit_ms = self._settings.timeout_ms
        headers = {**self._headers(accept), "Content-Type": "application/json"}
        if accept == _EVENTS and self.origin.startswith("http:"):
            # Some servers (llama.cpp's among them) close a connection after a stream without
            # announcing it, and a request that comes before that is seen is lost. Without TLS a
            # new one costs next to nothing.
            headers["Connection"] = "close"
        response = await self._step(
            self._current_session().post(
                f"{self._settings.base_url}/chat/completions",
                data=body,
                headers=headers,
                proxy=self._proxy(),
                allow_redirects=False,
            ),
            deadline,
            limit_ms,
        )
        if response.status == 200:
            return response
        try:
            told = await self._read(response, deadline, limit_ms, _MAX_ERROR_BYTES, cut=True)
        except IaopError:
            told = b""  # the status says enough
        finally:
            response.release()
        raise self._refusal(response, told, model)

    async def _get_models(self, timeout_ms: float) -> tuple[aiohttp.ClientResponse, bytes]:
        deadline = _now() + timeout_ms / 1000
        response = await self._step(
            self._current_session().get(
                f"{self._settings.base_url}/models",
                headers=self._headers("application/json"),
                proxy=self._proxy(),
                allow_redirects=False,
            ),
            deadline,
            timeout_ms,
        )
        try:
            return response, await self._read(response, deadline, timeout_ms, _MAX_LIST_BYTES)
        finally:
            response.release()

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes, model: str) -> IaopError:
        return _errors.from_status(
            response.status,
            response.headers,
            body,
            backend=self._backend,
            origin=self.origin,
            model=model,
        )

    async def _check_stream_type(self, response: aiohttp.ClientResponse, deadline: float) -> None:
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type in _STREAM_TYPES:
            return
        if content_type == "application/json":
            body = await self._read(
                response, deadline, self._settings.timeout_ms, _MAX_ANSWER_BYTES
            )
            read_answer(body, backend=self._backend)  # raises the error that it most likely is
        raise BackendProtocolError(
            f"backend {self._backend!r}: {self.origin} answered a streamed request with no event "
            "stream; does it, or a proxy before it, not stream?",
            backend=self._backend,
        )

    def _events(self, reader: SseReader, piece: bytes) -> list[str]:
        try:
            return reader.feed(piece)
        except EventTooLongError:
            raise BackendProtocolError(
                f"backend {self._backend!r}: {self.origin} sent an event of endless length",
                backend=self._backend,
            ) from None

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        deadline: float,
        limit_ms: float,
        max_bytes: int,
        *,
        cut: bool = False,
    ) -> bytes:
        """The body. One that is too long is cut, or else a `BackendProtocolError`."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self._step(response.content.readany(), deadline, limit_ms):
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                if cut:
                    break
                raise BackendProtocolError(
                    f"backend {self._backend!r}: {self.origin} sent more than {max_bytes} bytes",
                    backend=self._backend,
                )
        return b"".join(pieces)

    async def _read_to_end(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(_END_OF_BODY_MS / 1000):
                await response.content.readany()
        except (TimeoutError, aiohttp.ClientError):
            pass  # the answer is whole; only the connection is not used again

    async def _step(
        self,
        awaitable: Awaitable[T],
        deadline: float,
        limit_ms: float,
        *,
        in_stream: bool = False,
    ) -> T:
        """Await one step of an exchange, until the deadline, which comes of the limit."""
        try:
            async with asyncio.timeout_at(deadline):
                return await awaitable
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            failure = _errors.from_client_error(
                error,
                backend=self._backend,
                origin=self.origin,
                timeout_ms=limit_ms,
                connect_timeout_ms=self._settings.connect_timeout_ms,
                in_stream=in_stream,
            )
        # Outside of the handler, so that the error of aiohttp, which holds the request's headers
        # and with them the key, does not become the context of this one.
        raise failure

    def _adopt_loop(self) -> None:
        # Core's loop is one for the life of a process; a forked child gets another.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._session = None
            self._slots = asyncio.Semaphore(self._settings.max_concurrency)

    def _current_session(self) -> aiohttp.ClientSession:
        self._adopt_loop()
        if self._session is None:
            connect_s = self._settings.connect_timeout_ms / 1000
            self._session = aiohttp.ClientSession(
                # The slots limit the connections. A limit here would make the health probe wait for
                # streams to end.
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=self._tls_context(), keepalive_timeout=_KEEPALIVE_S
                ),
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=connect_s, sock_connect=connect_s
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            settings = self._settings
            for name in ("ca_file", "client_cert_file", "client_key_file"):
                _require_readable(getattr(settings, name), name)
            name = "ca_file"
            try:
                context = ssl.create_default_context(cafile=settings.ca_file)
                name = "client_cert_file"
                if settings.client_cert_file is not None:
                    # Without a password callback OpenSSL would ask on the terminal.
                    context.load_cert_chain(
                        settings.client_cert_file, settings.client_key_file, password=lambda: b""
                    )
            except ssl.SSLError as error:
                raise ValuesError(
                    f"{name}: it can't be used: {error.reason or 'it holds no PEM certificate'}",
                    path=name,
                ) from None
            self._tls = context
        return self._tls

    def _headers(self, accept: str) -> dict[str, str]:
        # Revealed for each request, so that a rotated key is used at once.
        settings = self._settings
        headers = {
            "Accept": accept,
            "Accept-Encoding": "identity",  # a compressor would hold a stream's events back
            "User-Agent": "iaop-cloud-api",
        }
        if settings.organization:
            headers["OpenAI-Organization"] = settings.organization
        if settings.api_key is not None:
            headers["Authorization"] = f"Bearer {sendable(settings.api_key.reveal(), 'api_key')}"
        for name, value in settings.headers.items():
            if not isinstance(value, str):
                value = sendable(value.reveal(), f"headers.{name}")
            headers[name] = value
        return headers

    def _proxy(self) -> str | None:
        proxy = self._settings.proxy
        if isinstance(proxy, str):
            return proxy or None
        address = proxy.reveal()
        if urlsplit(address).scheme not in ("http", "https"):
            raise ValuesError(
                "proxy is an address such as http://proxy.example.com:3128", path="proxy"
            )
        return address


def _now() -> float:
    return asyncio.get_running_loop().time()


def _require_readable(path: str | None, name: str) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValuesError(f"{name}: {path} can't be read: {error.strerror}", path=name) from None


def _names(body: bytes) -> frozenset[str] | None:
    """The names in a list of models, aliases among them; None when it is no such list."""
    try:
        entries: Any = json.loads(body)["data"]
        names = {entry["id"] for entry in entries}
        names.update(alias for entry in entries for alias in entry.get("aliases") or ())
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return frozenset(name for name in names if isinstance(name, str))
