"""What the machine is, and whether anything else runs on it. Reads Linux's `/proc`."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["CpuTime", "describe_machine", "process_cpu_s", "wait_until_idle"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@frozen(slots=True)
class CpuTime:
    """CPU time of the whole machine since it started, in seconds over all CPUs."""

    busy_s: float
    """Time taken from a virtual machine by its host counts as busy."""
    total_s: float

    @classmethod
    def now(cls) -> CpuTime:
        fields = Path("/proc/stat").read_text("ascii").splitlines()[0].split()[1:9]
        seconds = [int(field) / _TICKS_PER_S for field in fields]
        idle_s = seconds[3] + seconds[4]  # idle, and waiting for a disk
        return cls(sum(seconds) - idle_s, sum(seconds))

    def busy_share_since(self, earlier: CpuTime, *, own_s: float = 0.0) -> float:
        """How much of the machine was busy, 0 to 1, with `own_s` seconds of it left out."""
        total_s = max(self.total_s - earlier.total_s, 1 / _TICKS_PER_S)
        return max(0.0, self.busy_s - earlier.busy_s - own_s) / total_s


def process_cpu_s(process_id: int) -> float:
    """CPU seconds that all threads of a process have used."""
    fields = Path(f"/proc/{process_id}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime


def wait_until_idle(limit: float, *, patience_s: float) -> None:
    """Returns once less than `limit` of the machine is busy, or when patience ends."""
    ends = time.monotonic() + patience_s
    busy = 1.0
    while busy >= limit and time.monotonic() < ends:
        before = CpuTime.now()
        time.sleep(0.3)
        busy = CpuTime.now().busy_share_since(before)


def describe_machine(threads: int) -> dict[str, Any]:
    """What a reader needs to know to compare figures."""
    info = Path("/proc/cpuinfo").read_text("utf-8")
    model = re.search(r"^model name\s*: (.*)$", info, re.M)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_vnni|avx_vnni|amx_tile)\b", info))
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text("ascii"))
    return {
        "processor": model[1] if model else platform.machine(),
        "features": sorted(flags),
        "cpus": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "iaop-core": version("iaop-core"),
        "threads": threads,
    }
