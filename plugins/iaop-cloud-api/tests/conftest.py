"""Fixtures: a faulty upstream, backends that talk to it, and the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from faulty_upstream import FaultyUpstream
from llama_server import LlamaServer

from iaop_cloud_api import CloudApiBackend

Make: TypeAlias = Callable[..., CloudApiBackend]


@pytest.fixture
def upstream() -> Iterator[FaultyUpstream]:
    with FaultyUpstream() as upstream:
        yield upstream


@pytest.fixture
def make(upstream: FaultyUpstream) -> Iterator[Make]:
    """Makes backends with the model `m` loaded, closed at the end."""
    backends = []

    def make(**fields: Any) -> CloudApiBackend:
        backend = CloudApiBackend(**{"base_url": upstream.base_url, "model": "m", **fields})
        backends.append(backend)
        backend.load_model()
        return backend

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture
def backend(make: Make) -> CloudApiBackend:
    return make()


@pytest.fixture(scope="session")
def llama() -> Iterator[LlamaServer]:
    """The real server, started once."""
    with LlamaServer() as server:
        yield server
