"""What a chat-completions endpoint answers: whole, or as the events of a stream."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NoReturn

from attrs import define, field

from iaop_cloud_api import _errors
from iaop_core.errors import BackendProtocolError, IaopError, StreamInterruptedError
from iaop_core.messages import FinishReason, TokenLogprob

__all__ = ["DONE", "Answer", "StreamReply", "read_answer"]

DONE = "[DONE]"

# Endpoints have more words than the API's own for the same ends.
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


@define
class Answer:
    """An answer, or what is known of it: a token count that was not told is None."""

    text: str = field(default="", repr=False)
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    """None when they were not asked for."""
    untold: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """Of a stream, those that came after the last text."""

    def take_usage(self, usage: object) -> None:
        """Take the counts of a `usage` object; a later one replaces an earlier one."""
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.completion_tokens = _count(usage.get("completion_tokens"))


def read_answer(body: bytes, *, backend: str, top_logprobs: int | None = None) -> Answer:
    """Read the answer of a request that was not streamed.

    `top_logprobs` is how many alternatives the call wants; None: no log probabilities.
    Raises `BackendProtocolError` for a body that is no answer, an error object among them, and what
    `_errors.from_error_object` tells for an error that says what it is.
    """
    reply = _object(body, backend=backend)
    _raise_error_in(reply, backend=backend, streamed=False)
    choice = _first_choice(reply, backend=backend)
    if choice is None:
        _protocol(backend, "the answer holds no choice")
    message = choice.get("message")
    if not isinstance(message, dict):
        _protocol(backend, "the answer's choice holds no message")
    answer = Answer(text=_whole(_text(message, backend=backend)))
    answer.finish_reason = _finish_reason(choice, backend=backend)
    if answer.finish_reason is None:
        _protocol(backend, "the answer does not say why it ended (finish_reason)")
    answer.take_usage(reply.get("usage"))
    if top_logprobs is not None:
        answer.logprobs = _logprobs(choice, top_logprobs, backend=backend)
        _require_logprobs(answer, backend=backend)
    return answer


class StreamReply:
    """Reads the events of one streamed answer.

    The endpoint has stated the end when a choice had a `finish_reason`, or when `[DONE]` came after
    at least one choice (the reason then is `stop`). What comes between the two, such as the usage,
    still belongs to the answer. `top_logprobs` is as for `read_answer`.
    """

    def __init__(self, *, backend: str, top_logprobs: int | None = None) -> None:
        self.done = False
        """`[DONE]` has come: nothing more belongs to this answer."""
        self._backend = backend
        self._answer = Answer()
        self._deltas: list[str] = []
        self._half = ""
        self._any_choice = False
        self._top_logprobs = top_logprobs
        self._logprobs: list[TokenLogprob] = []
        self._told = 0

    @property
    def finished(self) -> bool:
        """Whether the endpoint has stated the end of the text."""
        return self._answer.finish_reason is not None

    def read(self, data: str) -> str:
        """Take the data of one event; returns the new text, which may be empty.

        Raises `StreamInterruptedError` for an error object, `BackendProtocolError` for what is no
        chunk, and what `_errors.from_error_object` tells for an error that says what it is.
        """
        if data == DONE:
            self.done = True
            return ""
        chunk = _object(data, backend=self._backend)
        _raise_error_in(chunk, backend=self._backend, streamed=True)
        self._answer.take_usage(chunk.get("usage"))
        choice = _first_choice(chunk, backend=self._backend)
        if choice is None:
            return ""
        self._any_choice = True
        if self._top_logprobs is not None:
            self._logprobs += _logprobs(choice, self._top_logprobs, backend=self._backend)
        delta = choice.get("delta")
        text = _text(delta, backend=self._backend) if isinstance(delta, dict) else ""
        reason = _finish_reason(choice, backend=self._backend)
        if reason is not None:
            self._answer.finish_reason = reason
        if text:
            text = self._joined(text)
            if text:
                self._deltas.append(text)
        return text

    def answer(self) -> Answer:
        """The whole answer, once the stream has ended.

        Raises `StreamInterruptedError` when the endpoint has not stated that end, and
        `BackendProtocolError` when it has told no log probabilities though it was asked.
        """
        answer = self._answer
        if answer.finish_reason is None:
            if not (self.done and self._any_choice):
                what = (
                    "[DONE] without any choice" if self.done else "no finish_reason and no [DONE]"
                )
                raise StreamInterruptedError(
                    f"backend {self._backend!r}: the endpoint's stream ended with {what}; the "
                    "text so far is no answer",
                    backend=self._backend,
                )
            answer.finish_reason = "stop"
        answer.text = "".join(self._deltas)
        if self._top_logprobs is not None:
            answer.logprobs, answer.untold = tuple(self._logprobs), self.told()
            _require_logprobs(answer, backend=self._backend)
        return answer

    def told(self) -> tuple[TokenLogprob, ...]:
        """The log probabilities that have come since the last time."""
        begin, self._told = self._told, len(self._logprobs)
        return tuple(self._logprobs[begin:])

    def rest(self) -> str:
        """The text that was held back for its other half, which has not come."""
        rest, self._half = _whole(self._half), ""
        if rest:
            self._deltas.append(rest)
        return rest

    def _joined(self, text: str) -> str:
        """The text without half a character: JSON escapes may part a surrogate pair."""
        text = self._half + text
        self._half = ""
        if "\ud800" <= text[-1] <= "\udbff":
            self._half, text = text[-1], text[:-1]
        return _whole(text)


def _whole(text: str) -> str:
    """The text with surrogate pairs joined, and half ones replaced as a decoder does."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(data: str | bytes, *, backend: str) -> dict[str, Any]:
    parsed = None
    with suppress(ValueError, RecursionError):  # the error holds the document: no context of ours
        parsed = json.loads(data)
    if not isinstance(parsed, dict):
        _protocol(backend, "the answer is not a JSON object")
    return parsed


