"""An upstream of the tests' own, on loopback, that misbehaves as told.

It speaks HTTP/1.1 over raw asyncio streams, so that a test decides about every byte, and when the
connection breaks. It runs in a thread of its own, and records what it was asked::

    with FaultyUpstream() as upstream:
        upstream.answer(events(chunk("Hi"), CUT))
        ...
        assert upstream.calls[0].body["stream"]
"""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias

from attrs import Factory, define, field, frozen


class Fault(enum.Enum):
    """What happens to the connection instead of more bytes."""

    CUT = "the connection is closed"
    RESET = "the connection is reset"
    SILENCE = "nothing more is sent until the client leaves"


CUT, RESET, SILENCE = Fault.CUT, Fault.RESET, Fault.SILENCE

Step: TypeAlias = bytes | float | Fault
"""Bytes are sent at once, in a segment of their own; a number is a pause in seconds."""

DONE = b"data: [DONE]\n\n"


@frozen
class Reply:
    """The steps of an answer, its head included. The connection stays open only when told."""

    steps: Sequence[Step]
    keep_open: bool = False


@define
class Call:
    """One request as it arrived, and when its client closed the connection."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    raw_body: bytes
    connection: int
    """Number of the connection that it came on, from 0."""
    at: float = Factory(time.monotonic)
    left: threading.Event = field(factory=threading.Event)
    """Set when the client closed the connection before the answer's end."""
    left_at: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw_body)  # type: ignore[no-any-return]


def head(
    status: int = 200, *, length: int | None = None, chunked: bool = False, **headers: Any
) -> bytes:
    """The head of an answer. `Content_Type="…"` is the header Content-Type."""
    lines = [f"HTTP/1.1 {status} Reason"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    elif chunked:
        lines.append("Transfer-Encoding: chunked")
    else:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def json_reply(body: object, status: int = 200, **headers: Any) -> Reply:
    """A whole JSON answer, after which the connection stays open."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    start = head(status, length=len(encoded), Content_Type="application/json", **headers)
    return Reply([start + encoded], keep_open=True)


def events(*steps: Step, content_type: str = "text/event-stream") -> Reply:
    """An event stream that ends when the connection closes, as HTTP allows."""
    return Reply([head(Content_Type=content_type), *steps])


def chunked_events(*steps: Step) -> Reply:
    """An event stream in chunked coding: without `CUT` it has the coding's own end."""
    coded = [
        b"%x\r\n%s\r\n" % (len(step), step) if isinstance(step, bytes) else step for step in steps
    ]
    end: list[Step] = [] if isinstance(steps[-1], Fault) else [b"0\r\n\r\n"]
    start = head(chunked=True, Content_Type="text/event-stream")
    return Reply([start, *coded, *end], keep_open=True)


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def chunk(
    content: str | None = None, *, finish: str | None = None, usage: object = None, **delta: object
) -> bytes:
    """The event of one chunk with one choice."""
    if content is not None:
        delta["content"] = content
    data: dict[str, Any] = {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if usage is not None:
        data["usage"] = usage
    return event(data)


def usage_chunk(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event that carries the usage alone, with empty choices."""
    return event({"choices": [], "usage": usage(prompt_tokens, completion_tokens)})


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion(content: object, *, finish: str | None = "stop", **more: object) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    message = {"role": "assistant", "content": content}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}


def error(message: str = "", **more: object) -> dict[str, Any]:
    """The body of an error, in the API's own shape."""
    return {"error": {"message": message, **more}}


class FaultyUpstream:
    """Answers the requests to each path by its script; `calls` are all requests so far."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.calls: list[Call] = []
        self._scripts: dict[str, list[Reply]] = {}
        self._connections = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._tls = tls
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultyUpstream:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(5)
        port = self._server.sockets[0].getsockname()[1]
        self.port: int = port
        self.origin = f"{'https' if self._tls else 'http'}://{self._host}:{port}"
        self.base_url = f"{self.origin}/v1"
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def answer(self, *replies: Reply, path: str = "/v1/chat/completions") -> None:
        """Answer the next requests to the path so, the last reply again and again."""
        self._scripts[path] = list(replies)

    @property
    def posts(self) -> list[Call]:
        return [call for call in self.calls if call.method == "POST"]

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)

    async def _stop(self) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        number, self._connections = self._connections, self._connections + 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while await self._serve_one(reader, writer, number):
                pass
        writer.transport.abort() if writer.transport.is_closing() else writer.close()
        self._handlers.discard(task)

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        call = await _read_call(reader, number)
        self.calls.append(call)
        script = self._scripts.get(call.path)
        if not script:
            reply = json_reply(error("not scripted"), 404)
        else:
            reply = script.pop(0) if len(script) > 1 else script[0]
        leaving = asyncio.create_task(_left(reader))
        playing = asyncio.create_task(_play(reply.steps, writer))
        try:
            await asyncio.wait({leaving, playing}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                call.left_at = time.monotonic()
                call.left.set()
                return False
            return await playing and reply.keep_open
        finally:
            for task in (leaving, playing):
                task.cancel()
            await asyncio.wait({leaving, playing})


async def _read_call(reader: asyncio.StreamReader, number: int) -> Call:
    start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = start.split(" ")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(method, target, headers, body, number)


async def _left(reader: asyncio.StreamReader) -> None:
    """Wait until the client has closed the connection. Reading would take the next request."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)


async def _play(steps: Sequence[Step], writer: asyncio.StreamWriter) -> bool:
    """Send the steps; whether the connection can stay open."""
    for step in steps:
        match step:
            case bytes():
                writer.write(step)
                await writer.drain()
            case Fault.CUT:
                return False
            case Fault.RESET:
                # No lingering: closing sends a reset.
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            case Fault.SILENCE:
                await asyncio.Event().wait()
            case _:
                await asyncio.sleep(step)
    return True
