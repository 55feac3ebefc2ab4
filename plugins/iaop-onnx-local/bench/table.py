"""What a case found, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

__all__ = ["Figure", "Row", "Section", "section_as_json", "section_as_text"]


@frozen(slots=True)
class Figure:
    """One number that says something, with the limit that it is meant to keep."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it keeps its limit; None where it has none."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def verdict(self) -> str:
        if self.met is None:
            return ""
        limit = f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most}"
        return f"{limit}: {'met' if self.met else 'MISSED'}"


@frozen(slots=True)
class Row:
    """What one engine did: for each column a number from every round."""

    label: str
    samples: Mapping[str, Sequence[float]]

    def median(self, column: str) -> float:
        return statistics.median(self.samples[column])


@frozen(slots=True)
class Section:
    """One case on one model."""

    title: str
    rows: Sequence[Row]
    figures: Sequence[Figure]
    notes: Sequence[str] = ()


def section_as_text(section: Section) -> str:
    """The rows' medians, then the figures, then the notes."""
    columns = list(dict.fromkeys(column for row in section.rows for column in row.samples))
    width = max(map(len, _labels(section)))
    lines = ["", section.title, f"  {'':{width}}" + "".join(f"{name:>18}" for name in columns)]
    for row in section.rows:
        cells = "".join(f"{row.median(column):18.1f}" for column in columns)
        lines.append(f"  {row.label:{width}}{cells}")
    lines += [
        f"  {figure.name:{width}}{figure.value:18.2f}  {figure.verdict}".rstrip()
        for figure in section.figures
    ]
    lines += [f"  {note}" for note in section.notes]
    return "\n".join(lines)


def _labels(section: Section) -> list[str]:
    return [row.label for row in section.rows] + [figure.name for figure in section.figures]


def section_as_json(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "rows": [
            {
                "label": row.label,
                "medians": {column: row.median(column) for column in row.samples},
                "samples": row.samples,
            }
            for row in section.rows
        ],
        "figures": [
            {
                "name": figure.name,
                "value": figure.value,
                "at_least": figure.at_least,
                "at_most": figure.at_most,
                "met": figure.met,
            }
            for figure in section.figures
        ],
        "notes": section.notes,
    }
