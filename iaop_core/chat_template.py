"""Chat templates, rendered as transformers renders them.

The environment is the reference library's (`transformers.utils.chat_template_utils`): jinja2's
immutable sandbox, `trim_blocks` and `lstrip_blocks`, loop controls, the `generation` tag, `tojson`
without escaping, `raise_exception`, `strftime_now`, and a `dict` and a `namespace` that give
nothing away. A template comes with a model from somewhere else, so here it may not run for ever nor
write without bounds either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["ChatTemplate", "ChatTemplateError"]

_MAX_SECONDS: Final = 2.0
_MAX_CHARACTERS: Final = 16 * 1024 * 1024

_REPEATABLE: Final = (nodes.For, nodes.Macro, nodes.CallBlock)

_deadline: ContextVar[float] = ContextVar("deadline")


class ChatTemplateError(ValueError):
    """The template is malformed, refuses the messages, or does what it may not."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        special_tokens: what the template can name, such as `bos_token`.

    Raises:
        ChatTemplateError: the text is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template is malformed: {error}") from error

    @classmethod
    def from_path(cls, path: str | Path) -> ChatTemplate:
        """From a Jinja file, or from a folder as tokenizers are published in.

        In a folder it is `chat_template.jinja`, else the `chat_template` of
        `tokenizer_config.json`, of several the one named `default`; the special tokens are those of
        `tokenizer_config.json`. A file alone has none.

        Raises:
            ChatTemplateError: there is none, it can't be read, it is no valid template, or the file
                is another one, which has no place for `messages`.
        """
        path = Path(path).expanduser()
        config: dict[str, Any] = {}
        try:
            is_folder = path.is_dir()
            file, config_file = path / "chat_template.jinja", path / "tokenizer_config.json"
            if is_folder and config_file.exists():
                config = json.loads(config_file.read_text("utf-8"))
            template = config.get("chat_template")
            if not is_folder or file.exists():
                template = (file if is_folder else path).read_text("utf-8")
            elif isinstance(template, list):
                template = {each["name"]: each["template"] for each in template}.get("default")
            tokens = {
                name: value.get("content") if isinstance(value, dict) else value
                for name, value in config.items()
                if name.endswith("_token")
            }
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ChatTemplateError(
                f"no chat template can be read from {path}: {reason}"
            ) from error
        if not isinstance(template, str):
            raise ChatTemplateError(f"the folder {path} has no chat template")
        made = cls(template, {n: text for n, text in tokens.items() if isinstance(text, str)})
        if not is_folder and not _uses_messages(template):
            raise ChatTemplateError(f"{path} is no chat template: it has no place for the messages")
        return made

    @property
    def bos_token(self) -> str:
        """The text that begins each input of the model, as far as it is known; else empty."""
        return self._special_tokens.get("bos_token", "")

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Writes the prompt: the messages, and the opening of the assistant's answer.

        Args:
            messages: mappings with `role` and `content`.

        Raises:
            ChatTemplateError: the template refuses the messages (such as a role it doesn't know),
                does what the sandbox forbids, takes more than 2 seconds, or writes more than 16 Mi
                characters. The message holds nothing of the chat.
        """
        token = _deadline.set(time.monotonic() + _MAX_SECONDS)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                _check_size(size)
        except (
            _RefusedError
        ) as refusal:  # the template's own words: they tell the user what to change
            raise ChatTemplateError(f"the chat template says: {refusal}") from None
        except ChatTemplateError:
            raise
        except Exception as error:
            # Whatever a template from elsewhere can raise; the text of it might quote the chat.
            raise ChatTemplateError(
                f"the chat template failed with {type(error).__name__}"
            ) from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)


class _RefusedError(TemplateError):
    """What `raise_exception` of a template raises."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a clock in every loop and macro."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        for node in tree.find_all(_REPEATABLE):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick))  # type: ignore[attr-defined]
        tree.set_environment(self)
        return tree

    @staticmethod
    def tick() -> None:
        if time.monotonic() > _deadline.get():
            raise ChatTemplateError(
                f"the chat template took more than {_MAX_SECONDS:g} s and was stopped"
            )

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | bytes | list | tuple) and isinstance(times, int):
                    _check_size(len(sized) * times)
        elif isinstance(right, int) and right > 1024:
            raise ChatTemplateError("the chat template computes a power that is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return str(caller())


class _MakeDict:
    """What templates call `dict`: makes dictionaries, and is no class with attributes to walk."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """A namespace without underscore attributes."""

    def __init__(*args: Any, **entries: Any) -> None:
        self, *rest = args
        given = dict(*rest, **entries)
        for name in given:
            _check_attribute(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is no name for an attribute of a namespace")


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _MakeDict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _uses_messages(source: str) -> bool:
    names = _environment().parse(source).find_all(nodes.Name)
    return any(name.name == "messages" for name in names)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:  # noqa: A002, a template may name the argument
    return datetime.now().strftime(format)


def _refuse(message: str) -> None:
    raise _RefusedError(message)


def _check_size(characters: int) -> None:
    if characters > _MAX_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template wrote more than {_MAX_CHARACTERS} characters and was stopped"
        )
