"""Keeps an answer in its form, JSON or a grammar: says at each position which tokens may come.

llguidance computes that. Of the libraries that do, it needs nothing else (xgrammar needs PyTorch
and transformers), is ready for a new schema in milliseconds (outlines-core walks the vocabulary
for a second) and takes context-free grammars and recursive schemas; it refuses the keywords that
it can't enforce. It is MIT, with wheels for each Python on Linux, macOS and Windows.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from iaop_core import GenerationParams
from iaop_core.errors import CapabilityNotSupportedError, InvalidRequestError
from iaop_onnx_local.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["MAX_FORM_CHARACTERS", "Constraint", "ConstraintFactory"]

MAX_FORM_CHARACTERS: Final = 65_536
"""Of a schema, as JSON, or of a grammar. The worst of this size take about half a second."""

_MAX_MULTIPLE: Final = 50_000
"""Of all `multipleOf` together: llguidance makes as many states, and nothing else limits them."""

# One line, as Python's json writes it: white space at will invites small models to write nothing
# else. A keyword that can't be enforced is an error.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}

# Text that the form leaves no choice of may still be cut into tokens as the model likes.
_ANY_TOKENS: Final = '%llguidance {"no_forcing": true}'

_LIMITS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") != 0,
    np.float32(np.inf),
    np.float32(-np.inf),
)
"""For each byte of a bit mask, the most that the logits of its eight tokens may be."""


# What llguidance's messages may be shown of: they go on with what the caller wrote.
_REASON: Final = re.compile(r"(?:at )?(?:(\d+)\((\d+)\):\s*)?([A-Za-z& -]+)")
_NOT_ENFORCED: Final = frozenset(
    [
        "contains",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)


class Constraint:
    """Which tokens may come next in one answer; `ConstraintFactory.open` makes one.

    One thread at a time may use it. The end is allowed where the form is complete, and nothing
    else is once it can't go on. An answer that a limit cuts has only the beginning of its form.

    Args:
        matcher: llguidance's state of the answer.
        tokens: the vocabulary's size.
        barred: tokens that may not begin the answer.
        param: the parameter that gave the form, for errors.
    """

    def __init__(
        self, matcher: LLMatcher, tokens: int, barred: NDArray[np.int64], param: str
    ) -> None:
        self._matcher = matcher
        self._bits = np.zeros((tokens + 31) // 32 * 4, np.uint8)
        self._tokens = tokens
        self._barred = barred
        self._param = param

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Sets the logits `[vocabulary]` of tokens that may not come to minus infinity, in place.

        Raises:
            InvalidRequestError: the form has become too complex to be followed.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        tokens = min(self._tokens, len(logits))
        limits = _LIMITS.take(self._bits, axis=0).reshape(-1)[:tokens]
        np.minimum(logits[:tokens], limits, out=logits[:tokens])
        logits[tokens:] = -np.inf  # a model may have more logits than tokens
        logits[self._barred] = -np.inf

    def advance(self, token_id: int) -> None:
        """Takes the token that was chosen, one of those allowed.

        Raises:
            InvalidRequestError: the form has become too complex to be followed.
        """
        self._matcher.consume_token(token_id)
        self._check()
        self._barred = self._barred[:0]

    @property
    def finished(self) -> bool:
        """Whether the form is complete and can't go on: only the end may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._param, _reason(self._matcher.get_error()))


