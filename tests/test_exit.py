"""What becomes of a gateway that nobody closes when its process ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import Run
from fake_site import FakeSite

PLUGIN = """
import asyncio, threading
from attrs import frozen
from iaop_core import BackendCapabilities, BackendSpec, bridge, hookimpl
from iaop_core.echo import EchoBackend

@frozen
class Settings:
    hangs: bool = False

class Client:
    def __init__(self):
        self.loop = None

    async def close(self):
        await asyncio.sleep(0.01)
        print("closed, loop running:", asyncio.get_running_loop().is_running(), flush=True)

class Backend(EchoBackend):
    name = "asynchronous"

    def __init__(self, settings):
        super().__init__()
        self.settings, self.client = settings, Client()

    def close(self):
        if self.settings.hangs:
            threading.Event().wait()
        bridge.submit(self.client.close()).result(5)

@hookimpl
def iaop_backends():
    return [
        BackendSpec(
            name="asynchronous",
            summary="Has a client on core's loop",
            api_version="1.0",
            capabilities=BackendCapabilities(streaming=True, max_concurrency=2, on_premises=True),
            settings_class=Settings,
            factory=Backend,
        )
    ]
"""

SCRIPT = """
import sys
from iaop_core import LLMGateway
gateway = LLMGateway.from_values(
    {"backends": {"b": {"plugin": "asynchronous", "settings": {"hangs": len(sys.argv) > 1}}}}
)
gateway.load()
"""


@pytest.fixture
def installed(fake_site: FakeSite) -> Path:
    fake_site.install("iaop-asynchronous", PLUGIN, name="asynchronous")
    return fake_site.folder


@pytest.mark.parametrize("more", ["", "gateway.ask('hi')", "next(gateway.stream('a b'))"])
def test_backend_is_closed_before_cores_loop_stops(
    more: str, installed: Path, run_python: Run
) -> None:
    done = run_python("-c", SCRIPT + more, path=(installed,))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "closed, loop running: True\n"


def test_backend_is_closed_when_an_error_ends_the_process(installed: Path, run_python: Run) -> None:
    done = run_python("-c", SCRIPT + "sys.exit('so it ends')", path=(installed,))
    assert (done.returncode, done.stderr) == (1, "so it ends\n")
    assert done.stdout == "closed, loop running: True\n"


def test_gateway_that_was_closed_is_not_closed_again(installed: Path, run_python: Run) -> None:
    done = run_python("-c", SCRIPT + "gateway.close()", path=(installed,))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "closed, loop running: True\n"


def test_backend_that_hangs_when_closed_does_not_keep_the_process(
    installed: Path, run_python: Run
) -> None:
    started = time.monotonic()
    done = run_python("-c", SCRIPT, "hangs", path=(installed,))
    assert (done.returncode, done.stdout) == (0, "")
    assert time.monotonic() - started < 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_forked_child_leaves_its_parents_gateway_alone(installed: Path, run_python: Run) -> None:
    fork = """
import os, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("child has ended", flush=True)
"""
    done = run_python("-c", SCRIPT + fork, path=(installed,))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "child has ended\nclosed, loop running: True\n"


def test_gateway_that_is_dropped_is_not_kept_for_the_end(installed: Path, run_python: Run) -> None:
    drop = """
import gc, weakref
seen = weakref.ref(gateway)
del gateway
gc.collect()
print("kept" if seen() else "gone", flush=True)
"""
    done = run_python("-c", SCRIPT + drop, path=(installed,))
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr
