"""Settings, the server's address, and the plugin's hook."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from attrs import asdict

from iaop_core.errors import ValuesError
from iaop_gpu_triton import GpuTritonBackend, GpuTritonSettings
from iaop_gpu_triton.address import ServerAddress
from iaop_gpu_triton.plugin import iaop_backends

NUMBERS = (
    *("max_concurrency", "max_tokens", "timeout_ms", "connect_timeout_ms"),
    *("first_token_timeout_ms", "token_timeout_ms", "total_timeout_ms"),
    *("keepalive_ms", "max_message_bytes"),
)


@pytest.mark.parametrize(
    ("url", "prefer_grpc", "address"),
    [
        ("triton:8001", True, "grpc://triton:8001"),
        ("triton:8000", False, "http://triton:8000"),
        ("triton", True, "grpc://triton:8001"),
        ("triton", False, "http://triton:8000"),
        ("http://triton:9000", True, "http://triton:9000"),
        ("http://triton/", True, "http://triton:8000"),
        ("grpc://10.0.0.7:9001", False, "grpc://10.0.0.7:9001"),
        ("[::1]:8001", True, "grpc://[::1]:8001"),
        ("grpcs://triton", False, "grpcs://triton:8001"),
        ("https://triton:443", True, "https://triton:443"),
    ],
)
def test_server_url_tells_protocol_and_address(url: str, prefer_grpc: bool, address: str) -> None:
    assert str(ServerAddress.from_url(url, prefer_grpc=prefer_grpc)) == address


@pytest.mark.parametrize(
    "url",
    ["", "triton:port", "triton:0", "ftp://triton", "http://triton/v2",
     "http://user:hunter2@triton", "http://:hunter2@triton", "triton:8001?key=hunter2",
     "my triton:8001", "triton-a:8001,triton-b:8001", "triton-a,triton-b", "[triton]:8001"],
)  # fmt: skip
def test_server_url_that_cannot_be_used_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="server_url") as caught:
        GpuTritonBackend(url)
    assert "hunter2" not in str(caught.value)
    if url:
        assert isinstance(caught.value, ValuesError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in NUMBERS),
        *((name, 2**31) for name in NUMBERS),
        ("max_concurrency", 1.5),
        ("max_concurrency", True),
        ("timeout_ms", "5"),
        ("timeout_ms", float("inf")),
        ("keepalive_ms", 32_767_001),
        ("max_message_bytes", 1023),
        ("model_version", 1),
        ("model_version", "abc"),
        ("model_version", "-1"),
        ("model_version", "0"),
        ("model_version", " 1"),
        ("model_version", "9" * 20),
        ("model_name", ""),
        ("model_name", None),
        ("server_url", 8001),
        ("replica_urls", None),
        ("replica_urls", "triton-b:8001"),
        ("replica_urls", [8001]),
        ("chat_template", 5),
        ("tensors", "PROMPT"),
        ("tensors", {"prompt": "P", "answer": "A", "question": "Q"}),
        ("load_config", "{}"),
        ("compression", "zip"),
        ("headers", ["x-site"]),
        ("headers", {"x-site": 5}),
        ("headers", {"x-site-bin": "a"}),
        ("headers", {"Content-Length": "0"}),
        ("headers", {"grpc-timeout": "1S"}),
        ("headers", {"a header": "a"}),
    ],
)
def test_setting_that_cannot_be_used_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValuesError, match=name) as caught:
        GpuTritonBackend(**{name: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["authorization", "Proxy-Authorization", "cookie"])
def test_credentials_in_a_header_are_given_by_reference(name: str) -> None:
    with pytest.raises(ValuesError, match="by reference") as caught:
        GpuTritonSettings(headers={name: "Bearer hunter2"})
    assert "hunter2" not in str(caught.value)
    GpuTritonSettings(headers={name: "Bearer ${env:TRITON_TOKEN}"})


def test_backend_takes_the_settings_with_their_defaults() -> None:
    *written, rest = inspect.signature(GpuTritonBackend).parameters.values()
    assert rest.kind is inspect.Parameter.VAR_KEYWORD
    defaults = asdict(GpuTritonSettings(), recurse=False)
    assert {p.name: p.default for p in written} == dict(list(defaults.items())[: len(written)])
    with pytest.raises(TypeError, match="no_such_setting"):
        GpuTritonBackend(no_such_setting=1)


def test_plugin_offers_the_backend_and_makes_it() -> None:
    (spec,) = iaop_backends()
    settings = spec.settings_class(server_url="somewhere:1", max_concurrency=3, offline=True)
    backend = spec.factory(settings)
    assert spec.name == backend.name == "gpu-triton"
    assert spec.probe().usable
    assert "somewhere:1" in repr(backend)
    assert backend.capabilities.max_concurrency == 3
    assert backend.capabilities.on_premises
    assert backend.capabilities.streaming


def test_plugin_imports_no_client_library() -> None:
    code = (
        "import sys, iaop_gpu_triton.plugin as plugin; plugin.iaop_backends()[0].probe();"
        "heavy = {'tritonclient', 'grpc', 'numpy', 'aiohttp', 'iaop_gpu_triton.backend'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_plugin_says_what_to_install_when_a_library_is_missing() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tritonclient' else find(name, *a)\n"
        "from iaop_gpu_triton.plugin import iaop_backends\n"
        "probe = iaop_backends()[0].probe()\n"
        "assert not probe.usable and 'tritonclient' in probe.reason, probe\n"
        "assert 'pip install' in probe.reason, probe\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
