"""Triton over HTTP: the KServe v2 endpoints, the repository and the generate extensions.

Answers come by `generate_stream`, plain ones too: Triton's HTTP inference refuses models that may
give several responses, as every streaming model may. tritonclient's HTTP client has no generate
extension; what else it has is a handful of JSON requests, so aiohttp does all of it.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from iaop_core.errors import BackendProtocolError, IaopError
from iaop_gpu_triton import _errors
from iaop_gpu_triton.settings import NAME
from iaop_gpu_triton.tensors import ModelMetadata, ModelState, Response, Tensor, TensorSpec, Value

_LINE_END = re.compile(rb"\r\n|\r|\n")  # U+2028 and U+0085 are text
_NOT_OUTPUTS = frozenset({"model_name", "model_version", "id"})
_STATUS_NAMES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}
_LARGE_BYTES = 1 << 20
_GATEWAY_STATUSES = frozenset({502, 503, 504})


class HttpTransport:
    """A `Transport` over HTTP; `address` is `host:port`."""

    cancels_at_once = False

    def __init__(self, address: str) -> None:
        self._address = address
        self._base = f"http://{address}/v2"
        # The backend bounds calls itself and keeps time for each: aiohttp's limits, of 100
        # connections and five minutes for the whole of an answer, would only get in its way.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )

    async def server_live(self, *, timeout_s: float) -> bool:
        return await self._is_ok("health/live", timeout_s)

    async def model_ready(self, model: str, version: str, *, timeout_s: float) -> bool:
        return await self._is_ok(f"{_path(model, version)}/ready", timeout_s)

    async def model_metadata(self, model: str, version: str, *, timeout_s: float) -> ModelMetadata:
        answer = await self._ask("GET", _path(model, version), timeout_s, model=model)
        try:
            return ModelMetadata(model, _specs(answer["inputs"]), _specs(answer["outputs"]))
        except (KeyError, TypeError) as error:
            raise self._unreadable() from error

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        answer = await self._ask("POST", "repository/index", timeout_s)
        fields = ("name", "version", "state", "reason")
        try:
            return [ModelState(*(str(model.get(name, "")) for name in fields)) for model in answer]
        except (AttributeError, TypeError) as error:
            raise self._unreadable() from error

    async def load(self, model: str, *, timeout_s: float) -> None:
        await self._ask("POST", f"repository/{_path(model, '')}/load", timeout_s, model=model)

    async def unload(self, model: str, *, timeout_s: float) -> None:
        await self._ask("POST", f"repository/{_path(model, '')}/unload", timeout_s, model=model)

    async def _is_ok(self, path: str, timeout_s: float) -> bool:
        status, body = await self._request("GET", path, timeout_s)
        if status in _STATUS_NAMES:
            raise self._failed(status, body)
        return status == 200

    async def _ask(self, method: str, path: str, timeout_s: float, *, model: str = "") -> Any:
        status, body = await self._request(method, path, timeout_s)
        if status != 200:
            message = _error_in(body)
            if model and message is not None and status not in _STATUS_NAMES:
                raise _errors.load_error(message, server=self._address, model=model)
            raise self._failed(status, body)
        try:
            return json.loads(body or b"null")
        except ValueError as error:
            raise self._unreadable() from error

    async def _request(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        data = b"{}" if method == "POST" else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, f"{self._base}/{path}", data=data) as answer,
            ):
                return answer.status, await answer.read()
        except TimeoutError as error:
            raise _errors.timed_out(self._address, timeout_s, "answer") from error
        except aiohttp.ClientConnectorError as error:
            raise _errors.unreachable(self._address, str(error.os_error)) from error
        except aiohttp.ClientError as error:
            raise _errors.lost(self._address, str(error), answering=False) from error

    async def generate(
        self, model: str, version: str, tensors: Sequence[Tensor]
    ) -> AsyncGenerator[Response, None]:
        inputs = {
            t.spec.name: t.value.decode() if isinstance(t.value, bytes) else t.value
            for t in tensors
        }
        prompt = str(inputs.get("text_input", ""))
        body = json.dumps(inputs, ensure_ascii=False).encode()
        url = f"{self._base}/{_path(model, version)}/generate_stream"
        answering = False

        def model_error(message: str) -> IaopError:
            return _errors.inference_error(
                message, server=self._address, model=model, prompt=prompt
            )

        try:
            # Leaving the block before the end of the body closes the connection.
            async with self._session.post(url, data=_in_pieces(body)) as answer:
                if answer.status != 200:
                    text = await answer.read()
                    message = _error_in(text)
                    if message is None or answer.status in _STATUS_NAMES:
                        raise self._failed(answer.status, text)
                    raise model_error(message)
                lines = _Lines()
                async for data in answer.content.iter_any():
                    for event in lines.feed(data):
                        values = self._event(event)
                        if "error" in values:
                            raise model_error(str(values["error"]))
                        answering = True
                        yield Response(_outputs(values))
        except aiohttp.ClientConnectorError as error:
            raise _errors.unreachable(self._address, str(error.os_error)) from error
        except aiohttp.ClientError as error:
            raise _errors.lost(self._address, str(error), answering=answering) from error
        if not answering or lines.rest:
            raise _errors.ended_early(self._address, model)

    def _event(self, event: bytes) -> Mapping[str, Any]:
        try:
            # Triton copies a model's bytes as they are, also half a character.
            values = json.loads(event.decode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise self._unreadable() from error
        if not isinstance(values, dict):
            raise self._unreadable()
        return values

    def _failed(self, status: int, body: bytes) -> IaopError:
        message = _error_in(body) or f"HTTP status {status}"
        if status in _GATEWAY_STATUSES:
            return _errors.lost(self._address, message, answering=False)
        return _errors.status_error(
            _STATUS_NAMES.get(status, f"HTTP {status}"),
            message,
            server=self._address,
            timeout_s=None,
            answering=False,
        )

    def _unreadable(self) -> BackendProtocolError:
        return BackendProtocolError(
            f"the server at {self._address} sent something that is not Triton's protocol; is that "
            "Triton's HTTP port?",
            backend=NAME,
        )

    def is_connected(self) -> bool:
        return True  # aiohttp does not tell; each call that fails says so itself

    def reconnect(self) -> None:
        pass  # a call that was left closes its own connection

    async def close(self) -> None:
        await self._session.close()


class _Lines:
    """Reads the `data:` lines of an event stream from its bytes, cut anywhere.

    Triton writes one JSON text in one line for each event, so that a line is an event.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *whole, self.rest = _LINE_END.split(self.rest + data)
        for line in whole:
            if line.startswith(b"data:"):
                yield line[5:]


def _in_pieces(body: bytes) -> bytes | io.BytesIO:
    """A large body in a form that aiohttp sends without holding up the event loop."""
    return io.BytesIO(body) if len(body) > _LARGE_BYTES else body


def _path(model: str, version: str) -> str:
    path = f"models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


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