class ConstraintFactory:
    """Opens the constraints of a model's answers.

    The first answer that asks for one has the vocabulary read, which takes some tenths of a
    second; models that are never asked need neither the time nor llguidance.

    Args:
        tokenizer: the model's.
        end_token_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(end_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._barred = np.zeros(0, np.int64)

    def open(self, params: GenerationParams) -> Constraint | None:
        """The constraint that `response_format` or `grammar` asks for; None for neither.

        JSON is written on one line, with one space after each `,` and `:`, and its objects have
        the properties in the schema's order.

        Raises:
            InvalidRequestError: the schema or grammar is malformed, too large, can't be fulfilled,
                or has a keyword that can't be enforced.
            CapabilityNotSupportedError: the model has no end token, which could end the form.
        """
        if params.response_format is None and params.grammar is None:
            return None
        from llguidance import LLMatcher

        param = "response_format" if params.grammar is None else "grammar"
        if not self._end_token_ids:
            raise CapabilityNotSupportedError(
                f"the model names no end token, so no answer can be held to a {param}",
                capability=param,
            )
        if params.grammar is None:
            grammar = _json_grammar(params)
        else:
            grammar = _checked_grammar(params.grammar)
        lark = LLMatcher.grammar_from_lark(f"{grammar}\n{_ANY_TOKENS}")
        matcher = LLMatcher(self._read_vocabulary(), lark, log_level=0)
        tokens = self._tokenizer.size
        constraint = Constraint(matcher, tokens, self._barred, param)
        allowed = np.zeros(tokens, np.float32)
        constraint.mask(allowed)
        if allowed.max() == -np.inf:
            raise _refusal(param, "its text begins with a space, which this model's texts can't")
        return constraint

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                vocabulary = _Vocabulary(self._tokenizer, self._end_token_ids[0])
                self._vocabulary = LLTokenizer(
                    TokenizerWrapper(vocabulary),
                    eos_token=self._end_token_ids,
                    slices=LLTokenizer.json_slices(),
                )
                if self._tokenizer.drops_first_space:
                    # Such a space would be seen by the form, and not be in the text.
                    spaced = [t for t, data in enumerate(vocabulary.tokens) if data[:1] == b" "]
                    self._barred = np.array(spaced, np.int64)
            return self._vocabulary


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, end_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_token_id
        self.special_token_ids = sorted(tokenizer.control_ids)
        # Control tokens go by their names, by which a grammar may call them.
        self.tokens = [
            tokenizer.token_text(token).encode()
            if token in tokenizer.control_ids
            else tokenizer.token_bytes(token)
            for token in range(tokenizer.size)
        ]

    def __call__(self, text: str) -> list[int]:
        raise TypeError("llguidance encodes text only to force tokens, and _ANY_TOKENS says not to")


def _json_grammar(params: GenerationParams) -> str:
    wanted = params.response_format
    schema: Mapping[str, Any] = {"type": "object"}
    if wanted is not None and wanted.json_schema is not None:
        schema = wanted.json_schema.schema
    _check_size("response_format", json.dumps(schema, ensure_ascii=False))
    if (states := _multiples(schema)) > _MAX_MULTIPLE:
        raise _refusal(
            "response_format",
            f"its multipleOf have a least common multiple of {states} units, and at most "
            f"{_MAX_MULTIPLE} can be followed",
        )
    return f"start: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _checked_grammar(grammar: str) -> str:
    _check_size("grammar", grammar)
    if "%json" in grammar and re.search(r"multipleOf|\\u", grammar):
        raise _refusal(
            "grammar",
            "multipleOf and Unicode escapes can't be in a %json; a response_format may have them",
        )
    return grammar


def _check_size(param: str, text: str) -> None:
    if len(text) > MAX_FORM_CHARACTERS:
        raise _refusal(param, f"it has {len(text)} characters, and may have {MAX_FORM_CHARACTERS}")


def _multiples(schema: Mapping[str, Any]) -> int:
    """The least common multiple of all `multipleOf`, in units of their last decimal place."""
    numbers = [Fraction(str(number)) for number in _find_multiples(schema)]
    unit = math.lcm(*(number.denominator for number in numbers))
    return math.lcm(*(int(number * unit) for number in numbers))


def _find_multiples(schema: Mapping[str, Any]) -> Iterator[float]:
    rest: list[Any] = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            number = part.get("multipleOf")
            if isinstance(number, int | float) and number is not True and number > 0:
                yield number
            rest += part.values()


def _reason(message: str) -> str:
    """Of llguidance's message what is not the caller's own text: its place, kind and keywords."""
    place, _, rest = message.rpartition("failed to compile JSON schema: ")
    found = _REASON.match(rest)
    line, column, kind = found.groups() if found else (None, None, "")
    keywords = sorted(_NOT_ENFORCED.intersection(re.findall(r'"(\w+)"', rest)))
    if kind.startswith("Unimplemented") and keywords:
        return f"the keywords {', '.join(keywords)} can't be enforced"
    if kind.startswith("NoExtension"):
        return "no token of the model goes on with it, and it is not complete"
    reason = kind.strip() or "llguidance can't follow it"
    return f"{reason} (line {line}, column {column})" if line and not place else reason


def _refusal(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the answer can't be held to this {param}: {why}", param=param)
