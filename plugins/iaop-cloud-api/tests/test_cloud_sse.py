"""The event-stream reader, against the standard's own rules and examples."""

from __future__ import annotations

import pytest

from iaop_cloud_api.sse import EventTooLongError, SseReader


def read(stream: bytes, *, at: int | None = None) -> list[str]:
    """All events of a stream that arrives whole, or in pieces of `at` bytes."""
    reader = SseReader()
    step = at or len(stream)
    return [
        event
        for start in range(0, len(stream), step)
        for event in reader.feed(stream[start : start + step])
    ]


# What str.splitlines takes for line ends, but is content.
SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"

STREAMS = {
    "lf": (b"data: one\n\ndata: two\n\n", ["one", "two"]),
    "cr": (b"data: one\r\rdata: two\r\r", ["one", "two"]),
    "crlf": (b"data: one\r\n\r\ndata: two\r\n\r\n", ["one", "two"]),
    "mixed": (b"data: one\r\n\ndata: two\n\r", ["one", "two"]),
    "lines": (b"data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
    "lines by crlf": (b"data: YHOO\r\ndata: +2\r\n\r\n", ["YHOO\n+2"]),
    "comments": (b": keep-alive\n\ndata: one\n: more\n\n:\n\n", ["one"]),
    "other fields": (b"event: x\nid: 1\nretry: 10\nnonsense\ndata: one\n\n", ["one"]),
    "no space": (b"data:one\n\ndata:  two\n\n", ["one", " two"]),
    "no value": (b"data\n\ndata\ndata\n\n", ["", "\n"]),
    "no data": (b"event: ping\n\n\n\n", []),
    "bom": (b"\xef\xbb\xbfdata: one\n\n", ["one"]),
    "late bom": (b"data: one\n\n\xef\xbb\xbfdata: two\n\n", ["one"]),
    "unfinished": (b"data: one\n\ndata: two\n", ["one"]),
    "separators": (f"data: {SEPARATORS}\n\n".encode(), [SEPARATORS]),
    "characters": ("data: 你好👩‍👩‍👧 é\n\n".encode(), ["你好👩‍👩‍👧 é"]),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("at", [None, 1, 2, 3, 5])
def test_reader_yields_the_same_events_however_the_bytes_are_cut(name: str, at: int | None) -> None:
    stream, events = STREAMS[name]
    assert read(stream, at=at) == events


@pytest.mark.parametrize("end", [b"\r\r", b"\n\n", b"\r\n\r\n", b"\r\n\r"])
def test_reader_yields_an_event_with_the_byte_that_ends_it(end: bytes) -> None:
    assert SseReader().feed(b"data: one" + end) == ["one"]


def test_reader_replaces_bytes_that_are_no_utf8() -> None:
    assert read(b"data: a\xffb\n\n") == ["a\ufffdb"]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 60, b"x" * 60, b"data: 12345678\n" * 5])
def test_reader_refuses_an_event_without_end(line: bytes) -> None:
    reader = SseReader(max_event_bytes=32)

    def feed_bytes() -> None:
        for at in range(len(line)):
            reader.feed(line[at : at + 1])

    with pytest.raises(EventTooLongError):
        feed_bytes()


def test_reader_takes_a_stream_much_longer_than_one_event_may_be() -> None:
    reader = SseReader(max_event_bytes=32)
    for _ in range(100):
        assert reader.feed(b"data: 123456789\n\n") == ["123456789"]
