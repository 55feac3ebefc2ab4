"""The command `iaop`: which values it reads, what it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_site import FakeSite, good_plugin

from iaop_core.cli import main

TWO = """
backends:
  one: {plugin: echo}
  two: {plugin: echo, settings: {max_concurrency: 1}}
routes:
  first: {targets: [{backend: one}]}
  second: {targets: [{backend: two}]}
gateway: {route: first}
"""


def iaop(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False, **options)


@pytest.fixture
def values_file(tmp_path: Path) -> Path:
    file = tmp_path / "values.yaml"
    file.write_text(TWO)
    return file


# -- which backend `iaop ask` asks --------------------------------------------------------------


@pytest.mark.usefixtures("values_file")
def test_backend_is_one_of_the_values_of_this_folder() -> None:
    ended = iaop("ask", "-b", "two", "hi there")
    assert (ended.exit_code, ended.stdout) == (0, "hi there\n")
    ended = iaop("ask", "-b", "echo", "hi")
    assert ended.exit_code == 2
    assert "values.yaml: no backend 'echo'; there are: one, two" in ended.stderr
    assert "--no-values" in ended.stderr


@pytest.mark.parametrize("how", ["option", "environment"])
def test_backend_is_one_of_the_values_that_are_named(
    how: str, values_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = values_file.rename(values_file.parent / "other.yaml")
    if how == "environment":
        monkeypatch.setenv("IAOP_VALUES", str(moved))
    given = ["--values", str(moved)] if how == "option" else []
    assert iaop("ask", *given, "-b", "two", "hi").exit_code == 0
    assert iaop("ask", *given, "-b", "echo", "hi").exit_code == 2


def test_backend_is_an_installed_one_where_there_are_no_values() -> None:
    ended = iaop("ask", "-b", "echo", "--set", "max_concurrency=1", "hi")
    assert (ended.exit_code, ended.stdout) == (0, "hi\n")


def test_no_values_asks_an_installed_backend_all_the_same(
    values_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IAOP_VALUES", str(values_file))
    ended = iaop("ask", "--no-values", "-b", "echo", "hi")
    assert (ended.exit_code, ended.stdout) == (0, "hi\n")


@pytest.mark.usefixtures("values_file")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-b", "one", "-r", "first"), "--route and --backend exclude each other"),
        (("--no-values", "-f", "values.yaml", "-b", "echo"), "--values and --no-values exclude"),
        (("--no-values",), "--no-values needs --backend"),
        (("-b", "one", "-m", "x"), "values.yaml says it, unless you add --no-values"),
        (("--allow-offline",), "values.yaml says it"),
        (("-p", "top_k"), "'top_k' is not KEY=VALUE"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_wrong_usage(
    arguments: tuple[str, ...], says: str
) -> None:
    ended = iaop("ask", *arguments, "hi")
    assert ended.exit_code == 2
    assert says in ended.stderr


# -- what is asked ------------------------------------------------------------------------------


def test_prompt_is_read_from_standard_input() -> None:
    assert iaop("ask", "-b", "echo", "-", input="größer 你好").stdout == "größer 你好\n"


LATIN_1 = "größer".encode("latin-1")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_standard_input_that_is_not_utf_8_is_said_to_be_so(locale: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "iaop_core.cli", "ask", "-b", "echo", "-"],
        env={**os.environ, "LC_ALL": locale},
        cwd=tmp_path,
        input=LATIN_1,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"Error: standard input is not UTF-8 text\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("gr\udcf6\udcdfer",), "PROMPT"), (("hi", "-c", "gr\udcf6\udcdfer"), "--context")],
)
def test_argument_that_is_not_utf_8_is_said_to_be_so(arguments: tuple[str, ...], says: str) -> None:
    ended = iaop("ask", "-b", "echo", *arguments)
    assert ended.exit_code == 2
    assert ended.stderr == f"Error: {says} is not UTF-8 text\n"


# -- iaop config validate -----------------------------------------------------------------------


@pytest.mark.usefixtures("values_file")
def test_validate_says_what_it_checked_and_what_not() -> None:
    ended = iaop("config", "validate")
    assert (ended.exit_code, ended.stdout.splitlines()) == (
        0,
        [
            "values.yaml: the keys and the plugins' settings are right",
            "  backends: one, two",
            "  routes: first, second",
            "Not checked: secrets, models, servers and the audit database; see iaop health",
        ],
    )


def test_validate_tells_every_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(
        "backends:\n"
        "  one: {plugin: echo, settings: {delay_ms: soon}}\n"
        "  two: {plugin: ecko}\n"
        "gateway: {route: one}\n"
    )
    ended = iaop("config", "validate")
    assert (ended.exit_code, ended.stdout) == (2, "")
    first, second = ended.stderr.splitlines()
    assert first.startswith("Error: values.yaml:2: backends.one.settings.delay_ms: is a number")
    assert second.startswith("Error: values.yaml:3: backends.two.plugin: ")
    assert "did you mean 'echo'?" in second


# -- exit codes ---------------------------------------------------------------------------------

_ILL = """
from iaop_core.capabilities import BackendHealth
from iaop_core.echo import EchoBackend
from iaop_core.errors import BackendUnavailableError

class Ill(EchoBackend):
    name = "ill"

    def health_check(self):
        return BackendHealth(False, "engine_hangs")

    def stream(self, prompt, context=None, *, params=None):
        raise BackendUnavailableError("backend 'ill' is down", backend="ill")
        yield
"""


@pytest.fixture
def _ill(fake_site: FakeSite, tmp_path: Path) -> None:
    source = good_plugin("ill").replace("return Backend()", "return Ill()")
    fake_site.install("iaop-ill", source + _ILL, name="ill")
    (tmp_path / "values.yaml").write_text("gateway: {retries: 0}\nbackends: {b: {plugin: ill}}\n")


@pytest.mark.usefixtures("_ill")
def test_failed_backend_is_exit_code_1() -> None:
    ended = iaop("ask", "hi")
    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1] == "Error: backend 'ill' is down"


@pytest.mark.usefixtures("_ill")
def test_unhealthy_backend_is_exit_code_1() -> None:
    ended = iaop("health")
    assert ended.exit_code == 1
    assert ended.stdout.split() == ["BACKEND", "HEALTH", "DETAIL", "b", "UNHEALTHY", "engine_hangs"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_interrupted_command_is_exit_code_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "iaop_core.cli", "ask", "-b", "echo"]
    process = subprocess.Popen(
        [*command, "--set", "delay_ms=200", "one " * 200],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == "one "
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.wait(30) == 130
        assert time.monotonic() - started < 20  # of the 40 s that the answer takes
        assert process.stderr.read() == ""
    connection = sqlite3.connect(tmp_path / "iaop-audit.db")
    try:
        rows = connection.execute("select outcome from iaop_calls").fetchall()
    finally:
        connection.close()
    assert rows == [("abandoned",)]
