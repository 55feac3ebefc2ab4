"""`iaop health`"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from iaop_core.cli.options import (
    DEFAULT_VALUES,
    echo_json,
    echo_table,
    json_option,
    values_option,
)
from iaop_core.errors import IaopError

__all__ = ["health"]


@click.command()
@values_option
@json_option
def health(values: Path | None, as_json: bool) -> None:
    """Ask every backend of the values how it is; 1 when a route has no healthy backend.

    Loads the models of the values first.
    """
    from iaop_core.gateway import LLMGateway

    logging.getLogger("iaop_core").addHandler(logging.NullHandler())  # health tells it all
    gateway = LLMGateway.from_values(values or DEFAULT_VALUES)
    problems = []
    try:
        for route in gateway.values.routes:  # each by itself: a broken one hides no other
            try:
                gateway.load(route=route)
            except IaopError as error:
                problems.append(str(error))
        answer = gateway.health()
    finally:
        gateway.close()
    for problem in dict.fromkeys(problems):
        click.echo(f"Error: {problem}", err=True)
    states = answer.backends.items()
    if as_json:
        backends = [
            {"name": name, "healthy": s.healthy, "detail": s.detail, "facts": dict(s.facts)}
            for name, s in states
        ]
        echo_json({"healthy": answer.healthy, "backends": backends})
    else:
        echo_table(
            ["BACKEND", "HEALTH", "DETAIL"],
            [(name, "healthy" if s.healthy else "UNHEALTHY", s.detail) for name, s in states],
        )
    if not answer.healthy:
        raise SystemExit(1)
