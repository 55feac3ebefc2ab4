from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_site import FakeSite
from scripted_site import ScriptedSite


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, and without the switches of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("IAOP_")]:
        if variable != "IAOP_CACHE_DIR":
            monkeypatch.delenv(variable)


@pytest.fixture
def fake_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """An installation folder in front of `sys.path`; what is imported from it is forgotten."""
    site = FakeSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Runs Python in a process of its own, with these folders first on its path."""

    def run(
        *arguments: str, path: tuple[Path, ...] = (), stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        folders = os.pathsep.join(map(str, path))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": folders, **environment},
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def run_iaop(run_python: Run) -> Run:
    """Runs the command `iaop` in a process of its own."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_python("-m", "iaop_core.cli", *arguments, **options)

    return run


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation folder with the distribution of `scripted_plugin`."""
    folder = tmp_path_factory.mktemp("installed")
    FakeSite(folder).install("iaop-scripted", name="scripted", module="scripted_plugin")
    return folder


@pytest.fixture
def site(
    tmp_path: Path, scripted_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedSite]:
    monkeypatch.syspath_prepend(str(scripted_folder))
    site = ScriptedSite(tmp_path)
    yield site
    site.close()
