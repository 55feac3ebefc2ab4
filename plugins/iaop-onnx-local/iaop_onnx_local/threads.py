"""How many CPUs this process may use: its affinity mask and its cgroup's quota, not the host's."""

from __future__ import annotations

import math
import os
from pathlib import Path

from iaop_onnx_local.cgroup import MEMBERSHIP, ROOT, cgroup_folders, read_lines

__all__ = ["usable_cpus"]


def usable_cpus(cgroup_root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Returns the number of CPUs, at least 1; a quota of 1.5 CPUs counts as 2.

    The paths are those of a Linux system with cgroup version 1 or 2; elsewhere they don't exist,
    and the number comes from the affinity mask alone, or is the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quotas = [*_quotas_v2(cgroup_root, membership), *_quotas_v1(cgroup_root, membership)]
    return max(1, min([count, *(math.ceil(quota) for quota in quotas)]))


def _quotas_v2(root: Path, membership: Path) -> list[float]:
    """The quotas in CPUs."""
    quotas = []
    for folder in cgroup_folders("", root, membership):
        for line in read_lines(folder / "cpu.max"):  # "QUOTA PERIOD", in µs, or "max PERIOD"
            quota, _, period = line.partition(" ")
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
    return quotas


def _quotas_v1(root: Path, membership: Path) -> list[float]:
    quotas = []
    for folder in cgroup_folders("cpu", root, membership):
        values = [read_lines(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(values) and all(lines[0].isdigit() for lines in values):  # -1 without a quota
            quota, period = (int(lines[0]) for lines in values)
            if quota and period:
                quotas.append(quota / period)
    return quotas
