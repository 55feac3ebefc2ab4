"""The error tree, as programs and people rely on it."""

from __future__ import annotations

import pickle
import re

import pytest

from iaop_core import errors
from iaop_core.errors import IaopError


def _all(cls: type[IaopError] = IaopError) -> list[type[IaopError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _all(sub))]


OWN = sorted(
    {cls for cls in _all() if cls.__module__ == "iaop_core.errors"}, key=lambda cls: cls.__name__
)


def test_tree_in_the_docstring_is_the_real_one() -> None:
    drawn = {}
    parents: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([ │├└─]*)(\w+Error)(?: +\((\w+)\))?", line):
            depth, name = len(match[1]), match[2]
            parents[depth] = name
            parent = next((parents[d] for d in sorted(parents, reverse=True) if d < depth), None)
            drawn[name] = (parent, match[3])
    real = {}
    for cls in OWN:
        ours = next((base.__name__ for base in cls.__bases__ if issubclass(base, IaopError)), None)
        builtin = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins"]
        real[cls.__name__] = (ours, builtin[0] if ours and builtin else None)
    assert drawn == real


def test_every_error_is_exported() -> None:
    assert {cls.__name__ for cls in OWN} == set(errors.__all__)


@pytest.mark.parametrize("cls", OWN)
def test_error_shows_its_message_as_it_is(cls: type[IaopError]) -> None:
    assert str(cls("what failed")) == "what failed"
    assert str(cls()) == ""
    assert cls.kind == cls.kind.lower()


def test_kinds_are_distinct() -> None:
    assert len({cls.kind for cls in OWN}) == len(OWN)


@pytest.mark.parametrize("cls", OWN)
def test_error_survives_pickling(cls: type[IaopError]) -> None:
    copied = pickle.loads(pickle.dumps(cls("what failed")))
    assert type(copied) is cls
    assert str(copied) == "what failed"


def test_values_error_says_where() -> None:
    error = errors.ValuesError("is wrong", source="values.yaml", line=3, path="a.b")
    assert str(error) == "values.yaml:3: is wrong"
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.line, copied.path) == (str(error), 3, "a.b")


FAIL_OVER = {
    errors.PluginLoadError: (True, False),
    errors.ModelLoadError: (True, False),
    errors.ModelNotLoadedError: (True, False),
    errors.CredentialsRefusedError: (True, False),
    errors.BackendUnavailableError: (True, True),
    errors.RateLimitedError: (True, True),
}


@pytest.mark.parametrize("cls", OWN)
def test_only_errors_before_any_work_may_fail_over_or_retry(cls: type[IaopError]) -> None:
    error = cls("m")
    assert (error.may_fail_over, error.may_retry) == FAIL_OVER.get(cls, (False, False))


def test_request_that_may_have_run_is_neither_retried_nor_failed_over() -> None:
    error = errors.BackendUnavailableError("m", may_have_run=True)
    assert (error.may_fail_over, error.may_retry) == (False, False)


def test_busy_backend_is_failed_over_but_not_retried() -> None:
    error = errors.BackendUnavailableError("m", busy=True)
    assert (error.may_fail_over, error.may_retry) == (True, False)