def _first_choice(reply: dict[str, Any], *, backend: str) -> dict[str, Any] | None:
    choices = reply.get("choices")
    if not choices:  # absent, null, or empty as in the chunk that carries the usage
        return None
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        _protocol(backend, "the answer's choices are not a list of objects")
    return choices[0]


def _text(message: dict[str, Any], *, backend: str) -> str:
    content = message.get("content")
    if content is None:  # the role alone, or a reasoning model that still thinks
        return ""
    if not isinstance(content, str):
        _protocol(backend, f"the answer's content is not text but {type(content).__name__}")
    return content


def _logprobs(choice: dict[str, Any], top: int, *, backend: str) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a choice; none when it has none."""
    told = choice.get("logprobs")
    entries = told.get("content") if isinstance(told, dict) else None
    read = None
    with suppress(TypeError, ValueError, KeyError):  # these errors may hold the text
        read = tuple(_logprob(entry, top) for entry in entries or ())
    if read is None:
        _protocol(backend, "the answer's logprobs are not a list of tokens and their logprob")
    return read


def _logprob(entry: dict[str, Any], top: int) -> TokenLogprob:
    token, data, number = entry["token"], entry.get("bytes"), entry.get("id")
    if not isinstance(token, str) or not isinstance(data, list | None):
        raise TypeError
    others = [_logprob(other, 0) for other in entry.get("top_logprobs") or ()] if top else []
    others.sort(key=lambda other: -other.logprob)
    return TokenLogprob(
        _whole(token),
        None if data is None else bytes(data),
        number if type(number) is int else None,
        entry["logprob"],
        tuple(others[:top]),
    )


def _require_logprobs(answer: Answer, *, backend: str) -> None:
    if answer.text and not answer.logprobs:
        _protocol(
            backend,
            "the endpoint was asked for logprobs and told none; name the parameters that it "
            "honours in the setting params",
        )


def _finish_reason(choice: dict[str, Any], *, backend: str) -> FinishReason | None:
    reason = choice.get("finish_reason")
    if not reason:  # null, absent, or "" as some endpoints have it
        return None
    known = _FINISH_REASONS.get(reason) if isinstance(reason, str) else None
    if known is None:
        shown = _errors.safe_word(reason) or "an unknown word"
        _protocol(backend, f"the answer's finish_reason is {shown}, which is no end of an answer")
    return known


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _raise_error_in(reply: dict[str, Any], *, backend: str, streamed: bool) -> None:
    error = reply.get("error")
    if not error:
        return
    told: IaopError | None = _errors.from_error_object(error, backend=backend)
    if told is not None:
        raise told
    words = _errors.shown_words(error)
    what = f"backend {backend!r}: the endpoint answered 200 and then an error{words}"
    if streamed:
        raise StreamInterruptedError(f"{what}; the text so far is no answer", backend=backend)
    raise BackendProtocolError(what, backend=backend)


def _protocol(backend: str, what: str) -> NoReturn:
    raise BackendProtocolError(
        f"backend {backend!r}: {what}; the endpoint does not speak chat completions as this "
        "backend reads them",
        backend=backend,
    )
