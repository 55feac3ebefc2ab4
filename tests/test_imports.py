"""What is imported, and what is not: start stays fast, and a broken SDK harms only its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Run
from fake_site import FakeSite, good_plugin

HEAVY = {
    *("tritonclient", "grpc", "onnxruntime", "numpy", "aiohttp", "httpx", "tokenizers"),
    *("sqlalchemy", "psycopg", "pytest", "jinja2", "fastapi", "starlette", "opentelemetry"),
}

# Every one of them can be imported here, and tells when it is: absence is not by luck.
DECOY = "import pathlib; pathlib.Path({marker!r}).touch()"


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    folder = tmp_path / "decoys"
    folder.mkdir()
    for name in HEAVY - {"sqlalchemy", "pytest"}:
        marker = str(folder / f"{name}.imported")
        (folder / f"{name}.py").write_text(DECOY.format(marker=marker))
    return folder


def _loaded(stdout: str) -> set[str]:
    return {name.partition(".")[0] for name in json.loads(stdout.splitlines()[-1])}


DUMP = "import sys, json; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize(
    "statement",
    [
        "import iaop_core",
        "from iaop_core import *",
        "import iaop_core.plugins as p; assert p.PluginRegistry().records()",
        "import iaop_core.gateway",
        "import iaop_core.cli",
        "from iaop_core.values import Values; Values.load({'backends': {'a': {'plugin': 'echo'}}})",
    ],
)
def test_import_brings_no_sdk_no_database_and_no_pytest(
    statement: str, decoys: Path, run_python: Run
) -> None:
    done = run_python("-c", f"{statement}\n{DUMP}", path=(decoys,))
    assert done.returncode == 0, done.stderr
    assert not _loaded(done.stdout) & HEAVY
    assert not list(decoys.glob("*.imported"))


@pytest.mark.parametrize("arguments", [["backends"], ["doctor"], ["--version"], ["--help"]])
def test_command_brings_no_sdk_no_database_and_no_pytest(
    arguments: list[str], decoys: Path, run_python: Run
) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules))))\n"
        "from iaop_core.cli import main\n"
        f"main({arguments!r}, prog_name='iaop')"
    )
    done = run_python("-c", code, path=(decoys,))
    assert done.returncode == 0, done.stderr
    assert not _loaded(done.stdout) & HEAVY
    if arguments != ["doctor"]:  # which asks the backends, in processes of their own
        assert not list(decoys.glob("*.imported"))


def test_import_of_core_brings_no_gateway_and_no_values(run_python: Run) -> None:
    done = run_python("-c", f"import iaop_core\n{DUMP}")
    modules = set(json.loads(done.stdout))
    assert not modules & {"iaop_core.gateway", "iaop_core.values", "iaop_core.plugins", "yaml"}


def test_only_the_selected_plugin_is_imported_by_ask(fake_site: FakeSite, run_iaop: Run) -> None:
    for number in range(5):
        fake_site.install(f"iaop-fake{number}", good_plugin(f"fake{number}"), name=f"fake{number}")
    done = run_iaop("ask", "hello there", "--backend", "fake3", path=(fake_site.folder,))
    assert (done.returncode, done.stdout) == (0, "hello there\n"), done.stderr
    assert fake_site.imported == {"iaop_fake3"}


def test_backend_of_no_route_is_not_imported(fake_site: FakeSite, run_iaop: Run) -> None:
    fake_site.install("iaop-used", good_plugin("used"), name="used")
    fake_site.install("iaop-spare", "raise RuntimeError('never import me')", name="spare")
    Path("values.yaml").write_text(
        "gateway: {route: a}\nbackends: {a: {plugin: used}, b: {plugin: spare}}\n"
    )
    done = run_iaop("ask", "hello", path=(fake_site.folder,))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert fake_site.imported == {"iaop_used"}


SCANS = """
import importlib_metadata, json, sys
scans = 0
real = importlib_metadata.distributions
def counted(**kwargs):
    global scans
    scans += 1
    return real(**kwargs)
importlib_metadata.distributions = counted
import iaop_core
from iaop_core import LLMGateway
seen = [scans]
gateway = LLMGateway.from_values({"backends": {"a": {"plugin": "fake7"}}})
seen.append(scans)
for _ in range(100):
    assert str(gateway.ask("hi")) == "hi"
seen.append(scans)
LLMGateway.from_values({"backends": {"a": {"plugin": "fake8"}}}).close()
seen.append(scans)
gateway.close()
print(json.dumps(seen))
"""


def test_metadata_of_600_distributions_is_read_once_and_never_by_ask(
    fake_site: FakeSite, run_python: Run
) -> None:
    for number in range(600):
        fake_site.install(f"iaop-fake{number}", name=f"fake{number}", module=f"fake_{number}")
    for number in (7, 8):
        fake_site.write_module(f"fake_{number}", good_plugin(f"fake{number}"))
    done = run_python("-c", SCANS, path=(fake_site.folder,))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, 1, 1]
    assert fake_site.imported == {"fake_7", "fake_8"}
