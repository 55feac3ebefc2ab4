"""Chat templates render as the reference library renders them, and can do no harm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from iaop_core.chat_template import ChatTemplate, ChatTemplateError

GOLDEN = json.loads((Path(__file__).parent / "chat_templates.json").read_text("utf-8"))
CHAT = [{"role": "user", "content": "secret-words"}]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_template_renders_as_the_reference_does(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["source"], case["special_tokens"])
    assert template.render(case["messages"]) == case["rendered"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_does_what_it_may_not_is_stopped(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ChatTemplateError) as caught:
        template.render(CHAT)
    assert "secret-words" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "loops-over-nothing", "macros"],
)
def test_template_that_never_ends_is_stopped_in_time(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iaop_core.chat_template._MAX_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"took more than 0\.2 s"):
        ChatTemplate(source, {}).render(CHAT)
    assert time.monotonic() - started < 2


def test_template_names_why_it_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="the chat template says: roles must alternate"):
        template.render(CHAT)


CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "in config"}


def test_template_comes_from_a_file_or_from_a_tokenizers_folder(tmp_path: Path) -> None:
    config, own = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    config.write_text(json.dumps(CONFIG))
    assert ChatTemplate.from_path(tmp_path).render(CHAT) == "in config"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({**CONFIG, "chat_template": named}))
    assert ChatTemplate.from_path(tmp_path).render(CHAT) == "named"
    own.write_text("{{ bos_token }}own{{ messages[9] }}{{ eos_token }}")
    assert ChatTemplate.from_path(str(tmp_path)).render(CHAT) == "<s>own</s>"
    assert ChatTemplate.from_path(tmp_path).bos_token == "<s>"
    assert ChatTemplate.from_path(own).render(CHAT) == "own"
    assert ChatTemplate.from_path(own).bos_token == ""


def test_template_that_cannot_be_read_is_an_error_with_its_place(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.jinja"):
        with pytest.raises(ChatTemplateError, match=str(path)):
            ChatTemplate.from_path(path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ChatTemplateError, match="can be read"):
        ChatTemplate.from_path(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ChatTemplateError, match="malformed"):
        ChatTemplate.from_path(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("a text with {{ braces }}")
    with pytest.raises(ChatTemplateError, match="no place for the messages"):
        ChatTemplate.from_path(other)


def test_malformed_template_is_an_error_when_made() -> None:
    with pytest.raises(ChatTemplateError, match="malformed"):
        ChatTemplate("{% for %}", {})
