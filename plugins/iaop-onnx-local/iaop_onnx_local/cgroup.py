"""The control groups that limit this process, of cgroup version 1 or 2."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["MEMBERSHIP", "ROOT", "cgroup_folders", "read_lines"]

ROOT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
"""Lines `ID:CONTROLLERS:PATH`; version 2 names no controllers. See cgroups(7)."""


def cgroup_folders(controller: str, root: Path, membership: Path) -> list[Path]:
    """The folder of the process's own group, and of each one above it, all of which limit it.

    Args:
        controller: of version 1, such as `cpu`; empty for version 2.
        root: where the groups are mounted.
        membership: the file that names the process's groups.
    """
    top, inside = root / controller, ""
    for line in read_lines(membership):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inside = path.lstrip("/")
    own = top / inside
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none where there is no such file, as on other systems."""
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return []
