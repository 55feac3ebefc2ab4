"""Secrets are known by reference and shown nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from iaop_core import Secret
from iaop_core.errors import ValuesError

KEY = "sk-zebra-4711"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", KEY)


def test_environment_reference_is_looked_up() -> None:
    assert Secret("${env:SITE_KEY}").reveal() == KEY


def test_file_reference_is_read_without_its_last_newline(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\r\n")
    assert Secret(f"${{file:{file}}}").reveal() == KEY


def test_rotated_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("old")
    secret = Secret(f"${{file:{file}}}")
    assert secret.reveal() == "old"
    file.write_text("new")
    assert secret.reveal() == "new"


def test_reference_may_stand_inside_other_text() -> None:
    secret = Secret("postgresql://iaop:${env:SITE_KEY}@db/audit")
    assert secret.reveal() == f"postgresql://iaop:{KEY}@db/audit"
    assert secret.reference == "***${env:SITE_KEY}***"


@pytest.mark.parametrize("text", [KEY, "", "$SITE_KEY", "${SITE_KEY}", "${}"])
def test_literal_text_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ValuesError, match="by reference") as caught:
        Secret(text)
    assert KEY not in str(caught.value)


def test_unknown_kind_of_reference_is_refused() -> None:
    with pytest.raises(ValuesError, match="unknown secret reference"):
        Secret("${vault:x}")


def test_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ValuesError, match="NO_SUCH_KEY is not set"):
        Secret("${env:NO_SUCH_KEY}").reveal()


def test_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValuesError, match=r"/no/such/key.*No such file"):
        Secret("${file:/no/such/key}").reveal()


@pytest.mark.parametrize("content", [b"", b"\n", b"sk-zebra\n-4711", b"sk-zebra\x00", b"sk\x7f"])
def test_empty_or_broken_key_file_is_an_error_that_does_not_show_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValuesError) as caught:
        Secret(f"${{file:{tmp_path / 'key'}}}").reveal()
    assert "zebra" not in str(caught.value)


def test_key_file_that_is_not_text_is_an_error_that_does_not_hold_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"sk-zebra\xff")
    with pytest.raises(ValuesError, match="not UTF-8") as caught:
        Secret(f"${{file:{tmp_path / 'key'}}}").reveal()
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("secret", [Secret("${env:SITE_KEY}"), Secret(KEY, literal=True)])
def test_secret_is_shown_in_no_text(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").warning("%s %r", secret, secret)
    shown = f"{secret} {secret!r} {secret!s} {[secret]} {secret.reference} {caplog.text}"
    assert KEY not in shown


def test_secrets_compare_by_reference() -> None:
    assert Secret("${env:A}") == Secret("${env:A}")
    assert len({Secret("${env:A}"), Secret("${env:A}"), Secret("${env:B}")}) == 2
    assert Secret("${env:A}") != Secret("${env:A}", literal=True)
    assert Secret("${env:A}") != "${env:A}"
