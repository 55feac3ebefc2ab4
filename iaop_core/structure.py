"""Checks plain data against attrs classes, strictly: no unknown key, no silent conversion."""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import list_structure_factory
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from iaop_core.secret import Secret
from iaop_core.valuesfile import KeyPath, Lines, as_one

__all__ = ["structure"]

T = TypeVar("T")


def structure(data: object, cls: type[T], lines: Lines, path: KeyPath = ()) -> T:
    """The data, which stands at the key `path` of the values, as an instance of the class.

    Raises one `ValuesError` that tells every problem, each with its line.
    """
    try:
        return _converter.structure(data, cls)
    except Exception as error:
        problems = [lines.error((*path, *where), message) for where, message in _explain(error, ())]
    raise as_one(problems)


def _explain(error: BaseException, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Each problem in cattrs' tree of errors, with the keys that lead to it."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            path = (*path, note.name.lstrip("_"))
        elif isinstance(note, IterableValidationNote):
            path = (*path, note.index)
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _explain(inner, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [a.alias for a in attrs.fields(error.cl) if a.init]
        for key in sorted(error.extra_fields, key=str):
            near = get_close_matches(str(key), known, n=1)
            yield (
                (*path, str(key)),
                f"unknown key; did you mean {near[0]!r}?"
                if near
                else f"unknown key; known: {', '.join(known)}",
            )
    elif isinstance(error, KeyError):
        yield path, f"the key {error.args[0]!r} is missing"
    else:
        # Validators begin with the attribute's name in quotes, and attrs' own add further facts.
        message = str(error.args[0]) if error.args else type(error).__name__
        if match := re.match(r"'(\w+)' (?=[a-z])", message):
            path, message = (*path, match[1]), message[match.end() :]
        yield path, message


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _strict(kind: type[Any]) -> Callable[[Any, Any], Any]:
    def structure_exactly(value: Any, _type: Any) -> Any:
        if type(value) is kind or (kind is float and type(value) is int):
            if kind is str and "${" in value:
                raise ValueError("references such as ${env:NAME} stand in secret settings only")
            return value
        # The value itself stays out of the message: it may be a secret in the wrong place.
        raise ValueError(f"is {_KINDS[kind]}, not of type {type(value).__name__}")

    return structure_exactly


def _literal_hook(cls: Any, _converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    choices = get_args(cls)

    def structure_choice(value: Any, _type: Any) -> Any:
        if value not in choices or isinstance(value, bool):
            raise ValueError(f"is one of {', '.join(map(str, choices))}")
        return value

    return structure_choice


def _structure_secret(value: Any, _type: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    return Secret(_text(value))


def _structure_text_or_secret(value: Any, _type: Any) -> str | Secret:
    if isinstance(value, Secret):
        return value
    return Secret(value) if "${" in _text(value) else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is a text, not of type {type(value).__name__}")
    return value


_LIST_TYPES: dict[Any, Any] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: tuple,
    collections.abc.Iterable: tuple,
    collections.abc.Collection: tuple,
    collections.abc.Set: frozenset,
}
"""How a list of the values is kept; a text would be one of its characters otherwise."""


def _is_list_type(cls: Any) -> bool:
    origin, arguments = get_origin(cls), get_args(cls)
    return origin in _LIST_TYPES and (origin is not tuple or arguments[1:] == (Ellipsis,))


def _list_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    plain_list: Any = list[get_args(cls)[0]]  # type: ignore[misc]
    structure_items = list_structure_factory(plain_list, converter)
    make = _LIST_TYPES[get_origin(cls)]

    def structure_list(value: Any, _type: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"is a list, not of type {type(value).__name__}")
        return make(structure_items(value, cls))

    return structure_list


def _class_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    structure_keys = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True
    )

    def structure_class(value: Any, _type: Any) -> Any:
        if isinstance(value, cls):
            return value
        return structure_keys(_mapping(value, example), cls)

    keys = [a for a in attrs.fields(cls) if a.init]
    required = [a.alias for a in keys if a.default is attrs.NOTHING]
    example = ", ".join(f"{name}: …" for name in required or [a.alias for a in keys][:1])
    return structure_class


def _mapping(value: Any, example: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        such = f"a mapping such as {{{example}}}" if example else "a mapping of keys to values"
        raise ValueError(f"is {such}, not of type {type(value).__name__}")
    return value


def _mapping_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    key_type, value_type = get_args(cls)
    structure_item = converter.get_structure_hook(value_type)

    def structure_mapping(value: Any, _type: Any) -> Any:
        result, errors = {}, []
        for key, item in _mapping(value).items():
            try:
                result[key] = structure_item(item, value_type)
                if not isinstance(key, key_type):
                    raise ValueError(f"the key is a text, not of type {type(key).__name__}")
            except Exception as error:
                error.__notes__ = [
                    *getattr(error, "__notes__", []),
                    AttributeValidationNote(f"at {key}", str(key), value_type),
                ]
                errors.append(error)
        if errors:
            raise cattrs.IterableValidationError("in a mapping", errors, cls)
        return result

    return structure_mapping


def _is_mapping_type(cls: Any) -> bool:
    return get_origin(cls) in (dict, collections.abc.Mapping)


_converter = cattrs.Converter(detailed_validation=True)
for _kind in _KINDS:
    _converter.register_structure_hook(_kind, _strict(_kind))
_converter.register_structure_hook(Secret, _structure_secret)
_converter.register_structure_hook(str | Secret, _structure_text_or_secret)
_factories: tuple[tuple[Callable[[Any], bool], Any], ...] = (
    (lambda cls: get_origin(cls) is Literal, _literal_hook),
    (_is_list_type, _list_hook),
    (_is_mapping_type, _mapping_hook),
    (attrs.has, _class_hook),
)
for _predicate, _factory in _factories:
    _converter.register_structure_hook_factory(_predicate, _factory)
