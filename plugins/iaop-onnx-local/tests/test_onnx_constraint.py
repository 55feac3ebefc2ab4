"""An answer that is held to a form has it, whatever the model would say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_model import write_scripted_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from iaop_core import GenerationParams
from iaop_core.errors import CapabilityNotSupportedError, InvalidRequestError
from iaop_onnx_local.constraint import MAX_FORM_CHARACTERS, Constraint, ConstraintFactory
from iaop_onnx_local.sampling import Sampler, SamplingParams
from iaop_onnx_local.tokenizer import TextTokenizer

STATES = ["running", "等待 👩‍👧", 'a "quoted" \\ one', 7, None, True]
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": STATES},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 2000},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": 7},
    "string": {"type": "string", "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "array": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": STATES}},
    "object": {
        "type": "object",
        "properties": {
            "state": {"enum": STATES},
            "inner": {
                "type": "object",
                "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
                "additionalProperties": False,
            },
        },
        "required": ["state"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "null"}, {"const": {"a": [1, 2]}}]},
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}


def schema_params(schema: Any) -> GenerationParams:
    wanted = {"type": "json_schema", "json_schema": {"name": "test", "schema": schema}}
    return GenerationParams.from_input({"response_format": wanted})


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> TextTokenizer:
    return TextTokenizer(smollm2 / "tokenizer.json")


@pytest.fixture(scope="module")
def smollm2_forms(smollm2_tokenizer: TextTokenizer) -> ConstraintFactory:
    return ConstraintFactory(smollm2_tokenizer, {0, 2})


@pytest.fixture(scope="module")
def spaced_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """SentencePiece's kind of vocabulary: `▁` for spaces, single bytes, a first space dropped."""
    words = ["▁", '▁"', '▁{"', '{"', '"', "▁yes", "yes", "no", "▁no", "true", "▁true", "等", '":']
    words += [chr(c) for c in range(0x21, 0x7F) if chr(c) not in words]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    file = tmp_path_factory.mktemp("spaced") / "tokenizer.json"
    tokenizer.save(str(file))
    return TextTokenizer(file)


def write(
    tokenizer: TextTokenizer,
    constraint: Constraint | None,
    *,
    ends: set[int],
    seed: int = 0,
    more_logits: int = 0,
    max_tokens: int = 400,
) -> tuple[str, bool]:
    """What a model says that holds every token equally likely, and whether it came to the end."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], constraint)
    random, text, shown = np.random.default_rng(seed), tokenizer.open_text(), ""
    for _ in range(max_tokens):
        logits = random.normal(0, 3, tokenizer.size + more_logits).astype(np.float32)
        token = sampler.choose(logits).token_id
        if token in ends:
            return shown, True
        shown += text.feed(tokenizer.token_bytes(token))
    return shown, False


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_logits_give_json_of_the_schema(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory, name: str
) -> None:
    schema = SCHEMAS[name]
    for seed in range(8):
        constraint = smollm2_forms.open(schema_params(schema))
        text, ended = write(smollm2_tokenizer, constraint, ends={0, 2}, seed=seed, more_logits=seed)
        assert ended
        assert fits(json.loads(text), name), text
        assert "\n" not in text


def fits(value: Any, name: str) -> bool:
    """Whether the value is one that the schema allows, by each schema's own words."""
    match name:
        case "enum":
            return value in STATES
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and -5 <= value <= 2000
        case "multiple":
            return type(value) is int and 0 <= value <= 999 and value % 7 == 0
        case "string":
            return isinstance(value, str) and len(value) <= 12
        case "pattern":
            head, _, tail = value.partition("-")
            return head.isupper() and len(head) == 2 and tail.isdigit() and len(tail) <= 4
        case "date":
            return len(time.strptime(value, "%Y-%m-%d")) > 0
        case "array":
            return 1 <= len(value) <= 3 and all(item in STATES for item in value)
        case "object":
            inner = value.get("inner", {})
            return (
                value["state"] in STATES
                and value.keys() <= {"state", "inner"}
                and inner.keys() <= {"count"}
                and inner.get("count", 0) in range(10)
            )
        case "either":
            return value is None or value == {"a": [1, 2]}
        case _:
            return value.keys() == {"next"} and (value["next"] is None or fits(value["next"], name))


