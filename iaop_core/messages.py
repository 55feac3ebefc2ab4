"""What goes into a backend and what comes out of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

from attrs import asdict, field, fields, fields_dict, frozen, validators

from iaop_core.errors import CapabilityNotSupportedError, InvalidRequestError

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "FinishReason",
    "GenerationParams",
    "InferChunk",
    "InferResult",
    "Message",
    "Params",
    "Prompt",
    "Role",
    "as_messages",
    "estimate_tokens",
    "with_context",
]

DEFAULT_MAX_TOKENS = 256
"""Tokens of an answer when neither the call nor the backend's settings say otherwise."""

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


def _integer(low: int) -> Any:
    def check(_instance: object, attribute: Any, value: Any) -> None:
        if value is not None and (type(value) is not int or value < low):
            raise InvalidRequestError(
                f"{attribute.name} is a whole number of at least {low}", param=attribute.name
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
    repetition_penalty: float | None = _number(0, above=True)
    """1 changes nothing."""
    logit_bias: Mapping[int, float] | None = field(default=None, converter=_as_logit_bias)
    """Token id → what to add to its logit, -100 to 100."""

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

    def __str__(self) -> str:
        return self.text


@frozen
class InferChunk:
    """A piece of a stream: new text, or the end with the whole result and `delta=""`."""

    delta: str = field(repr=False)
    result: InferResult | None = None


PARAM_NAMES: frozenset[str] = frozenset(a.name for a in fields(GenerationParams))
"""Every parameter that a backend may declare in its capabilities."""
