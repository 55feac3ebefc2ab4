"""Triton over HTTP: the KServe v2 endpoints, the repository and the generate extensions.

Answers come by `generate_stream`, plain ones too: Triton's HTTP inference refuses models that may
give several responses, as every streaming model may. tritonclient's HTTP client has no generate
extension; what else it has is a handful of JSON requests, so aiohttp does all of it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from iaop_core.errors import BackendProtocolError, IaopError
from iaop_gpu_triton import _errors
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.credentials import Credentials
from iaop_gpu_triton.response_stream import ResponseStream
from iaop_gpu_triton.settings import NAME, GpuTritonSettings
from iaop_gpu_triton.tensors import ModelMetadata, ModelState, Response, Tensor, TensorSpec, Value

_LINE_END = re.compile(rb"\r\n|\r|\n")  # U+2028 and U+0085 are text
_NOT_OUTPUTS = frozenset({"model_name", "model_version", "id"})
_STATUS_NAMES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}
_LARGE_BYTES = 1 << 20
_GATEWAY_STATUSES = frozenset({502, 503, 504})
_USER_TIMEOUT_MS = 10_000


class HttpTransport:
    """A `Transport` over HTTP."""

    cancels_at_once = False

    def __init__(
        self, address: ServerAddress, settings: GpuTritonSettings, credentials: Credentials
    ) -> None:
        self._shown = address.host_port
        self._base = f"{address}/v2"
        self._settings = settings
        self._credentials = credentials
        self._readers: set[asyncio.Task[None]] = set()
        # The backend bounds calls itself and keeps time for each: aiohttp's limits, of 100
        # connections and five minutes for the whole of an answer, would only get in its way.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=credentials.ssl_context() if address.tls else True,
                socket_factory=self._socket,
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_ms / 1000
            ),
        )

    def _socket(self, info: Any) -> socket.socket:
        """A socket that notices when its peer is gone without a word."""
        family, kind, protocol, _, _ = info
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = math.ceil(self._settings.keepalive_ms / 1000)
        for name, value in (
            ("TCP_KEEPIDLE", seconds),
            ("TCP_KEEPINTVL", min(seconds, _USER_TIMEOUT_MS // 1000)),
            ("TCP_KEEPCNT", 1),
            ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS),
        ):
            if hasattr(socket, name):  # not on every system
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return made

    async def server_live(self, *, timeout_s: float) -> bool:
        return await self._is_ok("health/live", timeout_s)

    async def model_ready(self, model: str, version: str, *, timeout_s: float) -> bool:
        return await self._is_ok(f"{_path(model, version)}/ready", timeout_s)

    async def model_metadata(self, model: str, version: str, *, timeout_s: float) -> ModelMetadata:
        path = _path(model, version)
        answer = await self._ask("GET", path, timeout_s, model=model)
        decoupled, required = await self._configuration(path, timeout_s)
        try:
            inputs, outputs = _specs(answer["inputs"]), _specs(answer["outputs"])
        except (KeyError, TypeError) as error:
            raise self._unreadable() from error
        return ModelMetadata(model, inputs, outputs, decoupled, required)

    async def _configuration(
        self, path: str, timeout_s: float
    ) -> tuple[bool | None, frozenset[str]]:
        try:
            config = await self._ask("GET", f"{path}/config", timeout_s)
            inputs = config["input"]
            required = frozenset(t["name"] for t in inputs if not t.get("optional"))
            policy = config.get("model_transaction_policy") or {}
        except (BackendProtocolError, KeyError, TypeError, AttributeError):
            return None, frozenset()  # a server of the protocol that is no Triton
        return bool(policy.get("decoupled")), required

    async def model_statistics(
        self, model: str, version: str, *, timeout_s: float
    ) -> list[Mapping[str, Any]]:
        answer = await self._ask("GET", f"{_path(model, version)}/stats", timeout_s, model=model)
        try:
            return list(answer["model_stats"])
        except (KeyError, TypeError) as error:
            raise self._unreadable() from error

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        answer = await self._ask("POST", "repository/index", timeout_s)
        fields = ("name", "version", "state", "reason")
        try:
            return [ModelState(*(str(model.get(name, "")) for name in fields)) for model in answer]
        except (AttributeError, TypeError) as error:
            raise self._unreadable() from error

    async def load(
        self, model: str, *, config: str, files: Mapping[str, bytes], timeout_s: float
    ) -> None:
        parameters = {f"file:{name}": base64.b64encode(c).decode() for name, c in files.items()}
        if config:
            parameters["config"] = config
        path = f"repository/{_path(model, '')}/load"
        body = {"parameters": parameters} if parameters else {}
        await self._ask("POST", path, timeout_s, model=model, body=body)

    async def unload(self, model: str, *, timeout_s: float) -> None:
        await self._ask("POST", f"repository/{_path(model, '')}/unload", timeout_s, model=model)

    async def _is_ok(self, path: str, timeout_s: float) -> bool:
        status, body = await self._request("GET", path, timeout_s)
        if status in _STATUS_NAMES:
            raise self._failed(status, body)
        return status == 200

    async def _ask(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        model: str = "",
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        status, answer = await self._request(method, path, timeout_s, body)
        if status != 200:
            message = _error_in(answer)
            if model and message is not None and status not in _STATUS_NAMES:
                raise _errors.load_error(message, server=self._shown, model=model)
            raise self._failed(status, answer)
        try:
            return json.loads(answer or b"null")
        except ValueError as error:
            raise self._unreadable() from error

    async def _request(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, f"{self._base}/{path}", data=data, headers=self._credentials.headers()
                ) as answer,
            ):
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error, timeout_s=timeout_s) from error

    async def generate(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        *,
        prompt: str,
        single: bool,
    ) -> ResponseStream:
        body = json.dumps({t.spec.name: _plain(t) for t in tensors}, ensure_ascii=False).encode()
        limit = self._settings.max_message_bytes
        if len(body) > limit:
            raise _errors.request_too_large(len(body), limit)
        if self._session.closed:
            raise _errors.unreachable(self._shown, "the backend was unloaded")
        stream = ResponseStream()
        path = f"{_path(model, version)}/generate_stream"
        reader = asyncio.ensure_future(self._read(stream, path, body, model, prompt))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

        def leave() -> None:
            reader.cancel()

        stream.on_leave = leave
        return stream

    async def _read(
        self, stream: ResponseStream, path: str, body: bytes, model: str, prompt: str
    ) -> None:
        def model_error(message: str) -> IaopError:
            return _errors.inference_error(
                message,
                server=self._shown,
                model=model,
                prompt=prompt,
                answering=stream.answering,
            )

        try:
            # Leaving the block before the end of the body closes the connection.
            async with self._session.post(
                f"{self._base}/{path}",
                data=_in_pieces(body),
                headers=self._credentials.headers(),
            ) as answer:
                if answer.status != 200:
                    text = await answer.read()
                    message = _error_in(text)
                    if message is None or answer.status in _STATUS_NAMES:
                        raise self._failed(answer.status, text, prompt)
                    raise model_error(message)
                lines = _Lines(self._settings.max_message_bytes)
                async for data in answer.content.iter_any():
                    for event in lines.feed(data):
                        values = self._event(event)
                        if "error" in values:
                            raise model_error(str(values["error"]))
                        stream.put(Response(_outputs(values)))
            if not stream.answering or lines.rest:
                raise _errors.ended_early(self._shown, model)
            stream.end()
        except (aiohttp.ClientError, TimeoutError) as error:
            stream.fail(self._lost(error, answering=stream.answering))
        except IaopError as error:
            stream.fail(error)
        except asyncio.CancelledError:
            stream.fail(_errors.lost(self._shown, "cancelled", answering=stream.answering))
            raise
        except Exception as error:
            stream.fail(_errors.unexpected(error))

    def _event(self, event: bytes) -> Mapping[str, Any]:
        try:
            # Triton copies a model's bytes as they are, also half a character.
            values = json.loads(event.decode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise self._unreadable() from error
        if not isinstance(values, dict):
            raise self._unreadable()
        return values

    def _lost(
        self, error: Exception, *, timeout_s: float = 0, answering: bool = False
    ) -> IaopError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            ms = self._settings.connect_timeout_ms
            return _errors.unreachable(self._shown, f"no connection within {ms} ms")
        if isinstance(error, TimeoutError):
            return _errors.timed_out(self._shown, timeout_s, "answer")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return _errors.unreachable(self._shown, str(error.certificate_error))
        if isinstance(error, aiohttp.ClientConnectorError):
            told = str(error.os_error) or "it closed the connection in the TLS handshake"
            return _errors.unreachable(self._shown, told)
        if isinstance(error, aiohttp.ClientResponseError):
            # Its own text quotes what came.
            return _errors.unreachable(self._shown, "what it sends is not HTTP")
        return _errors.lost(self._shown, str(error), answering=answering)

    def _failed(self, status: int, body: bytes, prompt: str = "") -> IaopError:
        message = _error_in(body) or f"HTTP status {status}"
        if status in _GATEWAY_STATUSES:
            return _errors.lost(self._shown, message, answering=False, prompt=prompt)
        return _errors.status_error(
            _STATUS_NAMES.get(status, f"HTTP {status}"),
            message,
            server=self._shown,
            timeout_s=None,
            answering=False,
            prompt=prompt,
        )

    def _unreadable(self) -> BackendProtocolError:
        return BackendProtocolError(
            f"the server at {self._shown} sent something that is not Triton's protocol; is that "
            "Triton's HTTP port?",
            backend=NAME,
        )

    def reconnect(self) -> None:
        pass  # a call that was left closes its own connection

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)
        await self._session.close()


class _Lines:
    """Reads the `data:` lines of an event stream from its bytes, cut anywhere.

    Triton writes one JSON text in one line for each event, so that a line is an event.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def rest(self) -> bytes:
        """What has come of a line without its end."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> Iterator[bytes]:
        rest, *begun = _LINE_END.split(data)
        self._extend(rest)
        for part in begun:
            line = self.rest
            self._parts, self._size = [], 0
            self._extend(part)
            if line.startswith(b"data:"):
                yield line[5:]

    def _extend(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._longest:
            raise _errors.response_too_large(self._longest)
        if part:
            self._parts.append(part)


def _in_pieces(body: bytes) -> bytes | io.BytesIO:
    """A large body in a form that aiohttp sends without holding up the event loop."""
    return io.BytesIO(body) if len(body) > _LARGE_BYTES else body


def _path(model: str, version: str) -> str:
    path = f"models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _plain(tensor: Tensor) -> Any:
    """The values as the generate extension has them: several as a list."""
    values = [v.decode() if isinstance(v, bytes) else v for v in tensor.values]
    return values[0] if len(values) == 1 else values


def _specs(tensors: Sequence[Mapping[str, Any]]) -> dict[str, TensorSpec]:
    return {
        t["name"]: TensorSpec(t["name"], t["datatype"], tuple(map(int, t["shape"])))
        for t in tensors
    }


def _outputs(values: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    return {name: _flat(value) for name, value in values.items() if name not in _NOT_OUTPUTS}


def _flat(value: Any) -> tuple[Value, ...]:
    if isinstance(value, list):
        return tuple(part for item in value for part in _flat(item))
    return (value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value,)


def _error_in(body: bytes) -> str | None:
    """The `error` of a JSON answer, or of the first event of a stream."""
    text = body.strip().removeprefix(b"data:")
    try:
        values = json.loads(text)
    except ValueError:
        return None
    error = values.get("error") if isinstance(values, dict) else None
    return None if error is None else str(error)
