"""`iaop usage`"""

from __future__ import annotations

import datetime
from pathlib import Path

import attrs
import click

from iaop_core.audit import AuditLog, Usage
from iaop_core.cli.options import (
    DEFAULT_VALUES,
    echo_json,
    echo_table,
    json_option,
    values_option,
)
from iaop_core.values import Values

__all__ = ["usage"]


@click.command()
@values_option
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), help="The first day (UTC) to show.")
@click.option("--tenant", help="Only this tenant.")
@json_option
def usage(
    values: Path | None, since: datetime.datetime | None, tenant: str | None, as_json: bool
) -> None:
    """Show calls and tokens by day, tenant and backend, from the audit database."""
    audit = AuditLog(Values.load(values or DEFAULT_VALUES).audit.url)
    try:
        first = f"{since:%Y-%m-%d}" if since else ""
        rows = audit.usage(since=first, tenant=tenant).result()
    finally:
        audit.close()
    if as_json:
        echo_json([attrs.asdict(row) for row in rows])
        return
    head = [attribute.name.upper().replace("_", " ") for attribute in attrs.fields(Usage)]
    echo_table(head, [attrs.astuple(row) for row in rows])
