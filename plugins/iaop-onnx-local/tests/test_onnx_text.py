"""Text comes in whole characters, ends at stop texts, and is the same streamed or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from scripted_model import PROMPT

from iaop_core import InferResult
from iaop_onnx_local import OnnxLocalBackend
from iaop_onnx_local.text_bytes import byte_reader
from iaop_onnx_local.text_stream import StopMatcher, Utf8Stream

Make = Callable[..., OnnxLocalBackend]

TEXT = "你好👩‍👩‍👧 e\u0301!"


def ask(backend: OnnxLocalBackend, **params: Any) -> tuple[list[str], InferResult]:
    """Streams an answer; checks that the whole one is the same."""
    *deltas, end = backend.stream(PROMPT, params=params)
    assert end.result is not None
    whole = backend.infer(PROMPT, params=params)
    texts = [chunk.delta for chunk in deltas]
    assert "".join(texts) == end.result.text == whole.text
    assert end.result.finish_reason == whole.finish_reason
    assert end.result.completion_tokens == whole.completion_tokens
    return texts, whole


# -- characters ---------------------------------------------------------------------------------


def test_no_delta_holds_half_a_character_at_any_limit(scripted: Make) -> None:
    tokens = [bytes([byte]) for byte in TEXT.encode()]
    backend = scripted(tokens)
    for limit in range(1, len(tokens) + 1):
        deltas, result = ask(backend, max_tokens=limit)
        assert result.text == b"".join(tokens[:limit]).decode(errors="ignore")
        assert all("\ufffd" not in delta for delta in deltas)
        assert result.finish_reason == "length"
        assert result.completion_tokens == limit


def test_joiners_and_marks_come_as_they_are_made(scripted: Make) -> None:
    tokens = ["👩", "\u200d", "👧", " e", "\u0301", "!"]
    deltas, result = ask(scripted([token.encode() for token in tokens]))
    assert deltas == tokens
    assert result.finish_reason == "stop"


def test_true_replacement_character_is_kept(scripted: Make) -> None:
    deltas, _ = ask(scripted([b"a", "\ufffd".encode(), b"b"]))
    assert deltas == ["a", "\ufffd", "b"]


def test_impossible_bytes_do_not_stall_the_stream(scripted: Make) -> None:
    deltas, _ = ask(scripted([b"\xe4", b"a", b"b"]))
    assert deltas == ["\ufffda", "b"]


def test_sentencepiece_tokens_become_bytes() -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    read, drops_space = byte_reader(decoder)
    stream = Utf8Stream(drop_first_space=drops_space)
    tokens = ["▁Hello", "▁", "<0xE4>", "<0xBD>", "<0xA0>", "▁<0x>"]
    pieces = [stream.feed(read(token)) for token in tokens]
    assert pieces == ["Hello", " ", "", "", "你", " <0x>"]


def test_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        byte_reader({"type": "WordPiece"})


# -- stop texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "stops", "text"),
    [
        (["a", "EN", "D", "zz"], ["END"], "a"),
        (["a", "EN"], ["END"], "aEN"),
        (["a", "\n", "\n", "User", ":"], ["\n\n", "\n\nUser"], "a"),
        (["a\n\nUser:"], ["\n\nUser", "\n\n"], "a"),
        (["xy", "zzz"], ["yz", "xyz"], ""),
        (["aENxEND", "b"], ["END"], "aENx"),
        (["E", "E", "N", "D"], ["END"], "E"),
        (["a", "a", "b"], ["aab"], ""),
        (["one", " ", "two"], [" ", "two"], "one"),
        (["停", "止", "了"], ["止了"], "停"),
        (["a", "b"], ["!"], "ab"),
    ],
)
def test_text_ends_before_the_stop(
    scripted: Make, tokens: list[str], stops: list[str], text: str
) -> None:
    script = [token.encode() for token in tokens]
    _, result = ask(scripted(script), stop=stops)
    assert result.text == text
    assert result.finish_reason == "stop"


def test_only_what_may_begin_a_stop_is_held_back(scripted: Make) -> None:
    script = [b"one", b" E", b"N", b"o", b" END", b"x"]
    deltas, result = ask(scripted(script), stop=["END"])
    assert deltas == ["one", " ", "EN" + "o", " "]
    assert result.completion_tokens == 5


def test_held_text_is_shown_at_the_limit(scripted: Make) -> None:
    deltas, result = ask(scripted([b"a", b"EN", b"D"]), stop=["END"], max_tokens=2)
    assert deltas == ["a", "EN"]
    assert result.finish_reason == "length"


def test_stop_text_in_the_prompt_does_not_count(scripted: Make) -> None:
    _, result = ask(scripted([b"a", b"b"]), stop=[PROMPT])
    assert result.text == "ab"


def test_end_of_the_text_does_not_depend_on_the_pieces() -> None:
    shuffle = random.Random(3)
    for _ in range(2000):
        text = "".join(shuffle.choices("ab", k=12))
        stops = ["".join(shuffle.choices("ab", k=shuffle.randint(1, 4))) for _ in range(3)]
        ends = {feed(text, stops, cut_at(text, shuffle)) for _ in range(4)}
        assert len(ends) == 1
        # By the rule: the match that is complete first, of those the one that begins first.
        found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        assert ends == {text[: min(found)[1]] if found else text}


def cut_at(text: str, shuffle: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = shuffle.randint(1, 5)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def feed(text: str, stops: list[str], pieces: list[str]) -> str:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched:
            return shown
    return shown + matcher.flush()


# -- ends and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "reason", "count"),
    [(1, "length", 1), (4, "length", 4), (5, "length", 5), (6, "stop", 6), (2**40, "stop", 6)],
)
def test_end_token_counts_as_a_token(
    scripted: Make, max_tokens: int, reason: str, count: int
) -> None:
    _, result = ask(scripted([b"a", b"b", b"c", b"d", b"e"]), max_tokens=max_tokens)
    assert (result.finish_reason, result.completion_tokens) == (reason, count)


def test_any_of_several_end_tokens_ends(scripted: Make, tmp_path: Any) -> None:
    backend = scripted([b"a", b"b", b"c"])
    folder = tmp_path / "scripted-0"
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = {"eos_token_id": [vocabulary["c"], vocabulary["b"]]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    backend.unload()
    backend.load_model(str(folder))
    _, result = ask(backend)
    assert (result.text, result.completion_tokens) == ("a", 2)


def test_real_deltas_join_to_the_whole_text_at_every_limit(real: OnnxLocalBackend) -> None:
    prompt = "请用中文介绍一下北京的历史。"
    whole = real.infer(prompt, params={"max_tokens": 16}).text
    assert len(whole) > 5
    for limit in range(1, 17):
        params = {"max_tokens": limit}
        deltas = [chunk.delta for chunk in real.stream(prompt, params=params)]
        assert "".join(deltas) == real.infer(prompt, params=params).text
        assert whole.startswith("".join(deltas))
        assert "\ufffd" not in "".join(deltas)
