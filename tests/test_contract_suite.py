"""The contract suite is tested itself: each mutant breaks one rule, and that rule's test fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''
import math

import pytest
from attrs import evolve
from iaop_core import BackendHealth, InferChunk, TokenLogprob
from iaop_core.contract import *
from iaop_core.echo import EchoBackend
from iaop_core.errors import InvalidRequestError, ModelNotLoadedError
from iaop_core.messages import GenerationParams

PARAMS = {
    "max_tokens", "temperature", "logprobs", "top_logprobs", "response_format", "grammar"
}


class Strict(EchoBackend):
    """echo, failing closed; a model that is half sure of each token, and says what it is told."""

    @property
    def capabilities(self):
        return evolve(super().capabilities, params=PARAMS)

    def stream(self, prompt, context=None, *, params=None):
        if not self._model:
            raise ModelNotLoadedError(f"backend {self.name!r} has no model", backend=self.name)
        given = GenerationParams.from_input(params)
        given.require_supported(self.capabilities.params, backend=self.name)
        if given.response_format or given.grammar:
            prompt = self.in_form(given)
        logprobs = ()
        for chunk in super().stream(prompt, context, params={"max_tokens": given.max_tokens}):
            if chunk.result is None:
                told = self.told(chunk.delta, given)
                logprobs += told
                yield evolve(chunk, logprobs=told)
            else:
                yield InferChunk("", evolve(chunk.result, logprobs=logprobs or None))

    def told(self, token, given):
        if not given.logprobs:
            return ()
        top = [TokenLogprob(t, t.encode(), None, math.log(p))
               for t, p in ((token, 0.5), ("a", 0.3), ("b", 0.2))]
        return (evolve(top[0], top=tuple(top[:given.top_logprobs or 0])),)

    def in_form(self, given):
        wanted = given.response_format
        if given.grammar:
            if given.grammar.count("(") != given.grammar.count(")"):
                raise InvalidRequestError("the grammar is not closed")
            return "state: good"
        if wanted.type == "json_object":
            return '{"a": 1}'
        if wanted.json_schema.schema["type"] != "object":
            raise InvalidRequestError("the schema has an unknown type")
        return '{"state": "running", "urgent": true}'


class Mutant(Strict):
    {mutation}


@pytest.fixture
def subject():
    return ContractSubject(make=Mutant)


class TestLifecycle(LifecycleContract): ...
class TestCapabilities(CapabilitiesContract): ...
class TestInfer(InferContract): ...
class TestStream(StreamContract): ...
class TestHealth(HealthContract): ...
'''

STREAM = "def stream(self, prompt, context=None, *, params=None):\n        "
SUPER = "super().stream(prompt, context, params=params)"
TOLD = "def told(self, token, given):\n        return super().told(token, "
IN_FORM = "def in_form(self, given):\n        return "

MUTANTS = {
    "answers before load": (
        "stream = EchoBackend.stream",
        "test_infer_before_load_fails_closed",
    ),
    "two ends": (
        f"{STREAM}chunks = list({SUPER}); yield from chunks; yield chunks[-1]",
        "test_stream_has_one_end_and_it_is_last",
    ),
    "no end": (
        f"{STREAM}yield from list({SUPER})[:-1]",
        "test_stream_has_one_end_and_it_is_last",
    ),
    "text after the end": (
        f'{STREAM}yield from {SUPER}; yield InferChunk("more")',
        "test_stream_has_one_end_and_it_is_last",
    ),
    "empty delta": (
        f'{STREAM}yield from (InferChunk(""), *{SUPER})',
        "test_stream_has_one_end_and_it_is_last",
    ),
    "half a character": (
        f'{STREAM}yield from (InferChunk("\\ufffd"), *{SUPER})',
        "test_no_delta_holds_half_a_character",
    ),
    "infer unlike stream": (
        (
            "def infer(self, prompt, context=None, *, params=None):\n"
            "        return evolve(super().infer(prompt, context, params=params), text='other')"
        ),
        "test_streamed_text_is_the_text_of_infer",
    ),
    "dropped parameter": (
        (
            f"{STREAM}given = GenerationParams.from_input(params)\n"
            "        yield from super().stream(prompt, context,"
            " params={'max_tokens': given.max_tokens})"
        ),
        "test_parameter_is_honoured_or_refused_by_name",
    ),
    "ignored token limit": (
        f"{STREAM}yield from super().stream(prompt, context)",
        "test_token_limit_holds",
    ),
    "health that raises": (
        "def health_check(self):\n        raise OSError('down')",
        "test_health_never_raises_at_any_time",
    ),
    "health that forgets the unload": (
        "def health_check(self):\n        return BackendHealth(True, 'loaded=True')",
        "test_health_never_raises_at_any_time",
    ),
    "unload that keeps the model": (
        "def unload(self):\n        pass",
        "test_infer_after_unload_fails_closed",
    ),
    "unload that fails when empty": (
        "def unload(self):\n        assert self._model; self._model = ''",
        "test_unload_is_idempotent",
    ),
    "another name": (
        (
            "name = 'echo'\n"
            "    def infer(self, prompt, context=None, *, params=None):\n"
            "        return evolve(super().infer(prompt, context, params=params), backend_name='x')"
        ),
        "test_name_is_that_of_the_results",
    ),
    "prompt in the repr": (
        (
            f"{STREAM}self.asked = prompt; yield from {SUPER}\n"
            "    def __repr__(self):\n        return str(getattr(self, 'asked', ''))"
        ),
        "test_prompt_and_answer_are_in_no_repr",
    ),
    "ignored context": (
        f"{STREAM}yield from super().stream(prompt, None, params=params)",
        "test_context_changes_the_prompt",
    ),
    "logprobs left out": (
        "def told(self, token, given):\n        return ()",
        "test_logprobs_are_those_of_the_answer",
    ),
    "logprobs that nobody asked for": (
        f"{TOLD}evolve(given, logprobs=True))",
        "test_no_logprobs_unless_asked_for",
    ),
    "logprobs of another text": (
        "def told(self, token, given):\n        return super().told('x' + token, given)",
        "test_logprobs_are_those_of_the_answer",
    ),
    "logprobs that the stream keeps back": (
        f"{STREAM}yield from (c if c.result else InferChunk(c.delta) for c in {SUPER})",
        "test_streamed_logprobs_join_to_those_of_the_result",
    ),
    "logprobs that come all at the end": (
        (
            f"{STREAM}*deltas, end = {SUPER}\n"
            "        yield from (InferChunk(c.delta) for c in deltas)\n"
            "        yield evolve(end, logprobs=end.result.logprobs or ())"
        ),
        "test_streamed_logprobs_join_to_those_of_the_result",
    ),
    "too few alternatives": (
        f"{TOLD}evolve(given, top_logprobs=given.top_logprobs and 1))",
        "test_top_logprobs_are_the_likeliest_tokens",
    ),
    "logits for logprobs": (
        (
            "def told(self, token, given):\n"
            "        return tuple(evolve(t, top=tuple(evolve(o, logprob=0.0) for o in t.top))\n"
            "                     for t in super().told(token, given))"
        ),
        "test_top_logprobs_are_the_likeliest_tokens",
    ),
    "logprobs after the temperature": (
        (
            "def told(self, token, given):\n"
            "        return tuple(evolve(t, top=tuple(\n"
            "            evolve(o, logprob=o.logprob * (1 + (given.temperature or 0)))"
            " for o in t.top)) for t in super().told(token, given))"
        ),
        "test_logprobs_are_the_models_before_the_temperature",
    ),
    "no JSON": (
        f"{IN_FORM}'{{\"a\": 1,'",
        "test_json_object_is_one",
    ),
    "JSON of another schema": (
        f'{IN_FORM}\'{{"state": "asleep", "urgent": true}}\'',
        "test_answer_keeps_to_its_schema",
    ),
    "ignored grammar": (
        f"{IN_FORM}'state: fair'",
        "test_answer_keeps_to_its_grammar",
    ),
    "schema that is none": (
        f"{IN_FORM}'{{}}'",
        "test_form_that_can_not_be_kept_is_the_callers_error",
    ),
}


Outcomes = dict[str, dict[str, set[str]]]


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The rules that each mutant passed and failed, all in one run; "none" is no mutant."""
    folder = tmp_path_factory.mktemp("mutants")
    mutations = {"none": "pass", **{name: mutation for name, (mutation, _) in MUTANTS.items()}}
    for number, mutation in enumerate(mutations.values()):
        (folder / f"test_{number}.py").write_text(MODULE.replace("{mutation}", mutation))
    done = run_pytest(folder)
    found: Outcomes = {
        name: {"PASSED": set(), "FAILED": set(), "ERROR": set(), "SKIPPED": set()}
        for name in mutations
    }
    names = list(mutations)
    line = r"^test_(\d+)\.py::\w+::(\w+)\S* (PASSED|FAILED|ERROR|SKIPPED)"
    for number, rule, outcome in re.findall(line, done.stdout, re.MULTILINE):
        found[names[int(number)]][outcome].add(rule)
    return found


def test_suite_passes_for_a_backend_that_keeps_the_rules(outcomes: Outcomes) -> None:
    assert {rule for _, rule in MUTANTS.values()} <= outcomes["none"]["PASSED"]
    assert not outcomes["none"]["FAILED"] | outcomes["none"]["ERROR"]


@pytest.mark.parametrize("name", MUTANTS)
def test_suite_catches_a_backend_that_breaks_a_rule(outcomes: Outcomes, name: str) -> None:
    assert MUTANTS[name][1] in outcomes[name]["FAILED"]


SHARED = """
import pytest
from iaop_core.contract import ContractSubject, InferContract
from iaop_core.echo import EchoBackend

alive, loads = [], []


class Counted(EchoBackend):
    def __init__(self):
        super().__init__()
        alive.append(self)

    def load_model(self, model_id=""):
        loads.append(model_id)
        super().load_model(model_id)

    def close(self):
        super().close()
        alive.remove(self)


@pytest.fixture
def subject():
    return ContractSubject(make=Counted, shared_as="one")


class TestInfer(InferContract): ...


def test_one_was_loaded_and_none_is_left():
    assert (len(loads), alive) == (1, [])
"""


def test_rules_share_a_loaded_backend_that_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(SHARED)
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
