"""`iaop doctor`"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import click
import importlib_metadata

from iaop_core.cli.backends import echo_backends
from iaop_core.cli.diagnosis import diagnose
from iaop_core.cli.options import echo_json, find_values, json_option, values_option
from iaop_core.errors import IaopError
from iaop_core.hookspecs import API_VERSION
from iaop_core.plugins import PluginRegistry
from iaop_core.values import Values

__all__ = ["doctor"]

_SWITCHES = ("IAOP_PLUGINS", "IAOP_DISABLE_PLUGINS", "IAOP_VALUES")


@click.command()
@values_option
@json_option
def doctor(values: Path | None, as_json: bool) -> None:
    """Show what is installed, what of it works, and what is wrong.

    Backends that can tell of themselves are asked, each in a process of its own, which may start
    its devices. Broken plugins are findings, not failures: the exit code stays 0.
    """
    registry = PluginRegistry()
    facts: dict[str, Any] = {
        "iaop-core": importlib_metadata.version("iaop-core"),
        "plugin API": API_VERSION,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **{name: os.environ[name] for name in _SWITCHES if name in os.environ},
    }
    findings = [
        f"backend {record.name} of {record.distribution} {record.version} is {record.state}: "
        f"{record.reason}"
        for record in registry.records()
        if record.state != "available"
    ]
    diagnoses = {
        record.name: diagnose(record.name)
        for record in registry.records()
        if record.state == "available" and registry.get_spec(record.name).diagnose
    }
    findings += [
        f"backend {name}: {finding}"
        for name, diagnosis in diagnoses.items()
        for finding in diagnosis.findings
    ]
    findings += [
        f"{folder} is a broken metadata folder; remove it" for folder in registry.broken_metadata()
    ]
    for check in (registry.load_addons, lambda: _check_values(values)):
        try:
            check()
        except IaopError as error:
            findings.append(str(error))
    if as_json:
        echo_json(
            {
                "facts": facts,
                "backends": [record.as_json() for record in registry.records()],
                "diagnoses": {name: dict(found.facts) for name, found in diagnoses.items()},
                "findings": findings,
            }
        )
        return
    for name, fact in facts.items():
        click.echo(f"{name}: {fact}")
    click.echo()
    echo_backends(registry)
    for name, diagnosis in diagnoses.items():
        click.echo(f"\n{name}")
        for key, fact in diagnosis.facts.items():
            click.echo(f"  {key}: {fact}")
    click.echo()
    click.echo("\n".join(f"! {finding}" for finding in findings) or "Nothing is wrong.")


def _check_values(values: Path | None) -> None:
    if file := find_values(values):
        Values.load(file)
