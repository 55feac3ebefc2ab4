"""How much memory this process may use, and giving back what it no longer does."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from iaop_onnx_local.cgroup import MEMBERSHIP, ROOT, cgroup_folders, read_lines

__all__ = ["give_memory_back", "usable_memory_bytes"]

_FILES: Final = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
"""The controller and its file, of cgroup version 2 and 1."""


def give_memory_back() -> None:
    """Returns freed memory to the system where the C library would keep it: glibc does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def usable_memory_bytes(cgroup_root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """The machine's memory or its cgroup's limit, whichever is less.

    Returns:
        The number of bytes, or None where the system doesn't tell.
    """
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for controller, name in _FILES:
        for folder in cgroup_folders(controller, cgroup_root, membership):
            # Without a limit it is "max", or a number beyond any memory.
            sizes += [int(line) for line in read_lines(folder / name) if line.isdigit()]
    return min(sizes, default=None)
