"""Options that several commands share, and how they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "DEFAULT_VALUES",
    "echo_json",
    "echo_table",
    "find_values",
    "json_option",
    "values_option",
]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_VALUES = "values.yaml"


def values_option(function: F) -> F:
    return click.option(
        "--values",
        "-f",
        type=click.Path(path_type=Path),
        envvar="IAOP_VALUES",
        help=f"The values file; by default $IAOP_VALUES, else {DEFAULT_VALUES} of this folder.",
    )(function)


def find_values(values: Path | None) -> Path | None:
    """The values file that was named or, when it is there, the default one."""
    if values is None and Path(DEFAULT_VALUES).exists():
        return Path(DEFAULT_VALUES)
    return values


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")(
        function
    )


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, ensure_ascii=False, indent=2))


def echo_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need; numbers to the right."""
    rows = list(rows)
    texts = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for number, line in enumerate(texts):
        cells = [
            cell.rjust(width)
            if number and isinstance(rows[number - 1][column], int | float)
            else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
