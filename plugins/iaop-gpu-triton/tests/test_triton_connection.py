"""The way to a server: TLS, credentials, compression, limits, time, keepalive."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from attrs import frozen
from early_server import early_grpc_server
from scripted import ended, script
from tcp_proxy import TcpProxy
from triton_server import TritonServer

from iaop_core import Secret
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    CredentialsRefusedError,
    IaopError,
    InvalidRequestError,
    ModelLoadError,
    StreamInterruptedError,
    ValuesError,
)
from iaop_gpu_triton import GpuTritonBackend

Make = Callable[..., GpuTritonBackend]

GRPC_HEADER = {"Triton-Grpc-Protocol-Door": "sesame"}
TOKEN, USER, PASSWORD = "t0ken-of-the-site", "operator", "p@ss-of-the-site"


@frozen
class Secured:
    """A server behind TLS and credentials, and what a client of it needs."""

    grpc_url: str
    http_url: str
    tls: dict[str, str]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Triton with mutual TLS over gRPC, and behind a proxy with it over HTTP.

    Inference needs a header over gRPC and a bearer token over HTTP; the repository's index needs
    a password over HTTP.
    """
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    server_cert = authority.issue_cert("127.0.0.1", "localhost")
    client_cert = authority.issue_cert("client@example.com")
    files = {
        "ca_file": authority.cert_pem,
        "client_cert_file": client_cert.cert_chain_pems[0],
        "client_key_file": client_cert.private_key_pem,
        "server_cert": server_cert.cert_chain_pems[0],
        "server_key": server_cert.private_key_pem,
    }
    for name, blob in files.items():
        blob.write_to_path(folder / name)
    basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    options = [
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={folder / 'server_cert'}",
        f"--grpc-server-key={folder / 'server_key'}",
        f"--grpc-root-cert={folder / 'ca_file'}",
        "--grpc-restricted-protocol=inference:door=sesame",
        f"--http-restricted-api=inference:authorization=Bearer {TOKEN}",
        f"--http-restricted-api=model-repository:authorization=Basic {basic}",
    ]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_cert.configure_cert(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer("echo", options=options))
        proxy = stack.enter_context(TcpProxy(server.http_port, tls=context))
        tls = {name: str(folder / name) for name in list(files)[:3]}
        yield Secured(f"grpcs://{server.grpc_url}", f"https://{proxy.address}", tls)


# -- TLS and credentials -----------------------------------------------------------------------


def test_grpc_with_client_certificate_and_header(secured: Secured) -> None:
    with closing(
        GpuTritonBackend(secured.grpc_url, "echo", headers=GRPC_HEADER, **secured.tls)
    ) as backend:
        backend.load_model()
        assert backend.infer("secured").text == "secured"
        assert ended(list(backend.stream("secured"))).text == "secured"
        assert backend.health_check().healthy


