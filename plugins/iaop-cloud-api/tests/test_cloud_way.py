"""The way to the endpoint: TLS, client certificates and proxies."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from faulty_upstream import FaultyUpstream, completion, error, json_reply

from iaop_cloud_api import CloudApiBackend
from iaop_core import Secret
from iaop_core.errors import BackendUnavailableError, CredentialsRefusedError, ValuesError

OK = json_reply(completion("Hello"))


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> str:
    file = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(file)
    return str(file)


@pytest.fixture
def tls(ca: trustme.CA) -> ssl.SSLContext:
    """The endpoint's side."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def secure(tls: ssl.SSLContext) -> Iterator[FaultyUpstream]:
    with FaultyUpstream(tls=tls) as upstream:
        upstream.answer(OK)
        yield upstream


# -- TLS -----------------------------------------------------------------------------------------


def test_endpoint_with_a_certificate_of_the_named_ca_is_trusted(
    secure: FaultyUpstream, make: Any, ca_file: str
) -> None:
    assert make(base_url=secure.base_url, ca_file=ca_file).infer("Hi").text == "Hello"


@pytest.mark.parametrize("streamed", [False, True])
def test_endpoint_with_another_certificate_gets_nothing(
    secure: FaultyUpstream, make: Any, streamed: bool
) -> None:
    backend = make(base_url=secure.base_url)
    with pytest.raises(BackendUnavailableError, match=r"TLS.*unknown CA.*ca_file") as caught:
        list(backend.stream("Hi")) if streamed else backend.infer("Hi")
    assert not caught.value.may_have_run
    assert not secure.calls
    assert not backend.health_check()


def test_endpoint_with_another_name_gets_nothing(ca: trustme.CA, make: Any, ca_file: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("elsewhere.example.com").configure_cert(context)
    with FaultyUpstream(tls=context) as upstream:
        backend = make(base_url=upstream.base_url, ca_file=ca_file)
        with pytest.raises(BackendUnavailableError, match=r"TLS.*another"):
            backend.infer("Hi")
        backend.close()
        assert not upstream.calls


def test_endpoint_that_speaks_no_tls_gets_nothing(make: Any) -> None:
    heard = []

    def answer_in_clear_text(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(1000))
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_in_clear_text, args=(listener,))
        thread.start()
        backend = make(base_url=f"https://127.0.0.1:{listener.getsockname()[1]}/v1")
        with pytest.raises(BackendUnavailableError, match="TLS: the handshake failed") as caught:
            backend.infer("Hi")
        thread.join()
    assert not caught.value.may_have_run
    assert heard[0].startswith(b"\x16\x03"), "a TLS handshake and nothing else"


@pytest.mark.parametrize("key_apart", [False, True])
def test_endpoint_that_asks_for_a_certificate_gets_it(
    ca: trustme.CA, tls: ssl.SSLContext, make: Any, ca_file: str, tmp_path: Path, key_apart: bool
) -> None:
    mine = ca.issue_cert("line-3@example.com")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    mine.cert_chain_pems[0].write_to_path(cert)
    mine.private_key_pem.write_to_path(key if key_apart else cert, append=not key_apart)
    ca.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    with FaultyUpstream(tls=tls) as upstream:
        upstream.answer(OK)
        backend = make(
            base_url=upstream.base_url,
            ca_file=ca_file,
            client_cert_file=str(cert),
            client_key_file=str(key) if key_apart else None,
        )
        assert backend.infer("Hi").text == "Hello"
        backend.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
@pytest.mark.parametrize("name", ["ca_file", "client_cert_file"])
def test_certificate_file_that_cannot_be_used_fails_the_load(
    tmp_path: Path, name: str, content: str | None
) -> None:
    file = tmp_path / "file.pem"
    if content:
        file.write_text(content)
    fields: dict[str, Any] = {name: str(file)}
    backend = CloudApiBackend(base_url="https://api.example.com/v1", model="m", **fields)
    with pytest.raises(ValuesError, match=name):
        backend.load_model()


# -- proxies -------------------------------------------------------------------------------------


def test_proxy_of_the_settings_is_used(upstream: FaultyUpstream, make: Any) -> None:
    url = "http://api.example.com/v1"
    upstream.answer(OK, path=f"{url}/chat/completions")
    assert make(base_url=url, proxy=upstream.origin).infer("Hi").text == "Hello"
    assert "proxy-authorization" not in upstream.calls[0].headers


def test_proxy_with_a_password_is_given_by_reference(
    upstream: FaultyUpstream, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXY", upstream.origin.replace("//", "//me:pw@"))
    url = "http://api.example.com/v1"
    upstream.answer(OK, path=f"{url}/chat/completions")
    backend = make(base_url=url, proxy="${env:PROXY}")
    assert backend.infer("Hi").text == "Hello"
    credentials = base64.b64encode(b"me:pw").decode()
    assert upstream.calls[0].headers["proxy-authorization"] == f"Basic {credentials}"
    assert "pw" not in repr(backend._settings)


def test_proxy_is_asked_for_a_tunnel_without_the_key(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(json_reply(error(), 403), path="api.example.com:443")
    backend = make(
        base_url="https://api.example.com/v1",
        proxy=upstream.origin,
        api_key=Secret("sk-1", literal=True),
    )
    with pytest.raises(BackendUnavailableError, match=r"proxy refuses.*403") as caught:
        backend.infer("Hi")
    assert not caught.value.may_have_run
    (call,) = upstream.calls
    assert (call.method, call.raw_body) == ("CONNECT", b"")
    assert "sk-1" not in str(call.headers)


def test_proxy_that_refuses_its_credentials_is_named(upstream: FaultyUpstream, make: Any) -> None:
    url = "http://api.example.com/v1"
    upstream.answer(json_reply(b"", 407), path=f"{url}/chat/completions")
    with pytest.raises(CredentialsRefusedError, match="setting proxy"):
        make(base_url=url, proxy=upstream.origin).infer("Hi")


def test_proxy_that_is_gone_is_named(make: Any) -> None:
    backend = make(base_url="https://api.example.com/v1", proxy="http://127.0.0.1:9")
    with pytest.raises(BackendUnavailableError, match="proxy") as caught:
        backend.infer("Hi")
    assert not caught.value.may_have_run


def test_proxy_by_reference_that_is_no_address_fails_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROXY", "me:pw@proxy")
    backend = CloudApiBackend(
        base_url="https://api.example.com/v1", model="m", proxy="${env:PROXY}"
    )
    with pytest.raises(ValuesError, match="proxy") as caught:
        backend.load_model()
    assert "pw" not in str(caught.value)
