"""What goes into a backend and what comes out of it."""

from __future__ import annotations

import builtins
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

from attrs import asdict, field, fields, fields_dict, frozen, validators

from iaop_core.errors import CapabilityNotSupportedError, InvalidRequestError

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "LOWEST_LOGPROB",
    "MAX_TOP_LOGPROBS",
    "FinishReason",
    "GenerationParams",
    "InferChunk",
    "InferResult",
    "JsonSchema",
    "Message",
    "Params",
    "Prompt",
    "ResponseFormat",
    "Role",
    "TokenLogprob",
    "as_messages",
    "estimate_tokens",
    "with_context",
]

DEFAULT_MAX_TOKENS = 256
"""Tokens of an answer when neither the call nor the backend's settings say otherwise."""
MAX_TOP_LOGPROBS = 20
"""Alternatives at each position that a call may ask for."""
LOWEST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, and of anything lower: JSON has no infinity."""

Role: TypeAlias = Literal["system", "user", "assistant"]
FinishReason: TypeAlias = Literal["stop", "length", "content_filter"]


def _shown_kind(value: object) -> str:
    """Name a value's type for an error, never the value: it may be part of a prompt."""
    return "null" if value is None else type(value).__name__


def _text_of(content: object) -> str:
    """The text of a message's `content`: a string, or a list of text parts, joined as they are."""
    if isinstance(content, str):
        return _encodable(content, "messages")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(
            f"a message's content is text or a list of parts, not {_shown_kind(content)}",
            param="messages",
        )
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidRequestError(
                "a part of a message's content is an object with a type", param="messages"
            )
        if part["type"] != "text":
            raise CapabilityNotSupportedError(
                f"content parts of type {part['type'][:40]!r} are not supported; send text parts",
                capability=part["type"],
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError("a text part needs its text", param="messages")
        texts.append(part["text"])
    return _encodable("".join(texts), "messages")


def _encodable(text: str, param: str) -> str:
    """The text, unless it holds half a surrogate pair, which no engine and no network takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass  # raised below, outside of it: this error holds the text
    else:
        return text
    raise InvalidRequestError(
        f"a text of {param} holds half of a surrogate pair, which is not Unicode", param=param
    )


@frozen
class Message:
    """One turn of a chat. `content` is text; text parts are joined without anything between.

    The role `developer` is read as `system`, its older name.
    """

    role: Role = field()
    content: str = field(converter=_text_of, repr=False)

    @role.validator
    def _check_role(self, _attribute: object, role: object) -> None:
        if role not in get_args(Role):
            raise InvalidRequestError(
                f"a message's role is one of {', '.join(get_args(Role))}"
                + ("; tools are not supported" if role in ("tool", "function") else ""),
                param="messages",
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Message:
        """Read an OpenAI-style message. Raises `InvalidRequestError` for what it can't carry."""
        unknown = [
            str(key)
            for key, value in mapping.items()
            if key not in ("role", "content", "name") and value is not None
        ]
        if unknown:
            raise InvalidRequestError(
                f"a message has fields that are not supported: {', '.join(sorted(unknown))[:200]}",
                param="messages",
            )
        role: Any = mapping.get("role")
        return cls("system" if role == "developer" else role, mapping.get("content"))


Prompt: TypeAlias = str | Sequence[Message | Mapping[str, Any]]
"""One user turn as a string, or the messages of a chat."""


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as messages; a string is one user turn. Raises `InvalidRequestError`."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequestError(
            f"a prompt is a string or a list of messages, not {_shown_kind(prompt)}",
            param="messages",
        )
    if not prompt:
        raise InvalidRequestError("a chat needs at least one message", param="messages")
    messages = []
    for message in prompt:
        if isinstance(message, Mapping):
            message = Message.from_mapping(message)
        elif not isinstance(message, Message):
            raise InvalidRequestError(
                f"a message is an object with role and content, not {_shown_kind(message)}",
                param="messages",
            )
        messages.append(message)
    return tuple(messages)


