"""Asks a backend about itself, in a process of its own.

A diagnosis imports the SDK and starts devices: it may print, hang, or take its process down, and
none of that harms the command. Run as a module with a backend's name, this is that process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import click

from iaop_core.hookspecs import Diagnosis
from iaop_core.plugins import PluginRegistry

__all__ = ["diagnose"]

_TIMEOUT_S = 60


def diagnose(name: str) -> Diagnosis:
    """What the installed backend of that name tells of itself; a failure of it is a finding."""
    command = [sys.executable, "-m", "iaop_core.cli.diagnosis", name]
    try:
        done = subprocess.run(  # noqa: S603, it runs this module
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Diagnosis({}, [f"its diagnosis did not end within {_TIMEOUT_S} s"])
    if done.returncode == 0:
        return Diagnosis(**json.loads(done.stdout.splitlines()[-1]))
    said = (done.stderr.strip() or "no word").splitlines()[-1]
    return Diagnosis({}, [f"its diagnosis failed (exit code {done.returncode}): {said}"])


def _main(name: str) -> None:
    spec = PluginRegistry().get_spec(name)
    assert spec.diagnose is not None
    found = spec.diagnose()
    facts = {key: str(fact) for key, fact in found.facts.items()}
    # In a line of its own, behind whatever the SDK printed.
    click.echo("\n" + json.dumps({"facts": facts, "findings": list(map(str, found.findings))}))


if __name__ == "__main__":
    _main(sys.argv[1])