def test_json_object_is_an_object(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory
) -> None:
    params = GenerationParams.from_input({"response_format": {"type": "json_object"}})
    ended = 0
    for seed in range(12):
        constraint = smollm2_forms.open(params)
        assert constraint is not None
        text, ends = write(smollm2_tokenizer, constraint, ends={0, 2}, seed=seed, max_tokens=60)
        assert text.startswith("{")
        if ends:
            assert isinstance(json.loads(text), dict)
            ended += 1
        else:
            assert not constraint.finished
    assert ended


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "yes" | "no"', {"yes", "no"}),
        ('start: "a" "b"? "c"', {"ac", "abc"}),
        ("start: /[0-9]/", set("0123456789")),
        ('start: greeting "!"\ngreeting: "你好" | "Grüß Gott"', {"你好!", "Grüß Gott!"}),
        ('start: "x" %json {"enum": [1, 2]}', {"x1", "x2"}),
    ],
)
def test_grammar_is_kept(
    smollm2_tokenizer: TextTokenizer,
    smollm2_forms: ConstraintFactory,
    grammar: str,
    said: set[str],
) -> None:
    for seed in range(8):
        constraint = smollm2_forms.open(GenerationParams(grammar=grammar))
        assert constraint is not None
        text, ended = write(smollm2_tokenizer, constraint, ends={0, 2}, seed=seed)
        assert text in said
        assert ended
        assert constraint.finished


def test_end_is_allowed_where_the_form_is_complete_and_nowhere_else(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory
) -> None:
    constraint = smollm2_forms.open(GenerationParams(grammar='start: "a" "a"?'))
    assert constraint is not None
    a, both = (smollm2_tokenizer.encode_prompt(text)[0] for text in ("a", "aa"))

    def allowed() -> set[int]:
        logits = np.zeros(smollm2_tokenizer.size + 9, np.float32)
        constraint.mask(logits)
        return set(np.flatnonzero(logits == 0).tolist())

    assert allowed() == {a, both}
    constraint.advance(a)
    assert allowed() == {a, 0, 2}
    assert not constraint.finished
    constraint.advance(a)
    assert allowed() == {0, 2}
    assert constraint.finished


def test_mask_changes_nothing_of_what_is_allowed(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory
) -> None:
    constraint = smollm2_forms.open(GenerationParams(grammar="start: /[0-9]+/"))
    assert constraint is not None
    before = np.random.default_rng(0).normal(0, 1, smollm2_tokenizer.size).astype(np.float32)
    after = before.copy()
    constraint.mask(after)
    kept = after > -np.inf
    assert (after[kept] == before[kept]).all()
    assert {smollm2_tokenizer.token_bytes(token) for token in np.flatnonzero(kept)} == {
        str(digit).encode() for digit in range(10)
    }


def test_vocabulary_that_drops_a_first_space_is_held_to_the_text(
    spaced_tokenizer: TextTokenizer,
) -> None:
    forms, ends = ConstraintFactory(spaced_tokenizer, {2}), {2}
    assert spaced_tokenizer.drops_first_space
    for seed in range(6):
        for name in ("enum", "object", "pattern", "recursive"):
            constraint = forms.open(schema_params(SCHEMAS[name]))
            text, ended = write(spaced_tokenizer, constraint, ends=ends, seed=seed)
            assert ended
            assert fits(json.loads(text), name)
        constraint = forms.open(GenerationParams(grammar='start: " "? "yes"'))
        assert write(spaced_tokenizer, constraint, ends=ends, seed=seed)[0] == "yes"
    with pytest.raises(InvalidRequestError, match="begins with a space"):
        forms.open(GenerationParams(grammar='start: " yes"'))


def test_vocabulary_without_single_characters_is_held_too(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "m", [b'{"a', b'":', b" ", b"tr", b"ue", b"}", b"x"])
    tokenizer = TextTokenizer(folder / "tokenizer.json")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    forms = ConstraintFactory(tokenizer, {0})
    text, ended = write(tokenizer, forms.open(schema_params(schema)), ends={0})
    assert (text, ended) == ('{"a": true}', True)
    with pytest.raises(InvalidRequestError, match="no token of the model goes on"):
        forms.open(GenerationParams(grammar='start: "z"'))


def test_control_token_is_shown_by_its_name(smollm2_tokenizer: TextTokenizer) -> None:
    assert smollm2_tokenizer.token_text(2) == "<|im_end|>"
    assert smollm2_tokenizer.token_bytes(2) == b""
    (a,) = smollm2_tokenizer.encode_prompt("a")
    assert smollm2_tokenizer.token_text(a) == "a"


# -- refusals -----------------------------------------------------------------------------------