def with_context(messages: Sequence[Message], context: Sequence[str] | None) -> tuple[Message, ...]:
    """The messages with the source texts laid before the last user turn.

    The layout is the same for every engine: the line `Sources:`, then each text after its number
    in brackets, an empty line, and the turn itself. No source is cut or left out.
    Raises `InvalidRequestError` when a source is no text or there is no user turn.
    """
    messages = tuple(messages)
    if context is None:
        return messages
    # Not any iterable: a generator would be used up by this very check.
    if isinstance(context, str | bytes) or not isinstance(context, Sequence):
        raise InvalidRequestError("context is a list of texts", param="context")
    if not all(isinstance(source, str) for source in context):
        raise InvalidRequestError("context is a list of texts", param="context")
    if not context:
        return messages
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last_user is None:
        raise InvalidRequestError("context needs a user message to go with", param="context")
    sources = "\n".join(f"[{number}] {text}" for number, text in enumerate(context, 1))
    turn = Message("user", f"Sources:\n{sources}\n\n{messages[last_user].content}")
    return (*messages[:last_user], turn, *messages[last_user + 1 :])


def estimate_tokens(text: str) -> int:
    """The stated estimate where no engine counts: a quarter of the characters, at least one."""
    return max(1, len(text) // 4)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """A field that is None or a finite number in the range (`above`: the low end excluded)."""

    def check(_instance: object, attribute: Any, value: Any) -> None:
        if value is None:
            return
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            span = f"above {low:g}" if above else f"at least {low:g}"
            span += f" and at most {high:g}" if math.isfinite(high) else ""
            raise InvalidRequestError(f"{attribute.name} is a number {span}", param=attribute.name)

    return field(default=None, validator=check)


def _integer(low: int, high: float = math.inf) -> Any:
    def check(_instance: object, attribute: Any, value: Any) -> None:
        if value is not None and (type(value) is not int or not low <= value <= high):
            span = f"at least {low}" + (f" and at most {high:g}" if math.isfinite(high) else "")
            raise InvalidRequestError(
                f"{attribute.name} is a whole number of {span}", param=attribute.name
            )

    return field(default=None, validator=check)


def _as_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Iterable):
        raise InvalidRequestError("stop is a text or a list of texts", param="stop")
    stops = tuple(stops)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequestError("stop is a text or a list of texts, none empty", param="stop")
    return tuple(_encodable(stop, "stop") for stop in stops)


def _as_logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    try:
        # JSON's keys are texts; a number that is not whole is no token id.
        bias = {
            int(token if isinstance(token, str) else operator.index(token)): weight
            for token, weight in dict(value).items()  # type: ignore[call-overload]
        }
    except (TypeError, ValueError):
        bias = {-1: None}
    if not all(token >= 0 and _is_number(w) and abs(w) <= 100 for token, w in bias.items()):
        raise InvalidRequestError(
            "logit_bias maps token ids to numbers from -100 to 100", param="logit_bias"
        )
    return bias


