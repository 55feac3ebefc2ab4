"""How much memory this process may use: the machine's, or its cgroup's limit."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_memory_bytes"]


def usable_memory_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the number of bytes, or None where the system doesn't tell."""
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup versions 2 and 1
        try:
            text = (cgroup_root / name).read_text("ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdigit():  # "max" means none
            sizes.append(int(text))
    return min(sizes, default=None)