def test_no_form_asked_for_is_no_constraint(smollm2_forms: ConstraintFactory) -> None:
    assert smollm2_forms.open(GenerationParams(temperature=1.0)) is None


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "zebra"}, "Invalid type"),
        ({"type": "array", "uniqueItems": True}, "the keywords uniqueItems can't be enforced"),
        ({"not": {"type": "string"}, "if": {}}, "the keywords if, not can't be enforced"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "the keywords not can't be enforced"),
        ({"$ref": "https://example.com/zebra.json"}, "Resource"),
        ({"type": "string", "pattern": "zebra(?=a)"}, "regex parse error"),
        ({"type": "string", "format": "zebra"}, "Unknown format"),
        (
            {"type": "object", "properties": {"zebra": False}, "required": ["zebra"]},
            "Unsatisfiable schema",
        ),
        ({"enum": ["zebra" * 100] * 200}, "characters"),
        ({"type": "integer", "multipleOf": 62_000_000}, "least common multiple"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 0.9967}]}, "least common multiple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schema_that_can_not_be_kept_is_refused_without_its_text(
    smollm2_forms: ConstraintFactory, schema: Any, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        smollm2_forms.open(schema_params(schema))
    assert caught.value.param == "response_format"
    assert "zebra" not in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "zebra', r"lexer error \(line 1, column 14\)"),
        ("start: b\nb: zebra", r"unknown name \(line 2"),
        ('zebra: "a"', "no start rule found"),
        ("start: start", "no token of the model goes on"),
        ('start: "' + "zebra" * 14_000 + '"', "characters"),
        ('start: %json {"multipleOf": 7}', "multipleOf"),
        ('start: %json {"\\u006dultipleOf": 7}', "multipleOf"),
    ],
)
def test_grammar_that_can_not_be_kept_is_refused_without_its_text(
    smollm2_forms: ConstraintFactory, grammar: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        smollm2_forms.open(GenerationParams(grammar=grammar))
    assert caught.value.param == "grammar"
    assert "zebra" not in str(caught.value)


def test_form_of_the_largest_size_is_ready_or_refused_soon(
    smollm2_forms: ConstraintFactory,
) -> None:
    wide = {
        "anyOf": [
            {"properties": {f"k{group}{n}": {"type": "string"} for n in range(40)}}
            for group in range(40)
        ]
    }
    many = {"properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    for schema in (wide, many, {"type": "integer", "multipleOf": 49_999}):
        assert len(json.dumps(schema)) < MAX_FORM_CHARACTERS
        started = time.monotonic()
        with suppress(InvalidRequestError):
            smollm2_forms.open(schema_params(schema))
        assert time.monotonic() - started < 20


def test_form_that_becomes_too_complex_is_an_error_of_the_caller(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory
) -> None:
    grammar = 'start: a{1,1000000}\na: b{1,1000000}\nb: "x"'
    constraint = smollm2_forms.open(GenerationParams(grammar=grammar))
    assert constraint is not None
    logits, x = np.zeros(49_152, np.float32), smollm2_tokenizer.encode_prompt("x")[0]

    def go_on() -> None:
        for _ in range(300):
            constraint.mask(logits)
            constraint.advance(x)

    with pytest.raises(InvalidRequestError, match="can't be held"):
        go_on()


def test_model_without_an_end_can_not_be_held(smollm2_tokenizer: TextTokenizer) -> None:
    forms = ConstraintFactory(smollm2_tokenizer, ())
    assert forms.open(GenerationParams()) is None
    with pytest.raises(CapabilityNotSupportedError, match="names no end token"):
        forms.open(GenerationParams(grammar='start: "a"'))


def test_llguidance_is_imported_by_the_first_form() -> None:
    code = (
        "import sys, iaop_onnx_local.constraint, iaop_onnx_local.sampling\n"
        "assert not [name for name in sys.modules if name.startswith('llguidance')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_logprobs_are_the_models_under_a_constraint(
    smollm2_tokenizer: TextTokenizer, smollm2_forms: ConstraintFactory
) -> None:
    constraint = smollm2_forms.open(GenerationParams(grammar='start: "yes"'))
    logits = np.random.default_rng(0).normal(0, 3, smollm2_tokenizer.size).astype(np.float32)
    chosen = Sampler(SamplingParams(top_logprobs=3), [], constraint).choose(logits)
    free = Sampler(SamplingParams(top_logprobs=3), []).choose(logits)
    assert smollm2_tokenizer.token_text(chosen.token_id) in ("y", "ye", "yes")
    assert chosen.top == free.top
    exact = logits.astype(np.float64)
    expected = exact[chosen.token_id] - np.log(np.exp(exact).sum())
    assert chosen.logprob == pytest.approx(expected, abs=1e-4)
