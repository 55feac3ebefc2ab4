"""Streams: what an end is, and that nothing else passes for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from faulty_upstream import (
    CUT,
    DONE,
    RESET,
    SILENCE,
    FaultyUpstream,
    Reply,
    chunk,
    chunked_events,
    completion,
    error,
    event,
    events,
    json_reply,
    usage,
    usage_chunk,
)

from iaop_cloud_api import CloudApiBackend
from iaop_core import InferResult, TokenLogprob
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    ContextLengthExceededError,
    StreamInterruptedError,
)

HELLO = (chunk("", role="assistant"), chunk("Hel"), chunk("lo"))


def collect(backend: CloudApiBackend, **params: Any) -> tuple[list[str], InferResult]:
    """The deltas and the end of a stream that has one."""
    *deltas, end = backend.stream("Hi", params=params)
    assert end.result is not None
    assert "".join(chunk.delta for chunk in deltas) == end.result.text
    return [chunk.delta for chunk in deltas], end.result


def fail(backend: CloudApiBackend) -> list[str]:
    """Read a stream to its error; returns the deltas of one that has none."""
    deltas = []
    for piece in backend.stream("Hi"):
        assert piece.result is None, "a broken stream must not look like success"
        deltas.append(piece.delta)
    return deltas


# -- ends that the endpoint states ---------------------------------------------------------------

ENDS: dict[str, tuple[bytes | object, ...]] = {
    "finish reason, usage, DONE": (chunk(finish="stop"), usage_chunk(3, 2), DONE),
    "finish reason and DONE": (chunk(finish="stop"), DONE),
    "finish reason alone": (chunk(finish="stop"),),
    "DONE alone": (DONE,),
    "finish reason, then a reset": (chunk(finish="stop"), 0.05, RESET),
    "finish reason of another word": (chunk(finish="eos"), DONE),
}


@pytest.mark.parametrize("start", [events, chunked_events])
@pytest.mark.parametrize("name", ENDS)
def test_stream_ends_when_the_endpoint_states_it(
    upstream: FaultyUpstream,
    backend: CloudApiBackend,
    name: str,
    start: Callable[..., Reply],
) -> None:
    upstream.answer(start(*HELLO, *ENDS[name]))
    deltas, result = collect(backend)
    assert deltas == ["Hel", "lo"]
    assert result.finish_reason == "stop"


def test_stream_ends_soon_after_a_finish_reason_when_nothing_else_comes(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(*HELLO, chunk(finish="length"), SILENCE))
    started = time.monotonic()
    _, result = collect(backend)
    assert result.finish_reason == "length"
    assert time.monotonic() - started < 4


def test_stream_reads_nothing_after_done(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(*HELLO, chunk(finish="stop"), DONE + chunk("more"), SILENCE))
    assert collect(backend)[1].text == "Hello"


# -- ends that it does not -----------------------------------------------------------------------

CUTS: dict[str, tuple[Reply, type[Exception]]] = {
    "no bytes": (events(), StreamInterruptedError),
    "comments alone": (events(b": hello\n\n"), StreamInterruptedError),
    "no end": (events(*HELLO), StreamInterruptedError),
    "DONE alone without a choice": (events(DONE), StreamInterruptedError),
    "half an event": (events(*HELLO, chunk(finish="stop")[:-9]), StreamInterruptedError),
    "reset": (events(*HELLO, 0.05, RESET), StreamInterruptedError),
    "cut within a chunk": (chunked_events(*HELLO, 0.05, CUT), StreamInterruptedError),
    "error object": (events(*HELLO, event(error("x", code="boom"))), StreamInterruptedError),
    "error object with an end": (
        events(*HELLO, event(error("x")), chunk(finish="stop"), DONE),
        StreamInterruptedError,
    ),
    "bare error text": (events(*HELLO, event({"error": "text"}), DONE), StreamInterruptedError),
    "no JSON": (events(*HELLO, b"data: {nonsense\n\n", DONE), BackendProtocolError),
    "no object": (events(b"data: 42\n\n", DONE), BackendProtocolError),
    "deep JSON": (events(b"data: " + b"[" * 100_000 + b"\n\n"), BackendProtocolError),
    "choices of no objects": (events(event({"choices": [None]}), DONE), BackendProtocolError),
    "choices of another kind": (events(event({"choices": {"a": 1}})), BackendProtocolError),
    "content of another kind": (
        events(event({"choices": [{"delta": {"content": ["a"]}}]}), DONE),
        BackendProtocolError,
    ),
    "unknown finish reason": (events(*HELLO, chunk(finish="tool_calls")), BackendProtocolError),
    "whole answer": (json_reply(completion("Hello")), BackendProtocolError),
    "error object as JSON": (json_reply(error("x")), BackendProtocolError),
    "a page": (events(b"<html>", content_type="text/html"), BackendProtocolError),
    "nothing at all": (Reply([CUT]), BackendUnavailableError),
    "no HTTP": (Reply([b"SSH-2.0-x\r\n\r\n"]), BackendProtocolError),
}


@pytest.mark.parametrize("name", CUTS)
def test_stream_without_a_stated_end_is_an_error(
    upstream: FaultyUpstream, backend: CloudApiBackend, name: str
) -> None:
    reply, kind = CUTS[name]
    upstream.answer(reply)
    with pytest.raises(kind) as caught:
        fail(backend)
    assert type(caught.value) is kind
    assert backend.name in str(caught.value)
    assert len(upstream.posts) == 1, "a request is never sent twice"
    upstream.answer(events(*HELLO, DONE))
    assert collect(backend)[1].text == "Hello", "the next request works"


def test_stream_says_what_an_error_object_is(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    too_long = error("maximum context length is 4096 tokens", code="context_length_exceeded")
    upstream.answer(events(event(too_long)))
    with pytest.raises(ContextLengthExceededError) as caught:
        fail(backend)
    assert caught.value.context_tokens == 4096


def test_stream_that_falls_silent_times_out(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(events(*HELLO, SILENCE))
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError) as caught:
        fail(make(idle_timeout_ms=300))
    assert 0.25 < time.monotonic() - started < 2
    assert caught.value.timeout_ms == 300
    assert upstream.calls[0].left.wait(1)


def test_stream_that_never_begins_times_out(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(events(b": wait\n\n", 0.2, b": wait\n\n", 0.2, b": wait\n\n", SILENCE))
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError) as caught:
        fail(make(timeout_ms=500, idle_timeout_ms=60_000))
    assert 0.45 < time.monotonic() - started < 2
    assert caught.value.timeout_ms == 500


def test_slow_stream_is_cut_by_no_limit_but_of_silence(upstream: FaultyUpstream, make: Any) -> None:
    slow = [step for number in range(8) for step in (0.1, chunk(str(number)))]
    upstream.answer(events(*slow, 0.1, chunk(finish="stop"), DONE))
    assert collect(make(timeout_ms=300, idle_timeout_ms=300))[1].text == "01234567"


def test_comments_keep_a_thinking_stream_alive(upstream: FaultyUpstream, make: Any) -> None:
    waiting = [step for _ in range(6) for step in (0.1, b": wait\n\n")]
    upstream.answer(events(*HELLO, *waiting, chunk("!", finish="stop"), DONE))
    assert collect(make(idle_timeout_ms=300))[1].text == "Hello!"


def test_deltas_come_when_they_are_made(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(chunked_events(*[s for c in "abcd" for s in (chunk(c), 0.25)], DONE))
    times = [time.monotonic() for piece in backend.stream("Hi") if piece.delta]
    assert all(0.15 < after - before < 0.4 for before, after in pairwise(times))
    assert upstream.calls[0].headers["accept-encoding"] == "identity"


# -- what the bytes may look like ----------------------------------------------------------------


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_stream_is_read_with_any_line_ends(
    upstream: FaultyUpstream, backend: CloudApiBackend, line_end: bytes
) -> None:
    lines = b"\xef\xbb\xbf: hi\n\n" + b"".join(HELLO) + chunk(finish="stop") + DONE
    upstream.answer(events(lines.replace(b"\n", line_end)))
    assert collect(backend)[0] == ["Hel", "lo"]


def test_stream_is_the_same_with_one_byte_a_segment(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    text = "你好\u2028👩‍👩‍👧\u0085é"
    whole = chunk(text) + chunk(finish="stop") + usage_chunk(4, 5) + DONE
    upstream.answer(events(*[whole[at : at + 1] for at in range(len(whole))]))
    deltas, result = collect(backend)
    assert deltas == [text]
    assert (result.prompt_tokens, result.completion_tokens) == (4, 5)


def test_event_of_several_data_lines_is_one_chunk(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    spread = b'data: {"choices": [{"delta":\ndata: {"content": "Hi"}}]}\n\n'
    upstream.answer(events(spread, DONE))
    assert collect(backend)[1].text == "Hi"


def test_delta_never_holds_half_a_character(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    def escaped(text: str) -> bytes:
        return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()

    parted = (escaped("a\\ud83d"), escaped("\\ude00b"), escaped("c\\ude00"), escaped("d\\ud83d"))
    upstream.answer(events(*parted, chunk(finish="length"), DONE))
    deltas, result = collect(backend)
    assert deltas == ["a", "😀b", "c\ufffd", "d", "\ufffd"]
    assert result.text.encode()


def test_reasoning_is_no_part_of_the_text(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    thought = {"reasoning_content": "Hm, ", "content": None}
    upstream.answer(
        events(chunk(**thought), chunk(reasoning="so"), chunk("Yes", finish="stop"), DONE)
    )
    assert collect(backend)[0] == ["Yes"]


def test_reasoning_alone_is_an_empty_answer(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(
        events(chunk(reasoning_content="Hm"), chunk(finish="length"), usage_chunk(3, 9), DONE)
    )
    deltas, result = collect(backend)
    assert deltas == []
    assert (result.text, result.finish_reason) == ("", "length")
    assert (result.completion_tokens, result.time_to_first_token_ms) == (9, None)


# -- usage ---------------------------------------------------------------------------------------

USAGES = {
    "a chunk without choices": (chunk("abcdefgh", finish="stop"), usage_chunk(7, 5)),
    "the last chunk": (chunk("abcdefgh", finish="stop", usage=usage(7, 5)),),
    "every chunk": (
        chunk("abcd", usage=usage(7, 1)),
        chunk("efgh", finish="stop", usage=usage(7, 5)),
    ),
    "a chunk that is null before": (
        chunk("abcdefgh", finish="stop", usage=usage(7, 5)),
        event({"choices": [], "usage": None}),
    ),
}


@pytest.mark.parametrize("name", USAGES)
def test_usage_is_read_wherever_it_stands(
    upstream: FaultyUpstream, backend: CloudApiBackend, name: str
) -> None:
    upstream.answer(events(*USAGES[name], DONE))
    _, result = collect(backend)
    assert (result.prompt_tokens, result.completion_tokens) == (7, 5)
    assert not result.usage_estimated


def test_usage_of_zero_stays_zero(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(events(chunk("abcdefgh", finish="stop"), usage_chunk(0, 0), DONE))
    _, result = collect(backend)
    assert (result.prompt_tokens, result.completion_tokens) == (0, 0)
    assert not result.usage_estimated


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        (None, (4, 2)),
        ({}, (4, 2)),
        ({"prompt_tokens": 9}, (9, 2)),
        ({"prompt_tokens": None, "completion_tokens": 9}, (4, 9)),
        ({"prompt_tokens": -1, "completion_tokens": "9"}, (4, 2)),
        ({"prompt_tokens": True, "completion_tokens": 2.5}, (4, 2)),
        ("many", (4, 2)),
    ],
)
def test_usage_that_is_missing_is_estimated_and_marked(
    upstream: FaultyUpstream, backend: CloudApiBackend, given: object, counted: tuple[int, int]
) -> None:
    upstream.answer(events(chunk("abcdefgh", finish="stop", usage=given), DONE))
    result = list(backend.stream("sixteen letters!"))[-1].result
    assert result is not None
    assert (result.prompt_tokens, result.completion_tokens) == counted
    assert result.usage_estimated


def test_usage_is_asked_for_unless_the_settings_say_no(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(events(*HELLO, DONE))
    collect(make())
    collect(make(stream_usage=False))
    asked, not_asked = (call.body for call in upstream.posts)
    assert asked["stream_options"] == {"include_usage": True}
    assert "stream_options" not in not_asked
    assert asked["stream"] is not_asked["stream"] is True


# -- leaving -------------------------------------------------------------------------------------


def test_closing_a_stream_is_seen_by_the_endpoint_within_a_second(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(*HELLO, SILENCE))
    stream: Any = backend.stream("Hi")
    assert next(stream).delta == "Hel"
    stream.close()
    assert upstream.calls[0].left.wait(1)


def test_connection_is_used_again_after_a_stream(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    # The end of the body comes a little after the end of the answer, as it may.
    upstream.answer(chunked_events(*HELLO, chunk(finish="stop"), DONE, 0.02))
    for _ in range(3):
        collect(backend)
    assert {call.connection for call in upstream.calls} == {0}


# -- log probabilities and forms -----------------------------------------------------------------


def told(content: str | None, *tokens: str, finish: str | None = None) -> bytes:
    """The event of a chunk that tells of these tokens."""
    entries = [{"token": token, "bytes": list(token.encode()), "logprob": -1} for token in tokens]
    choice = {"delta": {"content": content}, "finish_reason": finish}
    return event({"choices": [{**choice, "logprobs": {"content": entries}}]})


def test_logprobs_come_with_their_text_or_with_the_next(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    steps = [told("a", "a"), told("", "b"), told(None), told("bc", "c"), told(None, "<end>")]
    upstream.answer(events(*steps, chunk(finish="stop"), DONE))
    *deltas, end = backend.stream("Hi", params={"logprobs": True})
    shown = [(piece.delta, [entry.token for entry in piece.logprobs]) for piece in (*deltas, end)]
    assert shown == [("a", ["a"]), ("bc", ["b", "c"]), ("", ["<end>"])]
    assert end.result is not None
    assert end.result.logprobs == tuple(
        TokenLogprob(token, token.encode(), None, -1.0) for token in ("a", "b", "c", "<end>")
    )


def test_stream_without_the_logprobs_asked_for_is_an_error(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(*HELLO, chunk(finish="stop"), DONE))
    with pytest.raises(BackendProtocolError, match="told none"):
        list(backend.stream("Hi", params={"logprobs": True}))


def test_stream_of_an_empty_answer_has_no_logprobs_to_tell(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(chunk(""), chunk(finish="stop"), DONE))
    _, result = collect(backend, logprobs=True)
    assert (result.text, result.logprobs) == ("", ())


def test_stream_that_is_not_the_json_asked_for_is_an_error(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(*HELLO, chunk(finish="stop"), DONE))
    with pytest.raises(BackendProtocolError, match="asked for JSON"):
        list(backend.stream("Hi", params={"response_format": {"type": "json_object"}}))
    upstream.answer(events(chunk("{}"), chunk(finish="stop"), DONE))
    assert collect(backend, response_format={"type": "json_object"})[0] == ["{}"]
