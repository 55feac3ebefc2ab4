"""The offline kernel: asked for, or instead of client libraries that can't be imported."""

from __future__ import annotations

import logging
import sys

import pytest
from scripted import ended

from iaop_core.errors import ModelNotLoadedError
from iaop_gpu_triton import GpuTritonBackend


def test_offline_mode_answers_from_the_kernel() -> None:
    with GpuTritonBackend(model_name="m", offline=True) as backend:
        with pytest.raises(ModelNotLoadedError):
            backend.infer("a")
        backend.load_model()
        result = backend.infer("How are you?", ["a source"])
        assert result.text == "[gpu:m] How are you?\n[来源: a source]"
        assert result.offline
        assert backend.health_check().detail == (
            "server_live=True, model_ready=True, loaded=True, offline=True"
        )
        assert ended(list(backend.stream("Hello"))).text == "[gpu:m] Hello"
        assert "offline=True" in repr(backend)


@pytest.mark.parametrize(
    ("url", "library"), [("grpc://triton:8001", "tritonclient.grpc"), ("http://triton", "aiohttp")]
)
def test_missing_library_falls_back_to_the_kernel_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str, library: str
) -> None:
    for module in ("grpc_transport", "http_transport"):
        monkeypatch.delitem(sys.modules, f"iaop_gpu_triton.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with caplog.at_level(logging.WARNING):
        backend = GpuTritonBackend(url, "m")
    assert "OFFLINE" in caplog.text
    assert library in caplog.text
    assert "pip install" in caplog.text
    backend.load_model()
    assert backend.infer("a").offline
    assert "offline=True" in backend.health_check().detail
    backend.close()
