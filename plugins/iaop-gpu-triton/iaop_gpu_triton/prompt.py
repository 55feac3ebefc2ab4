"""Chat messages as the one text that the server's model wants."""

from __future__ import annotations

from collections.abc import Sequence

from iaop_core import Message


def prompt_text(messages: Sequence[Message]) -> str:
    """Lay the messages out as one text.

    A single user turn is its own text, unchanged, so that a caller who knows the model's template
    can send it filled in. A longer chat is one `role: content` paragraph for each message, with an
    empty line between, and `assistant:` at the end for the model to go on from.
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    turns = [f"{message.role}: {message.content}" for message in messages]
    return "\n\n".join([*turns, "assistant:"])
