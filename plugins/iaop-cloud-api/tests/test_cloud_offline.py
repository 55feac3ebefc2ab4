"""Offline mode: asked for, or for want of aiohttp; never quiet."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from iaop_cloud_api import CloudApiBackend
from iaop_core.errors import CapabilityNotSupportedError


def test_offline_needs_no_address_and_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("offline mode opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with CloudApiBackend(offline=True) as backend:
        backend.load_model("m")
        assert backend.infer("Hi", ["a"]).text == "[cloud:m] Hi\n[来源: a]"
        assert backend.health_check().healthy
        assert repr(backend) == "<CloudApiBackend base_url='' loaded=True model='m' offline>"


def test_offline_keeps_the_other_facts() -> None:
    backend = CloudApiBackend(
        offline=True, base_url="https://api.example.com/v1", max_concurrency=3
    )
    assert backend.capabilities.max_concurrency == 3
    assert not backend.capabilities.on_premises


@pytest.mark.parametrize("name", ["logprobs", "response_format"])
def test_offline_refuses_what_the_kernel_can_not_give(name: str) -> None:
    params = {"logprobs": True, "response_format": {"type": "json_object"}}
    with CloudApiBackend(offline=True) as backend:
        backend.load_model("m")
        assert "temperature" in backend.capabilities.params
        with pytest.raises(CapabilityNotSupportedError, match=name):
            backend.infer("Hi", params={name: params[name]})


WITHOUT_AIOHTTP = """
import logging, sys
sys.modules["aiohttp"] = None  # what an import of a missing package meets
from iaop_cloud_api import CloudApiBackend
logging.basicConfig(format="%(levelname)s %(message)s")
with CloudApiBackend(base_url="https://api.example.com/v1", model="m") as backend:
    backend.load_model()
    result = backend.infer("Hi")
    print(result.text, result.offline, backend.health_check())
"""


def test_offline_for_want_of_aiohttp_is_said_aloud() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AIOHTTP], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[cloud:m] Hi True BackendHealth(healthy=True")
    assert "offline=True" in done.stdout
    assert "WARNING cloud-api answers OFFLINE" in done.stderr
    assert "pip install" in done.stderr
