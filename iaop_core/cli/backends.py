"""`iaop backends`"""

from __future__ import annotations

import click

from iaop_core.capabilities import BackendCapabilities
from iaop_core.cli.options import echo_json, echo_table, json_option
from iaop_core.plugins import PluginRegistry

__all__ = ["backends", "echo_backends"]


@click.command()
@json_option
def backends(as_json: bool) -> None:
    """List the installed backends, with state and reason.

    A plugin that is broken is listed with the reason and stops nothing.
    """
    registry = PluginRegistry()
    if as_json:
        echo_json([record.as_json() for record in registry.records()])
    else:
        echo_backends(registry)


def echo_backends(registry: PluginRegistry) -> None:
    records = registry.records()
    echo_table(
        ["NAME", "STATE", "DISTRIBUTION", "VERSION", "API", "CAPABILITIES"],
        [
            (
                record.name,
                record.state,
                record.distribution,
                record.version,
                record.api_version,
                _brief(record.capabilities) if record.capabilities else "",
            )
            for record in records
        ],
    )
    for record in records:
        if record.reason:
            click.echo(f"\n{record.name} ({record.distribution}): {record.reason}")


def _brief(capabilities: BackendCapabilities) -> str:
    words = ["on premises" if capabilities.on_premises else "off site"]
    if capabilities.streaming:
        words.append("streaming")
    return ", ".join(
        [*words, *capabilities.modalities, f"{capabilities.max_concurrency} at a time"]
    )
