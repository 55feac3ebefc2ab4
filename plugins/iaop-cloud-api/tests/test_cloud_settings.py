"""Settings: what is refused, and that the environment has no say."""

from __future__ import annotations

from typing import Any

import pytest
from faulty_upstream import FaultyUpstream, completion, json_reply

from iaop_cloud_api import CloudApiBackend, CloudApiSettings
from iaop_core import Secret
from iaop_core.errors import ModelLoadError, ValuesError
from iaop_core.values import Values

URL = "https://api.example.com/v1"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "api.example.com/v1",
        "ftp://api.example.com",
        "https://",
        "https://api.example.com:0",
        "https://api.example.com:99999",
        "https://[::1",
        "https://api.example.com/v 1",
        "https://api.exämple.com/v1",
        "https://api.example.com/v1?a=b",
        "https://api.example.com/v1#a",
        "https://user@api.example.com/v1",
    ],
)
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValuesError, match="base_url"):
        CloudApiSettings(base_url=url)


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout_ms": 0},
        {"timeout_ms": float("nan")},
        {"idle_timeout_ms": -1},
        {"connect_timeout_ms": 0},
        {"max_concurrency": 0},
        {"max_tokens": 0},
        {"max_tokens_field": "max_new_tokens"},
        {"model_list": "maybe"},
        {"params": ["temprature"]},
        {"params": "seed"},
        {"params": ["grammar"]},
        {"headers": {"Host": "a"}},
        {"headers": {"content-length": "1"}},
        {"headers": {"X A": "b"}},
        {"headers": {"X-A": "é"}},
        {"headers": {"X-A": 1}},
        {"headers": {"Authorization": "b"}, "api_key": "${env:A}"},
        {"client_key_file": "a.pem"},
        {"proxy": "proxy.example.com:3128"},
        {"proxy": "socks5://proxy.example.com"},
    ],
    ids=str,
)
def test_setting_that_is_wrong_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        CloudApiSettings(base_url=URL, **fields)


def test_slash_at_the_end_of_the_address_makes_no_difference(
    upstream: FaultyUpstream, make: Any
) -> None:
    upstream.answer(json_reply(completion("Hello")))
    assert make(base_url=f"{upstream.base_url}/").infer("Hi").text == "Hello"


def test_values_make_settings() -> None:
    values = Values.load(
        {
            "backends": {
                "cloud": {
                    "plugin": "cloud-api",
                    "settings": {
                        "base_url": URL,
                        "api_key": "${env:CLOUD_API_KEY}",
                        "headers": {"X-A": "a", "X-B": "${env:B}"},
                        "proxy": "${env:PROXY}",
                        "params": ["temperature", "top_k"],
                        "on_premises": True,
                    },
                }
            }
        }
    )
    settings = values.plugin_settings("cloud", CloudApiSettings)
    assert settings == CloudApiSettings(
        base_url=URL,
        api_key=Secret("${env:CLOUD_API_KEY}"),
        headers={"X-A": "a", "X-B": Secret("${env:B}")},
        proxy=Secret("${env:PROXY}"),
        params=("temperature", "top_k"),
        on_premises=True,
    )


def test_backend_takes_settings_or_their_fields() -> None:
    settings = CloudApiSettings(base_url=URL, max_concurrency=3, on_premises=True)
    for backend in (
        CloudApiBackend(settings),
        CloudApiBackend(base_url=URL, max_concurrency=3, on_premises=True),
    ):
        assert backend.capabilities.max_concurrency == 3
        assert backend.capabilities.on_premises
    with pytest.raises(TypeError, match="not both"):
        CloudApiBackend(settings, model="m")


def test_endpoint_is_off_site_unless_the_settings_say_otherwise() -> None:
    assert not CloudApiBackend(base_url="http://127.0.0.1:1/v1").capabilities.on_premises


def test_load_without_a_model_says_what_to_set() -> None:
    with pytest.raises(ModelLoadError, match="setting model"):
        CloudApiBackend(base_url=URL).load_model()


def test_load_binds_the_name_without_the_network(upstream: FaultyUpstream, make: Any) -> None:
    backend = make()
    backend.load_model("other")
    assert not upstream.calls
    upstream.answer(json_reply(completion("Hello", model="other-2026-01-01")))
    assert backend.infer("Hi").model_id == "other"
    assert upstream.calls[0].body["model"] == "other"


def test_repr_shows_address_model_and_whether_loaded() -> None:
    backend = CloudApiBackend(base_url=URL, model="m")
    assert repr(backend) == f"<CloudApiBackend base_url='{URL}' loaded=False model=''>"
    backend.load_model()
    assert repr(backend) == f"<CloudApiBackend base_url='{URL}' loaded=True model='m'>"
    backend.close()


def test_load_warns_of_a_key_in_clear_text(caplog: pytest.LogCaptureFixture) -> None:
    key = Secret("sk-1", literal=True)
    for fields, warns in (
        ({"base_url": "http://api.example.com/v1"}, True),
        ({"base_url": "http://api.example.com/v1", "on_premises": True}, False),
        ({"base_url": "http://127.0.0.1/v1"}, False),
        ({"base_url": URL}, False),
    ):
        caplog.clear()
        with CloudApiBackend(**fields, model="m", api_key=key) as backend:
            backend.load_model()
        assert ("clear text" in caplog.text) is warns


def test_environment_has_no_say(
    upstream: FaultyUpstream, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password pw\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    upstream.answer(json_reply(completion("Hello")))
    assert make().infer("Hi").text == "Hello"
    assert "authorization" not in upstream.calls[0].headers
