"""The harness itself: made once, whole, and plain about what this machine lacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import triton_server


def test_folder_is_made_once_by_parallel_callers(tmp_path: Path) -> None:
    made = []

    def make(target: Path) -> None:
        made.append(target)
        (target / "half").touch()
        time.sleep(0.1)
        (target / "whole").touch()

    def ask() -> None:
        assert (triton_server.once(tmp_path / "x", make) / "whole").exists()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_folder_of_an_aborted_run_is_made_anew(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        triton_server.once(tmp_path / "x", fail)
    assert not (tmp_path / "x").exists()
    folder = triton_server.once(tmp_path / "x", lambda target: (target / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_missing_libpython_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    with pytest.raises(triton_server.TritonUnavailableError, match=r"apt-get install libpython3"):
        triton_server.stub_python.__wrapped__()


def test_server_that_cannot_start_shows_its_log() -> None:
    with pytest.raises(triton_server.TritonUnavailableError, match="engine file is missing"):
        triton_server.TritonServer("broken").__enter__()


def test_script_prints_its_addresses_and_ends_with_sigterm() -> None:
    command = [sys.executable, triton_server.__file__, "--model", "echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            facts = json.loads(process.stdout.readline())
            with urllib.request.urlopen(f"{facts['http_url']}/v2/models/echo", timeout=5) as answer:
                assert json.load(answer)["name"] == "echo"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not Path(facts["log"]).exists()


def test_server_ends_when_the_process_that_started_it_is_killed() -> None:
    command = [sys.executable, triton_server.__file__, "--model", "echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        process.kill()
    until = time.monotonic() + 15
    while os.path.exists(f"/proc/{facts['pid']}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{facts['pid']}")
