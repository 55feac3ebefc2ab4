"""Chat messages as the one text that the server's model wants."""

from __future__ import annotations

from collections.abc import Sequence

from iaop_core import Message
from iaop_core.chat_template import ChatTemplate, ChatTemplateError
from iaop_core.errors import InvalidRequestError
from iaop_gpu_triton.settings import NAME


class PromptLayout:
    """Lays messages out as one text.

    By the chat template, where there is one. Else a single user turn is its own text, unchanged, so
    that a caller who knows the model's template can send it filled in; a longer chat is one
    `role: content` paragraph for each message, with an empty line between, and `assistant:` at the
    end for the model to go on from.
    """

    def __init__(self, template: ChatTemplate | None, *, send_bos: bool) -> None:
        self._template = template
        # The server's tokenizer adds it, as a rule; two of them spoil the answer.
        self._left_out = "" if template is None or send_bos else template.bos_token

    def text(self, messages: Sequence[Message]) -> str:
        """Raises `InvalidRequestError` when the template refuses the messages."""
        if self._template is not None:
            turns = [{"role": message.role, "content": message.content} for message in messages]
            try:
                return self._template.render(turns).removeprefix(self._left_out)
            except ChatTemplateError as error:
                raise InvalidRequestError(str(error), backend=NAME, param="messages") from error
        if len(messages) == 1 and messages[0].role == "user":
            return messages[0].content
        paragraphs = [f"{message.role}: {message.content}" for message in messages]
        return "\n\n".join([*paragraphs, "assistant:"])
