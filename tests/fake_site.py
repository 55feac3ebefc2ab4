"""Builds installed distributions out of nothing: metadata folders and modules on `sys.path`."""

from __future__ import annotations

import textwrap
from pathlib import Path

_GOOD_PLUGIN = """
from attrs import frozen
from iaop_core import BackendCapabilities, BackendSpec, Probe, hookimpl

@frozen
class Settings:
    greeting: str = "hello"

def _make(settings):
    from iaop_core.echo import EchoBackend
    class Backend(EchoBackend):
        name = {name!r}
    return Backend()

@hookimpl
def iaop_backends():
    return [
        BackendSpec(
            name={name!r},
            summary="A test backend",
            api_version={api_version!r},
            capabilities=BackendCapabilities(
                streaming=True, max_concurrency=2, on_premises=True, offline_mode={offline_mode!r}
            ),
            settings_class=Settings,
            factory=_make,
            {more}
        )
    ]
"""


def good_plugin(
    name: str, *, api_version: str = "1.0", more: str = "", offline_mode: bool = False
) -> str:
    """The source of a healthy plugin module that offers a backend of that name."""
    return textwrap.dedent(_GOOD_PLUGIN).format(
        name=name, api_version=api_version, more=more, offline_mode=offline_mode
    )


class FakeSite:
    """A folder that stands on `sys.path`, with what is installed in it.

    Each module writes a marker file when it is imported: `imported` tells which were.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def install(
        self,
        distribution: str,
        source: str | None = None,
        *,
        name: str = "",
        version: str = "1.0",
        group: str = "iaop.backends",
        module: str = "",
        entry_points: str | None = None,
        metadata: bool = True,
    ) -> Path:
        """Install a distribution whose module has that source; returns its metadata folder."""
        module = module or distribution.replace("-", "_")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            )
        if entry_points is None:
            entry_points = f"[{group}]\n{name or distribution} = {module}\n"
        (info / "entry_points.txt").write_text(entry_points)
        if source is not None:
            self.write_module(module, source)
        return info

    def write_module(self, module: str, source: str) -> None:
        marker = self.folder / f"{module}.imported"
        touch = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
        (self.folder / f"{module}.py").write_text(touch + textwrap.dedent(source))

    @property
    def imported(self) -> set[str]:
        return {marker.stem for marker in self.folder.glob("*.imported")}
