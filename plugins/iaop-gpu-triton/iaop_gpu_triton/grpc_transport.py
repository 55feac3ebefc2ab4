"""Triton over gRPC: tritonclient's generated protocol on a channel of our own.

tritonclient's asyncio client is not used, because it can't ask for `triton_final_response`, the
server's statement that an answer is whole; without it a stream that was cut looks like its end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format  # type: ignore[import-untyped]
from tritonclient.grpc import (  # type: ignore[import-untyped]
    service_pb2,
    service_pb2_grpc,
)

from iaop_core.errors import BackendProtocolError, BackendUnavailableError, IaopError
from iaop_gpu_triton import _errors
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.credentials import Credentials
from iaop_gpu_triton.response_stream import ResponseStream
from iaop_gpu_triton.settings import NAME, GpuTritonSettings
from iaop_gpu_triton.tensors import (
    ModelMetadata,
    ModelState,
    Response,
    Tensor,
    TensorSpec,
    Value,
)

_FINAL = "triton_final_response"
_KEEPALIVE_TIMEOUT_MS = 10_000
_CLOSE_GRACE_S = 3600.0  # for calls under way on a channel that was replaced
# How long a call that its caller has left may still end by itself. Many releases of Triton crash,
# or never answer again, when a request is cancelled in the moment in which it ends: an answer that
# is whole, or nearly so, is let end instead.
_LEAVE_AFTER_S = 0.1
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_STRUCTS = {
    datatype: struct.Struct(f"<{letter}")
    for datatype, letter in {
        "BOOL": "?",
        "INT8": "b",
        "UINT8": "B",
        "INT16": "h",
        "UINT16": "H",
        "INT32": "i",
        "UINT32": "I",
        "INT64": "q",
        "UINT64": "Q",
        "FP16": "e",
        "FP32": "f",
        "FP64": "d",
    }.items()
}
_SKELETONS = 64  # kept of requests with the same tensors
_LENGTH = _STRUCTS["UINT32"]
_process_id: int | None = None  # that uses gRPC through this module


class GrpcTransport:
    """A `Transport` over gRPC."""

    cancels_at_once = True

    def __init__(
        self, address: ServerAddress, settings: GpuTritonSettings, credentials: Credentials
    ) -> None:
        self._address = address
        self._shown = address.host_port
        self._settings = settings
        self._credentials = credentials
        self._connect_timeout_s = settings.connect_timeout_ms / 1000
        self._readers: set[asyncio.Task[None]] = set()
        self._replaced: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._skeletons: dict[Any, Any] = {}
        self._id_prefix = f"{uuid.uuid4().hex}-"  # a server may have several clients
        self._numbers = itertools.count()
        self._closed = False
        _check_process()
        if address.tls:
            credentials.ssl_context()  # gRPC says nothing of a file that is no certificate
        self._open()

    def _open(self) -> None:
        settings = self._settings
        options = (
            ("grpc.max_send_message_length", settings.max_message_bytes),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # The time-out is also TCP_USER_TIMEOUT, so that sent data which nobody acknowledges
            # ends the connection, long before the next ping.
            ("grpc.keepalive_time_ms", settings.keepalive_ms),
            ("grpc.keepalive_timeout_ms", min(settings.keepalive_ms, _KEEPALIVE_TIMEOUT_MS)),
            # gRPC's own pings, which measure the bandwidth, hold back those of keepalive.
            ("grpc.http2.ping_timeout_ms", min(settings.keepalive_ms, _KEEPALIVE_TIMEOUT_MS)),
            ("grpc.http2.max_pings_without_data", 0),
            # Otherwise a new channel to the same server takes over the connection of the old one.
            ("grpc.use_local_subchannel_pool", 1),
        )
        compression = _COMPRESSION[settings.compression]
        target = self._address.host_port
        if self._address.tls:
            pem = self._credentials.pem
            secrets = grpc.ssl_channel_credentials(
                pem("ca_file"), pem("client_key_file"), pem("client_cert_file")
            )
            self._channel = grpc.aio.secure_channel(target, secrets, options, compression)
        else:
            self._channel = grpc.aio.insecure_channel(target, options, compression)
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
        decoupled, required = await self._configuration(model, version, timeout_s)
        return ModelMetadata(
            model, _specs(answer.inputs), _specs(answer.outputs), decoupled, required
        )

    async def _configuration(
        self, model: str, version: str, timeout_s: float
    ) -> tuple[bool | None, frozenset[str]]:
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        try:
            config = (await self._call("ModelConfig", request, timeout_s)).config
        except BackendProtocolError:  # a server of the protocol that is no Triton
            return None, frozenset()
        required = frozenset(tensor.name for tensor in config.input if not tensor.optional)
        return config.model_transaction_policy.decoupled, required

    async def model_statistics(
        self, model: str, version: str, *, timeout_s: float
    ) -> list[Mapping[str, Any]]:
        request = service_pb2.ModelStatisticsRequest(name=model, version=version)
        answer = await self._call("ModelStatistics", request, timeout_s, model=model)
        told: dict[str, Any] = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return list(told["model_stats"])

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        request = service_pb2.RepositoryIndexRequest()
        answer = await self._call("RepositoryIndex", request, timeout_s)
        return [ModelState(m.name, m.version, m.state, m.reason) for m in answer.models]

    async def load(
        self, model: str, *, config: str, files: Mapping[str, bytes], timeout_s: float
    ) -> None:
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        if config:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        await self._call("RepositoryModelLoad", request, timeout_s, model=model)

    async def unload(self, model: str, *, timeout_s: float) -> None:
        request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        await self._call("RepositoryModelUnload", request, timeout_s, model=model)

    async def _call(self, method: str, request: Any, timeout_s: float, *, model: str = "") -> Any:
        await self._connect(min(timeout_s, self._connect_timeout_s))
        channel = self._channel
        try:
            return await getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=self._metadata()
            )
        except grpc.aio.AioRpcError as error:
            # Triton answers questions about a model with statuses that also have other meanings.
            refused = model and not _is_transport_failure(error)
            if refused and error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise _errors.load_error(
                    error.details() or "", server=self._shown, model=model
                ) from error
            raise self._failed(error, channel, timeout_s=timeout_s) from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._credentials.headers().items())

    async def _connect(self, timeout_s: float) -> None:
        """Wait for the connection; one that is refused is left to the call, which tells more."""
        channel = self._channel
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            if channel is self._channel:
                self.reconnect()
            reason = f"no connection within {timeout_s * 1000:.0f} ms"
            raise _errors.unreachable(self._shown, reason) from error
        except grpc.aio.UsageError as error:
            raise _errors.unreachable(self._shown, "the backend was unloaded") from error

    async def generate(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        *,
        prompt: str,
        single: bool,
    ) -> ResponseStream:
        request = self._request(model, version, tensors)
        if (size := request.ByteSize()) > self._settings.max_message_bytes:
            raise _errors.request_too_large(size, self._settings.max_message_bytes)
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            await self._connect(self._connect_timeout_s)
        if self._closed:
            raise _errors.unreachable(self._shown, "the backend was unloaded")
        stream = ResponseStream()
        reading = _Reading(self, stream, model, prompt)
        if single:
            call = self._stub.ModelInfer(request, metadata=self._metadata())
            reader = asyncio.ensure_future(reading.read_single(call))
        else:
            request.parameters["triton_enable_empty_final_response"].bool_param = True
            call = self._stub.ModelStreamInfer(_only(request), metadata=self._metadata())
            reader = asyncio.ensure_future(reading.read(call))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

        def leave() -> None:
            if not reader.done():
                later = asyncio.get_running_loop().call_later(_LEAVE_AFTER_S, call.cancel)
                reader.add_done_callback(lambda _: later.cancel())

        stream.on_leave = leave
        return stream

    def _request(self, model: str, version: str, tensors: Sequence[Tensor]) -> Any:
        """The request; what is the same in most of them is put together once."""
        key = (model, version, *((t.spec, len(t.values)) for t in tensors))
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            skeleton = service_pb2.ModelInferRequest(model_name=model, model_version=version)
            for t in tensors:
                skeleton.inputs.add(name=t.spec.name, datatype=t.spec.datatype, shape=t.shape)
            if len(self._skeletons) >= _SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = skeleton
        request = service_pb2.ModelInferRequest()
        request.CopyFrom(skeleton)
        request.id = f"{self._id_prefix}{next(self._numbers)}"
        request.raw_input_contents.extend(map(_packed, tensors))
        return request

    def _failed(
        self,
        error: grpc.aio.AioRpcError,
        channel: grpc.aio.Channel,
        *,
        timeout_s: float | None = None,
        answering: bool = False,
        prompt: str = "",
    ) -> IaopError:
        # A new channel tries at once; the old one would refuse calls until its back-off is over.
        if error.code() is grpc.StatusCode.UNAVAILABLE and channel is self._channel:
            self.reconnect()
        return _errors.status_error(
            error.code().name,
            error.details(),
            server=self._shown,
            timeout_s=timeout_s,
            answering=answering,
            prompt=prompt,
        )

    def reconnect(self) -> None:
        if self._closed:
            return
        old = self._channel
        self._open()
        closing = asyncio.ensure_future(old.close(_CLOSE_GRACE_S))
        self._replaced[old] = closing
        closing.add_done_callback(lambda _: self._replaced.pop(old, None))

    async def close(self) -> None:
        self._closed = True
        if self._readers:
            await asyncio.wait(self._readers, timeout=2 * _LEAVE_AFTER_S)
        await asyncio.gather(*(c.close(None) for c in (self._channel, *self._replaced)))


class _Reading:
    """Takes the responses of one call from gRPC and puts them into its stream.

    A task of its own, because gRPC cancels a call in whose reading a task is cancelled.
    """

    def __init__(
        self, transport: GrpcTransport, stream: ResponseStream, model: str, prompt: str
    ) -> None:
        self._transport = transport
        self._channel = transport._channel
        self._stream = stream
        self._model = model
        self._prompt = prompt

    async def read(self, call: Any) -> None:
        stream = self._stream
        knows_final = False
        try:
            async for message in call:
                # After an error the rest is read all the same, and nobody wants it: the caller
                # leaves, and cancels the call when it does not end by itself.
                if message.error_message:
                    stream.fail(self._model_error(message.error_message))
                    continue
                response = message.infer_response
                parameters = response.parameters
                is_final = False
                if _FINAL in parameters:
                    knows_final = True
                    is_final = parameters[_FINAL].bool_param
                if response.outputs or not is_final:  # else it is a bare end
                    try:
                        stream.put(_response(response))
                    except BackendProtocolError as error:
                        stream.fail(error)
                if is_final and stream.answering:
                    stream.end()
        except grpc.aio.AioRpcError as error:
            stream.fail(self._call_error(error))
        except asyncio.CancelledError:
            stream.fail(_errors.lost(self._transport._shown, "cancelled", answering=True))
            raise
        except Exception as error:
            stream.fail(_errors.unexpected(error))
        else:
            # A server that never tells whether a response is the last ends by closing the stream.
            if knows_final or not stream.answering:
                stream.fail(_errors.ended_early(self._transport._shown, self._model))
            else:
                stream.end()

    async def read_single(self, call: Any) -> None:
        stream = self._stream
        try:
            stream.put(_response(await call))
            stream.end()
        except grpc.aio.AioRpcError as error:
            if _is_transport_failure(error):
                stream.fail(self._call_error(error))
            else:
                stream.fail(self._model_error(error.details() or ""))
        except asyncio.CancelledError:
            stream.fail(_errors.lost(self._transport._shown, "cancelled", answering=False))
            raise
        except BackendProtocolError as error:
            stream.fail(error)
        except Exception as error:
            stream.fail(_errors.unexpected(error))

    def _call_error(self, error: grpc.aio.AioRpcError) -> IaopError:
        return self._transport._failed(
            error, self._channel, answering=self._stream.answering, prompt=self._prompt
        )

    def _model_error(self, message: str) -> IaopError:
        return _errors.inference_error(
            message,
            server=self._transport._shown,
            model=self._model,
            prompt=self._prompt,
            answering=self._stream.answering,
        )


def _check_process() -> None:
    # What gRPC has running in a process does not survive a fork: using it ends the child.
    global _process_id
    if _process_id not in (None, os.getpid()):
        raise BackendUnavailableError(
            "gRPC was in use before this process was forked, and can't be used here; start worker "
            "processes by spawning, fork them before the first use, or speak HTTP to Triton",
            backend=NAME,
        )
    _process_id = os.getpid()


def _is_transport_failure(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call failed on its way, and not by Triton's own answer."""
    details = (error.details() or "").lower()
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # Triton itself says "unavailable" of models and modes; it never speaks of connections.
        words = ("connect", "socket", "stream removed", "reset", "goaway", "closed", "resolution")
        return any(word in details for word in (*words, "ping", "restricted"))
    if error.code() is grpc.StatusCode.INTERNAL:
        return "rst_stream" in details or "http2" in details
    return error.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