def _as_logprobs(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError("logprobs is true or false", param="logprobs")
    return value or None  # to ask for none is not to ask


def _from_mapping(cls: type[Any], mapping: Mapping[str, Any], what: str) -> Any:
    """Make the class of the mapping's keys, in a part of `response_format`; others are refused."""
    if unknown := sorted(str(key)[:40] for key in mapping if key not in fields_dict(cls)):
        raise _bad_format(
            f"{what} has unknown keys: {', '.join(unknown)[:200]}; "
            f"known: {', '.join(fields_dict(cls))}"
        )
    return cls(**mapping)


def _bad_format(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, param="response_format")


_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _as_schema(value: object) -> dict[str, Any]:
    """A copy of the schema, in JSON's own types."""
    copy: Any = None
    with suppress(TypeError, ValueError, RecursionError):  # these errors may hold the schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        copy = json.loads(text)
    if not isinstance(copy, dict):
        raise _bad_format("response_format: json_schema.schema is a JSON object: a JSON Schema")
    return copy


@frozen(kw_only=True)
class JsonSchema:
    """The schema of a `ResponseFormat`, as the OpenAI API wraps it."""

    name: str = field(default=None)
    """Letters, digits, `_` and `-`, 64 at most; some models are told it."""
    schema: Mapping[str, Any] = field(default=None, converter=_as_schema, repr=False)
    """A JSON Schema. Which of its keywords can be enforced is the engine's to say."""
    strict: bool | None = None
    """None and false leave it to the engine how closely it keeps to the schema."""
    description: str | None = field(default=None, repr=False)

    @name.validator
    def _check_name(self, _attribute: object, name: object) -> None:
        if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
            raise _bad_format(
                "response_format: json_schema.name is a text of 1 to 64 letters, digits, _ and -"
            )

    def __attrs_post_init__(self) -> None:
        if self.strict is not None and not isinstance(self.strict, bool):
            raise _bad_format("response_format: json_schema.strict is true or false")
        if self.description is not None and not isinstance(self.description, str):
            raise _bad_format("response_format: json_schema.description is a text")


def _as_json_schema(value: object) -> object:
    if isinstance(value, Mapping):
        return _from_mapping(JsonSchema, value, "response_format: json_schema")
    return value


@frozen(kw_only=True)
class ResponseFormat:
    """What form the answer's text has, as the OpenAI API says it.

    An answer that ends by `stop` is one JSON object (`json_object`), or JSON that the schema
    allows (`json_schema`). One that ends by `length` is the beginning of it. Raises
    `InvalidRequestError`.
    """

    type: Literal["text", "json_object", "json_schema"] = field(default=None)
    json_schema: JsonSchema | None = field(default=None, converter=_as_json_schema)
    """Given with the type `json_schema`, and with no other."""

    def __attrs_post_init__(self) -> None:
        if self.type not in ("text", "json_object", "json_schema"):
            raise _bad_format("response_format: type is one of text, json_object, json_schema")
        if self.type == "json_schema" and not isinstance(self.json_schema, JsonSchema):
            raise _bad_format("response_format: the type json_schema needs json_schema, an object")
        if self.type != "json_schema" and self.json_schema is not None:
            raise _bad_format("response_format: json_schema goes with the type json_schema")

    @property
    def as_mapping(self) -> dict[str, Any]:
        """The form of the OpenAI API, for JSON; what is None is left out."""
        return asdict(self, filter=lambda _, value: value is not None)


def _as_response_format(value: object) -> ResponseFormat | None:
    if isinstance(value, Mapping):
        value = _from_mapping(ResponseFormat, value, "response_format")
    if value is not None and not isinstance(value, ResponseFormat):
        raise _bad_format(
            "response_format is an object with a type: text, json_object or json_schema"
        )
    return None if value is None or value.type == "text" else value


def _as_grammar(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError("grammar is a text, in Lark's syntax", param="grammar")
    return _encodable(value, "grammar")


@frozen(kw_only=True)
class GenerationParams:
    """How to generate; a field that is None is left to the backend.

    Names and meanings are those of the OpenAI chat completions API, with `top_k`, `min_p` and
    `repetition_penalty` as the open engines have them. A value out of range raises
    `InvalidRequestError`.
    """

    max_tokens: int | None = _integer(1)
    """Tokens of the answer at most. None: the backend's setting, or `DEFAULT_MAX_TOKENS`."""
    temperature: float | None = _number(0, 2)
    """0 is greedy."""
    top_p: float | None = _number(0, 1, above=True)
    top_k: int | None = _integer(1)
    min_p: float | None = _number(0, 1)
    stop: tuple[str, ...] = field(default=(), converter=_as_stops)
    """Texts that end the answer; they are not part of it."""
    seed: int | None = _integer(0)
    presence_penalty: float | None = _number(-2, 2)
    frequency_penalty: float | None = _number(-2, 2)
    repetition_penalty: float | None = _number(0.01, 100)
    """1 changes nothing."""
    logit_bias: Mapping[int, float] | None = field(default=None, converter=_as_logit_bias)
    """Token id → what to add to its logit, -100 to 100."""
    logprobs: bool | None = field(default=None, converter=_as_logprobs)
    """Tell the log probability of each token of the answer. False is None: nothing is asked."""
    top_logprobs: int | None = _integer(0, MAX_TOP_LOGPROBS)
    """With `logprobs`: tell as many of the likeliest tokens at each position, 0 to 20."""
    response_format: ResponseFormat | None = field(
        default=None, converter=_as_response_format, repr=False
    )
    """The form of the answer; a mapping is read. The type `text` is None: nothing is asked."""
    grammar: str | None = field(default=None, converter=_as_grammar, repr=False)
    """A context-free grammar that the answer keeps to, in Lark's syntax as llguidance reads it,
    with the rule `start`. Not together with `response_format`."""

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        if self.response_format is not None and self.grammar is not None:
            raise InvalidRequestError(
                "response_format and grammar can't both say the form of the answer; give one",
                param="grammar",
            )

    @classmethod
    def from_input(cls, params: Params) -> GenerationParams:
        """What a caller gave: nothing, the fields in a mapping, or an instance.

        Raises `InvalidRequestError` for an unknown field, with the nearest known one.
        """
        if params is None:
            return _UNSET
        if isinstance(params, GenerationParams):
            return params
        if not isinstance(params, Mapping):
            raise InvalidRequestError(
                f"params is a mapping or GenerationParams, not {_shown_kind(params)}"
            )
        known = fields_dict(cls)
        for name in params:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                raise InvalidRequestError(
                    f"unknown generation parameter {str(name)[:40]!r}"
                    + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"),
                    param=str(name)[:40],
                )
        return cls(**params)

    @property
    def given(self) -> Mapping[str, Any]:
        """The fields that the caller set, by name."""
        if self is _UNSET:
            return {}
        return asdict(self, recurse=False, filter=lambda a, value: value != a.default)

    def require_supported(self, supported: frozenset[str], *, backend: str) -> None:
        """Raise `CapabilityNotSupportedError` for a set field that the backend can't honour."""
        if self is _UNSET:
            return
        for name in self.given:
            if name not in supported:
                raise CapabilityNotSupportedError(
                    f"backend {backend!r} can't honour the parameter {name!r}; it takes "
                    + ", ".join(sorted(supported)),
                    backend=backend,
                    capability=name,
                )


Params: TypeAlias = GenerationParams | Mapping[str, Any] | None
_UNSET = GenerationParams()


_is_text = validators.instance_of(str)
_is_count = validators.and_(validators.instance_of(int), validators.ge(0))


def _round_ms(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _as_logprob(value: float) -> float:
    value = float(value)
    if math.isnan(value):
        raise ValueError("a log probability is a number")
    return min(max(value, LOWEST_LOGPROB), 0.0)


@frozen
class TokenLogprob:
    """How likely a token was at its position, as the OpenAI API tells it.

    The likelihood is the model's own, the softmax of its logits, before temperature, penalties,
    biases, `top_k` and the like, or a grammar change them: how likely the model held the token,
    not how likely it was to be drawn.
    """

    token: str = field(repr=False)
    """The token's text. Of a token that holds a part of a character it shows U+FFFD."""
    bytes: builtins.bytes | None = field(repr=False)
    """What the token adds to the text, in UTF-8; may be a part of a character. A control token
    adds `b""`. None: the backend can't tell."""
    token_id: int | None = field(repr=False)
    """Its number in the model's vocabulary; None: the backend can't tell."""
    logprob: float = field(converter=_as_logprob)
    """Natural logarithm of the probability, from `LOWEST_LOGPROB` to 0."""
    top: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """The likeliest tokens at this position, the likeliest first, as many as `top_logprobs` asks;
    the token itself may be one of them. Theirs is empty."""


@frozen(kw_only=True)
class InferResult:
    """One whole answer; `str()` of it is its text."""

    text: str = field(repr=False, validator=_is_text)
    backend_name: str
    model_id: str = field(validator=_is_text)
    prompt_tokens: int = field(validator=_is_count)
    completion_tokens: int = field(validator=_is_count)
    latency_ms: float = field(converter=_round_ms)
    """From the backend's taking the call to the end of the answer."""
    finish_reason: FinishReason = field(
        default="stop", validator=validators.in_(get_args(FinishReason))
    )
    usage_estimated: bool = False
    """No engine counted the tokens: they are `estimate_tokens` of the texts."""
    offline: bool = False
    """The answer comes from the offline kernel, not from a model."""
    device: str = ""
    """What the model ran on, as the engine itself tells it; `""` when it does not."""
    time_to_first_token_ms: float | None = field(default=None, converter=_round_ms)
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    """One for each token that the engine tells of, in order; None: the call did not ask. Those of
    the end and of a stop text may be among them, so that their bytes may go on after the text."""

    def __str__(self) -> str:
        return self.text


@frozen
class InferChunk:
    """A piece of a stream: new text, or the end with the whole result and `delta=""`."""

    delta: str = field(repr=False)
    result: InferResult | None = None
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """Those of the tokens decided since the chunk before, whether their text is in this delta, or
    is held back for the rest of a character or of a stop text, or is none. The end has those that
    no delta came after. Joined over all chunks, the end among them, they are the result's."""


PARAM_NAMES: frozenset[str] = frozenset(a.name for a in fields(GenerationParams))
"""Every parameter that a backend may declare in its capabilities."""
