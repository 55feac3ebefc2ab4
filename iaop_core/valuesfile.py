"""Where values come from: a YAML or TOML file, and the line on which each key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import yaml
from attrs import field, frozen

from iaop_core.errors import ValuesError

__all__ = ["KeyPath", "Lines", "as_one", "read_values"]

KeyPath: TypeAlias = tuple[str | int, ...]


@frozen
class Lines:
    """Where each key stands in the file that it came from."""

    source: str = ""
    lines: Mapping[KeyPath, int] = field(factory=dict)

    def error(self, path: KeyPath, message: str) -> ValuesError:
        """An error at a key; its line is that of the nearest key around it that has one."""
        line = None
        for length in range(len(path), 0, -1):
            if (line := self.lines.get(path[:length])) is not None:
                break
        dotted = _dotted(path)
        return ValuesError(
            f"{dotted}: {message}" if dotted else message,
            source=self.source,
            line=line,
            path=dotted,
        )


def as_one(problems: Sequence[ValuesError]) -> ValuesError:
    """The problem or, when there are several, one error that tells each on a line of its own.

    Its `source`, `line` and `path` are the first one's.
    """
    first = problems[0]
    if len(problems) == 1:
        return first
    several = ValuesError("\n".join(str(problem) for problem in problems), path=first.path)
    several.source, several.line = first.source, first.line
    return several


def read_values(path: Path) -> tuple[object, Lines]:
    """The file's data, unchecked, and its lines. Raises `ValuesError`."""
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin with a mark
    except OSError as error:
        raise ValuesError(f"the values can't be read: {error.strerror}", source=source) from None
    except UnicodeDecodeError:
        raise ValuesError("the values are not UTF-8 text", source=source) from None
    if path.suffix == ".toml":
        return _read_toml(text, source)
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(text, source)
    raise ValuesError("values are in a .yaml, .yml or .toml file", source=source)


def _read_toml(text: str, source: str) -> tuple[object, Lines]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValuesError(f"not TOML: {error}", source=source) from None
    # tomllib tells no lines: those of tables and of keys that begin a line are enough for errors.
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\[?([^\]]+)\]\]?", line):
            table = tuple(part.strip().strip("\"'") for part in match[1].split("."))
            lines.setdefault(table, number)
        elif match := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            key = tuple(part.strip("\"'") for part in match[1].split("."))
            lines.setdefault((*table, *key), number)
    return data, Lines(source, lines)


def _read_yaml(text: str, source: str) -> tuple[object, Lines]:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines = Lines(source, dict(_yaml_lines(node, (), source, set())))
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ValuesError(f"not YAML: {error.problem}", source=source, line=line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValuesError(f"not YAML: {error.reason}", source=source, line=line) from None
    except yaml.YAMLError as error:
        raise ValuesError(f"not YAML: {type(error).__name__}", source=source) from None
    except RecursionError:
        raise ValuesError("not values: they are nested too deeply", source=source) from None
    except ValueError as error:  # such as a date in a thirteenth month
        if isinstance(error, ValuesError):
            raise
        raise ValuesError(f"not YAML: {error}", source=source) from None
    return data, lines


def _yaml_lines(
    node: yaml.Node | None, path: KeyPath, source: str, visited: set[int]
) -> Iterator[tuple[KeyPath, int]]:
    if id(node) in visited:  # an alias: it may lead back to itself
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ValuesError("a key is a text", source=source, line=line)
            if key.value in seen:
                raise ValuesError(f"the key {key.value!r} is given twice", source=source, line=line)
            seen.add(key.value)
            yield (*path, key.value), line
            yield from _yaml_lines(value, (*path, key.value), source, visited)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _yaml_lines(value, (*path, index), source, visited)


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
