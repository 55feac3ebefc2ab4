"""The whole path on real components: values, plugin, engine, real text, audit row."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from llama_server import LlamaServer
from smollm2_folder import smollm2_folder
from triton_server import TritonServer, cache_dir

from iaop_core import LLMGateway

QUESTION = "What is the capital of France? Answer in one sentence."
APPLICATION = """
import sys
from iaop_core import LLMGateway

with LLMGateway.from_values(sys.argv[1]) as gateway:
    print(gateway.ask(sys.argv[2], params={"max_tokens": 24, "temperature": 0}))
"""

BACKENDS = ["onnx-local", "gpu-triton over gRPC", "gpu-triton over HTTP", "cloud-api"]


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonServer]:
    with TritonServer("smollm2") as server:
        yield server


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    server = LlamaServer()
    yield server
    server.stop()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What stands in the values for the backend: all that changes between the tests."""
    if request.param == "onnx-local":
        folder = smollm2_folder(cache_dir())
        return {"plugin": "onnx-local", "model": str(folder), "settings": {"device": "cpu"}}
    if request.param == "cloud-api":
        server: LlamaServer = request.getfixturevalue("llama")
        settings = {"base_url": server.base_url, "on_premises": True}
        return {"plugin": "cloud-api", "model": server.model, "settings": settings}
    triton: TritonServer = request.getfixturevalue("triton")
    over_grpc = request.param.endswith("gRPC")
    settings = {"server_url": triton.grpc_url if over_grpc else triton.http_url}
    return {"plugin": "gpu-triton", "model": "smollm2", "settings": settings}


@pytest.fixture
def values(backend: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "values.yaml"
    data = {
        "backends": {"engine": backend},
        "routes": {"assistant": {"targets": [{"backend": "engine"}]}},
        "audit": {"url": f"sqlite:///{tmp_path / 'audit.db'}"},
    }
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    def read() -> list[dict[str, Any]]:
        connection = sqlite3.connect(tmp_path / "audit.db")
        connection.row_factory = sqlite3.Row
        try:
            found = connection.execute("select * from iaop_calls order by id").fetchall()
        finally:
            connection.close()
        return [dict(row) for row in found]

    return read


def iaop(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("iaop")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_answers_with_real_text_by_changing_only_the_values(
    values: Path, backend: dict[str, Any], rows: Callable[[], list[dict[str, Any]]]
) -> None:
    done = iaop(
        "ask", "--values", str(values), "--max-tokens", "24", "-p", "temperature=0", QUESTION
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert backend["plugin"] in done.stderr
    (row,) = rows()
    assert row["outcome"] == "ok"
    assert (row["plugin"], row["backend"], row["route"]) == (
        backend["plugin"],
        "engine",
        "assistant",
    )
    assert row["prompt_tokens"] > 5
    assert row["completion_tokens"] > 3
    assert row["time_to_first_token_ms"] > 0
    assert not row["offline"]


def test_application_answers_with_real_text_by_changing_only_the_values(values: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, str(values), QUESTION],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_health_is_told_for_machines(values: Path) -> None:
    done = iaop("health", "--values", str(values), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["healthy"]
    assert answer["backends"][0]["name"] == "engine"
    assert "loaded=True" in answer["backends"][0]["detail"]


def test_stream_left_early_is_recorded_and_frees_its_slot(
    values: Path, rows: Callable[[], list[dict[str, Any]]]
) -> None:
    with LLMGateway.from_values(values) as gateway:
        for _ in range(gateway._site.backends["engine"].slots.limit + 1):
            stream = gateway.stream("Count from one to a hundred.", params={"max_tokens": 200})
            next(stream)
            stream.close()
        assert gateway.ask(QUESTION, params={"max_tokens": 4}).text
    outcomes = [row["outcome"] for row in rows()]
    assert outcomes[-1] == "ok"
    assert set(outcomes[:-1]) == {"abandoned"}
    assert all(row["completion_tokens"] >= 1 for row in rows())
