"""`iaop config`"""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from iaop_core.cli.options import DEFAULT_VALUES, echo_json, json_option, values_option
from iaop_core.errors import IaopError, ValuesError
from iaop_core.plugins import PluginRegistry
from iaop_core.values import Values

__all__ = ["config"]


@click.group()
def config() -> None:
    """Check or show a values file. No backend needs to be up."""


@config.command()
@values_option
def validate(values: Path | None) -> None:
    """Check every key of the values and of the plugins' settings.

    No secret is looked up, no model loaded and no server asked: `iaop health` does that.
    """
    checked = Values.load(values or DEFAULT_VALUES)
    problems = _plugin_problems(checked)
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    if problems:
        raise SystemExit(2)
    parts = {"backend": checked.backends, "route": checked.routes, "tenant": checked.tenants}
    click.echo(f"{values or DEFAULT_VALUES}: the keys and the plugins' settings are right")
    for what, names in parts.items():
        if names:
            click.echo(f"  {what}{'s' * (len(names) > 1)}: {', '.join(names)}")
    click.echo("Not checked: secrets, models, servers and the audit database; see iaop health")


@config.command()
@values_option
@json_option
def show(values: Path | None, as_json: bool) -> None:
    """Show the values with their defaults, secrets as references."""
    checked = Values.load(values or DEFAULT_VALUES)
    data = checked.as_data()
    registry = PluginRegistry()
    for name, backend in checked.backends.items():
        try:
            spec = registry.get_spec(backend.plugin, allow_offline=True)
        except IaopError:
            # Unchecked, a setting might hold a secret in plain text.
            data["backends"][name]["settings"] = "not shown: its plugin can't be asked"
            continue
        settings = checked.plugin_settings(name, spec.settings_class)
        data["backends"][name]["settings"] = Values.plain(settings)
    if as_json:
        echo_json(data)
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)


def _plugin_problems(values: Values) -> list[str]:
    registry = PluginRegistry()
    problems = []
    for name, backend in values.backends.items():
        try:
            spec = registry.get_spec(backend.plugin, allow_offline=values.gateway.allow_offline)
            values.plugin_settings(name, spec.settings_class)
        except ValuesError as error:
            problems.append(str(error))
        except IaopError as error:
            problems.append(str(values.error(("backends", name, "plugin"), str(error))))
    return problems