def _specs(tensors: Any) -> dict[str, TensorSpec]:
    return {t.name: TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in tensors}


def _packed(tensor: Tensor) -> bytes:
    if tensor.spec.datatype == "BYTES":
        texts = [value for value in tensor.values if isinstance(value, bytes)]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    if tensor.spec.datatype == "BOOL":
        return bytes(map(bool, tensor.values))
    pack = _STRUCTS[tensor.spec.datatype].pack
    return b"".join(map(pack, tensor.values))


def _response(response: Any) -> Response:
    contents = response.raw_output_contents
    if len(contents) != len(response.outputs):
        raise BackendProtocolError(
            "the Triton server sent a response whose tensors have no raw contents", backend=NAME
        )
    try:
        return Response(
            {
                output.name: _unpacked(output.datatype, data)
                for output, data in zip(response.outputs, contents, strict=True)
            }
        )
    except (struct.error, KeyError, IndexError) as error:
        raise BackendProtocolError(
            "the Triton server sent a tensor that can't be read", backend=NAME
        ) from error


def _unpacked(datatype: str, data: bytes) -> tuple[Value, ...]:
    if datatype != "BYTES":
        form = _STRUCTS[datatype]
        if len(data) == form.size:  # as a rule
            return form.unpack(data)
        return tuple(value for (value,) in form.iter_unpack(data))
    if len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4:  # one text, as a rule
        return (data[4:],)
    texts: list[Value] = []
    at = 0
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += 4
        if at + size > len(data):
            raise IndexError(size)
        texts.append(data[at : at + size])
        at += size
    return tuple(texts)
