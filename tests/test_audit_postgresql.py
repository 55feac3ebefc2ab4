"""The audit on a real PostgreSQL server, started for the test where one is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaop_core import LLMGateway

_PROGRAMS = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]


@pytest.fixture
def url() -> Iterator[str]:
    found = [folder for folder in _PROGRAMS if (folder / "initdb").exists()]
    if not found:
        pytest.skip("no PostgreSQL server is installed")
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(prefix="iaop-pg-"))
    as_user = []
    if os.getuid() == 0:  # the server refuses to run as root
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody", "nogroup")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [*as_user, str(found[0] / program), "-D", str(data), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            timeout=60,
        )

    try:
        run("initdb", "-A", "trust", "-U", "audit", "-E", "UTF8")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder}"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://audit@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_rows_and_usage_are_kept_in_postgresql(url: str) -> None:
    values = {
        "backends": {"e": {"plugin": "echo"}},
        "tenants": {"line-3": {"tokens_per_day": 1000}},
        "audit": {"url": url},
    }
    for _ in range(2):  # the second finds the table
        with LLMGateway.from_values(values) as gateway:
            gateway.ask("a b c", tenant="line-3")
            usage = gateway.usage(tenant="line-3")
    (row,) = usage
    assert (row.calls, row.ok, row.prompt_tokens, row.completion_tokens) == (2, 2, 6, 6)