def test_http_with_client_certificate_and_bearer_token(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_TOKEN", TOKEN)
    token = Secret("${env:TRITON_TOKEN}")
    with closing(
        GpuTritonBackend(secured.http_url, "echo", bearer_token=token, **secured.tls)
    ) as backend:
        backend.load_model()
        assert backend.infer("secured").text == "secured"
        assert ended(list(backend.stream("secured"))).text == "secured"
        assert backend.health_check().healthy


def test_basic_authorisation_opens_what_asks_for_it(secured: Secured) -> None:
    password = Secret(PASSWORD, literal=True)
    with closing(
        GpuTritonBackend(secured.http_url, "echo", username=USER, password=password, **secured.tls)
    ) as backend:
        with pytest.raises(ModelLoadError, match="repository has: echo"):
            backend.load_model("other")
        backend.load_model()
        with pytest.raises(CredentialsRefusedError):
            backend.infer("a")


def failure_kind(ask: Callable[[str], object]) -> str:
    with pytest.raises(IaopError) as caught:
        ask("a")
    return caught.value.kind


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_server_that_asks_for_credentials_refuses_who_has_none(
    secured: Secured, protocol: str
) -> None:
    url = secured.grpc_url if protocol == "grpc" else secured.http_url
    with closing(GpuTritonBackend(url, "echo", **secured.tls)) as backend:
        backend.load_model()
        # gRPC itself may lose the server's reason when it comes before the request is sent.
        kinds = {failure_kind(backend.infer) for _ in range(10)}
        kinds |= {failure_kind(lambda prompt: list(backend.stream(prompt))) for _ in range(10)}
        assert "credentials_refused" in kinds
        assert kinds <= {"credentials_refused", "backend_unavailable"}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("lacks", ["ca_file", "client"])
def test_certificate_that_is_missing_leaves_the_server_out_of_reach(
    secured: Secured, protocol: str, lacks: str
) -> None:
    url = secured.grpc_url if protocol == "grpc" else secured.http_url
    files = {name: path for name, path in secured.tls.items() if not name.startswith(lacks)}
    with closing(GpuTritonBackend(url, "echo", connect_timeout_ms=3000, **files)) as backend:
        assert backend.health_check().detail.startswith("probe_error: ")
        with pytest.raises(BackendUnavailableError):
            backend.load_model()


@pytest.mark.parametrize(
    ("settings", "authorization"),
    [
        ({"bearer_token": Secret("tok", literal=True)}, "Bearer tok"),
        ({"username": "u", "password": Secret("p", literal=True)}, "Basic dTpw"),
        ({"headers": {"Authorization": Secret("Own x", literal=True)}}, "Own x"),
    ],
)
def test_authorisation_goes_with_grpc_too(settings: dict[str, Any], authorization: str) -> None:
    seen: dict[str, str] = {}
    with early_grpc_server(["a"], tells_final=False, seen=seen) as url:
        with closing(GpuTritonBackend(url, "early", **settings)) as backend:
            backend.load_model()
            assert backend.infer("x").text == "a"
    assert seen["authorization"] == authorization


def test_no_secret_is_shown(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_TOKEN", "a-wrong-token")
    with closing(
        GpuTritonBackend(
            secured.http_url,
            "echo",
            bearer_token=Secret("${env:TRITON_TOKEN}"),
            headers={"x-key": Secret("another-secret", literal=True), "x-plain": "plain-value"},
            **secured.tls,
        )
    ) as backend:
        backend.load_model()
        with pytest.raises(CredentialsRefusedError) as caught:
            backend.infer("a")
        shown = f"{caught.value} {backend!r} {backend._settings!r} {backend.health_check()!r}"
    for secret in ("a-wrong-token", "another-secret", "plain-value"):
        assert secret not in shown


def test_rotated_secret_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaop_gpu_triton.credentials._KEEP_S", 0.0)
    file = tmp_path / "token"
    seen: dict[str, str] = {}
    with early_grpc_server(["a"], tells_final=False, seen=seen) as url:
        file.write_text("first\n")
        token = Secret(f"${{file:{file}}}")
        with closing(GpuTritonBackend(url, "early", bearer_token=token)) as backend:
            backend.load_model()
            for value in ("first", "second"):
                file.write_text(value)
                backend.infer("x")
                assert seen["authorization"] == f"Bearer {value}"


@pytest.mark.parametrize(
    "settings",
    [
        {"client_cert_file": "a.pem"},
        {"username": "u"},
        {"password": Secret("p", literal=True)},
        {"bearer_token": Secret("t", literal=True), "headers": {"Authorization": "x"}},
        {"headers": {"bad name": "x"}},
        {"headers": {"x": "line\nbreak"}},
        {"replica_urls": "triton:8001"},
        {"server_url": "http://triton", "compression": "gzip"},
        {"replica_urls": ["ftp://triton"]},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValuesError):
        GpuTritonBackend(**settings)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for url in ("grpcs://127.0.0.1:9", "https://127.0.0.1:9"):
        with closing(GpuTritonBackend(url, ca_file=str(tmp_path / "missing"))) as backend:
            with pytest.raises(ValuesError, match="ca_file"):
                backend.load_model()


def test_file_that_is_no_certificate_is_named(secured: Secured, tmp_path: Path) -> None:
    file = tmp_path / "empty.pem"
    file.write_text("no certificate")
    for url in (secured.grpc_url, secured.http_url):
        for setting in ("ca_file", "client_cert_file"):
            settings = {**secured.tls, setting: str(file)}
            with closing(GpuTritonBackend(url, "echo", **settings)) as backend:
                with pytest.raises(ValuesError, match=f"{setting} holds no certificate"):
                    backend.load_model()


# -- size --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_request_is_small_and_understood(triton: TritonServer, compression: str) -> None:
    with TcpProxy(triton.grpc_port) as proxy:
        with closing(GpuTritonBackend(proxy.address, "echo", compression=compression)) as backend:
            backend.load_model()
            text = "压" * 500_000
            assert backend.infer(text).text == text
            assert proxy.to_server < 100_000


def test_request_beyond_the_limit_is_refused_before_it_is_sent(make: Make) -> None:
    backend = make("echo", max_message_bytes=10_000)
    backend.load_model()
    with pytest.raises(InvalidRequestError, match="max_message_bytes is 10000") as caught:
        backend.infer("x" * 10_000)
    assert caught.value.param == "prompt"
    assert backend.infer("short").text == "short"


def test_response_beyond_the_limit_is_an_error_that_names_it(make: Make) -> None:
    backend = make("echo", max_message_bytes=10_000)
    backend.load_model()
    with pytest.raises(BackendProtocolError, match="max_message_bytes"):
        backend.infer(script(tokens=["x"], repeat=20_000))
    assert backend.infer("short").text == "short"


# -- time --------------------------------------------------------------------------------------


@pytest.fixture
def unconnectable() -> Iterator[str]:
    """An address whose connections never come about: the queue of its listener is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_connection_that_does_not_come_about_in_time_is_unavailable(
    unconnectable: str, protocol: str
) -> None:
    url = f"{protocol}://{unconnectable}"
    with closing(GpuTritonBackend(url, connect_timeout_ms=400, timeout_ms=10_000)) as backend:
        started = time.monotonic()
        with pytest.raises(BackendUnavailableError, match="no connection within 400 ms"):
            backend.load_model()
        assert time.monotonic() - started < 3


LIMITS = [
    ({"first_token_timeout_ms": 300}, {"first_delay_s": 5}, "first response", 300),
    ({"token_timeout_ms": 300}, {"delay_s": 5}, "further response", 300),
    ({"total_timeout_ms": 400}, {"delay_s": 0.15}, "whole answer", 400),
]


@pytest.mark.parametrize(("settings", "delays", "what", "limit_ms"), LIMITS, ids=str)
def test_each_time_limit_of_a_stream_is_typed_and_told(
    make: Make, settings: dict[str, int], delays: dict[str, float], what: str, limit_ms: int
) -> None:
    backend = make("echo", timeout_ms=20_000, **settings)
    backend.load_model()
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError, match=f"no {what} .* within {limit_ms} ms") as caught:
        list(backend.stream(script(tokens=list("abcdefghij"), **delays)))
    assert time.monotonic() - started < 3
    assert caught.value.timeout_ms == limit_ms


def test_greatest_settings_are_in_reach_of_both_protocols(make: Make) -> None:
    most = 2**31 - 1
    names = ("timeout_ms", "connect_timeout_ms", "first_token_timeout_ms", "token_timeout_ms")
    settings = dict.fromkeys((*names, "total_timeout_ms", "max_message_bytes"), most)
    backend = make("echo", **settings, keepalive_ms=32_767_000)
    backend.load_model()
    assert backend.infer("a b").text == "".join(c.delta for c in backend.stream("a b")) == "a b"
    assert backend.health_check().healthy


def test_limits_of_a_stream_do_not_bind_a_plain_answer(make: Make) -> None:
    backend = make("echo", first_token_timeout_ms=200, token_timeout_ms=200)
    backend.load_model()
    prompt = script(tokens=["a", "b"], first_delay_s=0.5, delay_s=0.5)
    assert backend.infer(prompt).text == "ab"
    short = make("echo", timeout_ms=20_000, total_timeout_ms=300)
    short.load_model()
    with pytest.raises(BackendTimeoutError, match="300 ms"):
        short.infer(prompt)


def test_slow_reader_is_no_silence_of_the_server(make: Make) -> None:
    backend = make("echo", token_timeout_ms=300)
    backend.load_model()
    texts = []
    for chunk in backend.stream("one two three"):
        texts.append(chunk.delta)
        time.sleep(0.4)
    assert "".join(texts) == "one two three"


def test_dead_peer_is_noticed_by_keepalive_long_before_a_time_limit(triton: TritonServer) -> None:
    with TcpProxy(triton.grpc_port) as proxy:
        with closing(
            GpuTritonBackend(proxy.address, "echo", timeout_ms=60_000, keepalive_ms=700)
        ) as backend:
            backend.load_model()
            stream = iter(backend.stream(script(tokens=["a", "b"], delay_s=50)))
            assert next(stream).delta == "a"
            proxy.mode = "silent"
            started = time.monotonic()
            with pytest.raises(StreamInterruptedError):
                next(stream)
            assert time.monotonic() - started < 10
            proxy.mode = "forward"
            assert backend.infer("again").text == "again"


def test_goaway_of_a_connection_that_is_too_old_loses_no_call() -> None:
    with TritonServer(
        "echo", options=["--grpc-max-connection-age=200", "--grpc-max-connection-age-grace=5000"]
    ) as server:
        with closing(GpuTritonBackend(server.grpc_url, "echo")) as backend:
            backend.load_model()
            until, count = time.monotonic() + 2, 0
            while time.monotonic() < until:
                count += 1
                assert backend.infer(f"call {count}").text == f"call {count}"
