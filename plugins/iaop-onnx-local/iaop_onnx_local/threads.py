"""How many CPUs this process may use: its affinity mask and its cgroup's quota, not the host's."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["usable_cpus"]


def usable_cpus(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Returns the number of CPUs, at least 1; a quota of 1.5 CPUs counts as 2.

    The paths are those of a Linux system with cgroup version 1 or 2; elsewhere they don't exist,
    and the number comes from the affinity mask alone, or is the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quotas = [*_quotas_v2(cgroup_root, membership), *_quotas_v1(cgroup_root)]
    return max(1, min([count, *(math.ceil(quota) for quota in quotas)]))


def _quotas_v2(root: Path, membership: Path) -> list[float]:
    """The quotas of the process's cgroup and of each one above it, in CPUs."""
    inside = next((line[4:] for line in _lines(membership) if line.startswith("0::/")), "")
    own = root / inside
    quotas = []
    for folder in [own, *own.parents]:
        if not folder.is_relative_to(root):
            break
        for line in _lines(folder / "cpu.max"):  # "QUOTA PERIOD", in µs, or "max PERIOD"
            quota, _, period = line.partition(" ")
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
    return quotas


def _quotas_v1(root: Path) -> list[float]:
    values = [_lines(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(values) and all(lines[0].isdigit() for lines in values):  # the quota is -1 without one
        quota, period = (int(lines[0]) for lines in values)
        return [quota / period] if quota and period else []
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return []
