"""Rates from the times that engines tell of their answers (see `engines/protocol.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

__all__ = [
    "Answer",
    "alone_decode_rate",
    "first_s",
    "joint_decode_rate",
    "prompt_rate",
    "whole_rate",
]

Answer: TypeAlias = dict[str, Any]


def first_s(answer: Answer) -> float:
    """Seconds from sending the request to the first piece of its answer."""
    return float(answer["pieces"][0] - answer["submitted"])


def prompt_rate(answer: Answer) -> float:
    """Prompt tokens per second, up to the first piece of the answer."""
    return float(answer["prompt_tokens"] / (answer["pieces"][0] - answer["began"]))


def alone_decode_rate(answer: Answer) -> float:
    """Tokens per second after the first."""
    began = min(answer["first"], answer["pieces"][0])
    return float((answer["count"] - 1) / (answer["ended"] - began))


def whole_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second from the first request's sending to the last answer's end."""
    seconds = max(a["ended"] for a in answers) - min(a["submitted"] for a in answers)
    return float(sum(a["count"] for a in answers) / seconds)


def joint_decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while all answers are under way: no prompt is read any more, none ended."""
    began = max(a["pieces"][0] for a in answers)
    ended = min(a["ended"] for a in answers)
    tokens = 0.0
    for answer in answers:
        pieces = answer["pieces"]
        within = sum(began < piece <= ended for piece in pieces)
        tokens += within * answer["count"] / len(pieces)  # a piece can hold several tokens
    return float(tokens / (ended - began))
