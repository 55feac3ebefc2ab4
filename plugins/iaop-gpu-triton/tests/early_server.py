"""Servers that speak Triton's protocols and end an answer in order, but too early.

The real server never does that; a proxy that drains its connections, or another server of the same
protocol, may. Both serve one model named `early`, whose answers are the tokens given.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

INPUTS = ("text_input", "stream", "sampling_parameters", "return_finish_reason")
OUTPUTS = ("text_output", "finish_reason")


def datatype_of(name: str) -> str:
    return "BOOL" if name.startswith(("stream", "return_")) else "BYTES"


@contextmanager
def early_grpc_server(
    tokens: Sequence[str], *, tells_final: bool, seen: dict[str, str] | None = None
) -> Iterator[str]:
    """Closes its streams after the tokens; `tells_final` says of each that it is not the last.

    The metadata of each request are put into `seen`.
    """

    def add_tensor(tensors: Any, name: str) -> None:
        tensors.add(name=name, datatype=datatype_of(name), shape=[1])

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
            return service_pb2.ModelReadyResponse(ready=True)

        def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
            answer = service_pb2.ModelMetadataResponse(name="early")
            for name in INPUTS[:3]:
                add_tensor(answer.inputs, name)
            add_tensor(answer.outputs, "text_output")
            return answer

        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
            if seen is not None:
                seen.update(context.invocation_metadata())
            for _request in requests:
                for token in tokens:
                    answer = service_pb2.ModelStreamInferResponse()
                    response = answer.infer_response
                    if tells_final:
                        response.parameters["triton_final_response"].bool_param = False
                    add_tensor(response.outputs, "text_output")
                    data = token.encode()
                    response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
                    yield answer

    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def early_http_server(body: bytes) -> Iterator[str]:
    """Answers `generate_stream` with that body, whole as far as HTTP goes."""
    tensors = {
        key: [{"name": name, "datatype": datatype_of(name), "shape": [1]} for name in names]
        for key, names in (("inputs", INPUTS), ("outputs", OUTPUTS))
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, data: bytes) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(b"" if self.path.endswith("ready") else json.dumps(tensors).encode())

        def do_POST(self) -> None:
            self.answer(body)

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
