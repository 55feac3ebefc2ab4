"""Triton over gRPC: tritonclient's generated protocol on a channel of our own.

tritonclient's asyncio client is not used, because it can't ask for `triton_final_response`, the
server's statement that an answer is whole; without it a stream that was cut looks like its end.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import (  # type: ignore[import-untyped]
    service_pb2,
    service_pb2_grpc,
)

from iaop_core.errors import BackendProtocolError, IaopError
from iaop_gpu_triton import _errors
from iaop_gpu_triton.settings import NAME
from iaop_gpu_triton.tensors import (
    ModelMetadata,
    ModelState,
    Response,
    Tensor,
    TensorSpec,
    Value,
)

_FINAL = "triton_final_response"
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Triton's default tolerates a ping each five minutes. The time-out is what counts: with
    # keepalive on it is also TCP_USER_TIMEOUT, so that sent data which nobody acknowledges ends
    # the connection.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Otherwise a new channel to the same server takes over the connection of the old one.
    ("grpc.use_local_subchannel_pool", 1),
)
_CLOSE_GRACE_S = 3600.0  # for calls under way on a channel that was replaced
# How long a call that its reader has left may still end by itself. Many releases of Triton crash,
# or never answer again, when a request is cancelled in the moment in which it ends: an answer that
# is whole, or nearly so, is let end instead.
_LEAVE_AFTER_S = 0.1
_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "UINT8": "B",
    "INT16": "h",
    "UINT16": "H",
    "INT32": "i",
    "UINT32": "I",
    "INT64": "q",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}


class GrpcTransport:
    """A `Transport` over gRPC; `address` is `host:port`."""

    cancels_at_once = True

    def __init__(self, address: str) -> None:
        self._address = address
        self._readers: set[asyncio.Task[None]] = set()
        self._replaced: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._open()

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def server_live(self, *, timeout_s: float) -> bool:
        request = service_pb2.ServerLiveRequest()
        return bool((await self._call("ServerLive", request, timeout_s)).live)

    async def model_ready(self, model: str, version: str, *, timeout_s: float) -> bool:
        request = service_pb2.ModelReadyRequest(name=model, version=version)
        return bool((await self._call("ModelReady", request, timeout_s)).ready)

    async def model_metadata(self, model: str, version: str, *, timeout_s: float) -> ModelMetadata:
        request = service_pb2.ModelMetadataRequest(name=model, version=version)
        answer = await self._call("ModelMetadata", request, timeout_s, model=model)
        return ModelMetadata(model, _specs(answer.inputs), _specs(answer.outputs))

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        request = service_pb2.RepositoryIndexRequest()
        answer = await self._call("RepositoryIndex", request, timeout_s)
        return [ModelState(m.name, m.version, m.state, m.reason) for m in answer.models]

    async def load(self, model: str, *, timeout_s: float) -> None:
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        await self._call("RepositoryModelLoad", request, timeout_s, model=model)

    async def unload(self, model: str, *, timeout_s: float) -> None:
        request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        await self._call("RepositoryModelUnload", request, timeout_s, model=model)

    async def _call(self, method: str, request: Any, timeout_s: float, *, model: str = "") -> Any:
        channel = self._channel
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            # Triton answers questions about a model with statuses that also have other meanings.
            refused = model and not _is_transport_failure(error)
            if refused and error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise _errors.load_error(
                    error.details() or "", server=self._address, model=model
                ) from error
            raise self._failed(error, channel, timeout_s) from error

    async def generate(
        self, model: str, version: str, tensors: Sequence[Tensor]
    ) -> AsyncGenerator[Response, None]:
        channel = self._channel
        call = self._stub.ModelStreamInfer(_only(_request(model, version, tensors)))
        messages: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.ensure_future(_read(call, messages))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        answering = knows_final = is_final = False
        try:
            while (message := await messages.get()) is not None:
                if isinstance(message, grpc.aio.AioRpcError):
                    raise self._failed(message, channel, None, answering=answering) from message
                if message.error_message:
                    raise _errors.inference_error(
                        message.error_message,
                        server=self._address,
                        model=model,
                        prompt=_prompt_of(tensors),
                    )
                response = message.infer_response
                if _FINAL in response.parameters:
                    knows_final = True
                    is_final = response.parameters[_FINAL].bool_param
                if not (is_final and not response.outputs):  # a bare end
                    answering = True
                    yield Response(_outputs(response))
                if is_final:
                    return
        finally:
            leave = asyncio.get_running_loop().call_later(_LEAVE_AFTER_S, call.cancel)
            reader.add_done_callback(lambda _: leave.cancel())
        # A server that never tells whether a response is the last one ends by closing the stream.
        if knows_final or not answering:
            raise _errors.ended_early(self._address, model)

    def _failed(
        self,
        error: grpc.aio.AioRpcError,
        channel: grpc.aio.Channel,
        timeout_s: float | None,
        *,
        answering: bool = False,
    ) -> IaopError:
        # A new channel tries at once; the old one would refuse calls until its back-off is over.
        if error.code() is grpc.StatusCode.UNAVAILABLE and channel is self._channel:
            self.reconnect()
        return _errors.status_error(
            error.code().name,
            error.details(),
            server=self._address,
            timeout_s=timeout_s,
            answering=answering,
        )

    def is_connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def reconnect(self) -> None:
        old = self._channel
        self._open()
        closing = asyncio.ensure_future(old.close(_CLOSE_GRACE_S))
        self._replaced[old] = closing
        closing.add_done_callback(lambda _: self._replaced.pop(old, None))

    async def close(self) -> None:
        if self._readers:
            await asyncio.wait(self._readers, timeout=_LEAVE_AFTER_S)
        await asyncio.gather(*(c.close(None) for c in (self._channel, *self._replaced)))


def _is_transport_failure(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call failed on its way, and not by Triton's own answer."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # Triton itself says "unavailable" of models and modes; it never speaks of connections.
        words = ("connect", "socket", "stream removed", "reset", "goaway", "closed", "resolution")
        return any(word in (error.details() or "").lower() for word in words)
    return error.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


async def _read(call: Any, messages: asyncio.Queue[Any]) -> None:
    """Put a call's messages into the queue, and None or its error after the last.

    A task of its own, because gRPC cancels a call in whose reading a task is cancelled.
    """
    try:
        async for message in call:
            messages.put_nowait(message)
        messages.put_nowait(None)
    except grpc.aio.AioRpcError as error:
        messages.put_nowait(error)


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


def _specs(tensors: Any) -> dict[str, TensorSpec]:
    return {t.name: TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in tensors}


def _request(model: str, version: str, tensors: Sequence[Tensor]) -> Any:
    request = service_pb2.ModelInferRequest(
        model_name=model, model_version=version, id=uuid.uuid4().hex
    )
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor in tensors:
        request.inputs.add(name=tensor.spec.name, datatype=tensor.spec.datatype, shape=tensor.shape)
        request.raw_input_contents.append(_packed(tensor))
    return request


def _prompt_of(tensors: Sequence[Tensor]) -> str:
    texts = (t.value for t in tensors if t.spec.name == "text_input")
    return next((text.decode() for text in texts if isinstance(text, bytes)), "")


def _packed(tensor: Tensor) -> bytes:
    if isinstance(tensor.value, bytes):
        return struct.pack("<I", len(tensor.value)) + tensor.value
    return struct.pack(f"<{_FORMATS[tensor.spec.datatype]}", tensor.value)


def _outputs(response: Any) -> Mapping[str, tuple[Value, ...]]:
    contents = response.raw_output_contents
    if len(contents) != len(response.outputs):
        raise BackendProtocolError(
            "the Triton server sent a response whose tensors have no raw contents", backend=NAME
        )
    try:
        return {
            output.name: _unpacked(output.datatype, data)
            for output, data in zip(response.outputs, contents, strict=True)
        }
    except (struct.error, KeyError, IndexError) as error:
        raise BackendProtocolError(
            "the Triton server sent a tensor that can't be read", backend=NAME
        ) from error


def _unpacked(datatype: str, data: bytes) -> tuple[Value, ...]:
    if datatype != "BYTES":
        reader: Callable[[bytes], Any] = struct.Struct(f"<{_FORMATS[datatype]}").iter_unpack
        return tuple(value for (value,) in reader(data))
    texts: list[Value] = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + size > len(data):
            raise IndexError(size)
        texts.append(data[at : at + size])
        at += size
    return tuple(texts)
