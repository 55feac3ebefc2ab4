"""The record of every call: one row whatever its end, and never a word of what was said."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import sqlalchemy
from conftest import Run
from scripted_plugin import NO_END, Script, answer_of
from scripted_site import ScriptedSite, eventually

from iaop_core import GenerationParams, InferChunk, Secret
from iaop_core.audit import AuditLog, AuditRow
from iaop_core.errors import (
    AuditError,
    BackendUnavailableError,
    IaopError,
    InvalidRequestError,
    QuotaExceededError,
)

PROMPT = "zebra-prompt-4711"
REPLY = "giraffe-reply-0815"


def audit_row(**facts: Any) -> AuditRow:
    return AuditRow(
        **{
            "request_id": "id",
            "tenant": "t",
            "route": "r",
            "backend": "b",
            "plugin": "p",
            "model": "m",
            "on_premises": True,
            "streamed": False,
            "attempts": 1,
            "outcome": "ok",
            "error_kind": "",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "usage_estimated": False,
            "latency_ms": 1.0,
            "time_to_first_token_ms": None,
            "offline": False,
            "device": "cpu",
            **facts,
        }
    )


# -- one row for every end ----------------------------------------------------------------------


def test_row_tells_who_asked_what_of_whom(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only"), tenants={"line-3": {}})
    before = datetime.datetime.now(datetime.UTC)
    result = gateway.ask("hi", tenant="line-3")
    row = site.row()
    assert before <= datetime.datetime.fromisoformat(row["time"]).replace(tzinfo=datetime.UTC)
    assert row["latency_ms"] > 0
    assert len(row["request_id"]) == 32
    told = ("tenant", "route", "backend", "plugin", "model", "device", "outcome", "finish_reason")
    assert [row[key] for key in told] == [
        *("line-3", "r", "only", "scripted", "script", "cpu", "ok", "stop")
    ]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (10, 5)
    assert (row["usage_estimated"], row["offline"], row["streamed"]) == (0, 0, 0)
    assert (row["on_premises"], row["attempts"]) == (1, 1)
    assert result.text == "a hi"


def test_time_to_first_token_of_a_stream_is_measured(site: ScriptedSite) -> None:
    def answer(prompt: Any) -> Iterator[str]:
        time.sleep(0.05)
        yield "a"
        time.sleep(0.05)
        yield "b"

    list(site.gateway(Script("only", answer)).stream("hi"))
    row = site.row()
    assert 50 <= row["time_to_first_token_ms"] < row["latency_ms"]
    assert row["latency_ms"] >= 100


def test_explicit_zero_usage_stays_zero(site: ScriptedSite) -> None:
    end = InferChunk("", answer_of("a", prompt_tokens=0, completion_tokens=0))
    gateway = site.gateway(Script("only", lambda prompt: iter(["a", end, NO_END])))
    gateway.ask("hi")
    row = site.row()
    assert (row["prompt_tokens"], row["completion_tokens"], row["usage_estimated"]) == (0, 0, 0)


def test_estimates_of_a_backend_are_marked(site: ScriptedSite) -> None:
    end = InferChunk("", answer_of("a", usage_estimated=True))
    site.gateway(Script("only", lambda prompt: iter(["a", end, NO_END]))).ask("hi")
    assert site.row()["usage_estimated"] == 1


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": [None]}, "invalid_request"),
    "empty prompt": ({"prompt": ""}, "invalid_request"),
    "empty turn": (
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": ""}]},
        "invalid_request",
    ),
    "context": ({"context": "text"}, "invalid_request"),
    "params": ({"params": {"max_tokens": 0}}, "invalid_request"),
    "unsupported": ({"params": {"top_k": 5}}, "capability_not_supported"),
    "route": ({"route": "nowhere"}, "invalid_request"),
    "empty route": ({"route": ""}, "invalid_request"),
    "route type": ({"route": ["r"]}, "invalid_request"),
    "tenant": ({"tenant": "nobody"}, "invalid_request"),
    "empty tenant": ({"tenant": ""}, "invalid_request"),
    "tenant type": ({"tenant": ["line-3"]}, "invalid_request"),
    "quota": ({"tenant": "line-3"}, "quota_exceeded"),
}


def test_empty_turn_with_a_context_is_no_empty_prompt(site: ScriptedSite) -> None:
    assert site.gateway(Script("only")).ask("", ["a source"]).text == "a "


@pytest.mark.parametrize("asynchronously", [False, True], ids=["sync", "aio"])
@pytest.mark.parametrize("what", REFUSALS)
def test_refused_call_has_a_row(what: str, asynchronously: bool, site: ScriptedSite) -> None:
    options, kind = REFUSALS[what]
    script = Script("only")
    gateway = site.gateway(script, tenants={"line-3": {"tokens_per_day": 1}})
    options = {"prompt": "hi", **options}
    prompt = options.pop("prompt")
    with pytest.raises(IaopError) as caught:
        asyncio.run(gateway.aask(prompt, **options)) if asynchronously else gateway.ask(
            prompt, **options
        )
    assert caught.value.kind == kind
    row = site.row()
    assert (row["outcome"], row["error_kind"]) == ("refused", kind)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (0, 0)
    assert script.calls == []


def _endless(prompt: Any) -> Iterator[str]:
    while True:
        yield f"{REPLY} "
        time.sleep(0.005)


async def _aendless(prompt: Any) -> AsyncIterator[str]:
    while True:
        yield f"{REPLY} "
        await asyncio.sleep(0.005)


BOTH_FACES = pytest.mark.parametrize("face", ["stream", "astream"])


def _endless_script(face: str) -> Script:
    return Script("only", _aendless if face == "astream" else _endless, face=face)


@BOTH_FACES
def test_stream_that_is_left_has_a_row_with_what_was_delivered(
    face: str, site: ScriptedSite
) -> None:
    stream: Any = site.gateway(_endless_script(face)).stream("hi")
    texts = [next(stream).delta for _ in range(8)]
    stream.close()
    row = site.row()
    assert (row["outcome"], row["error_kind"], row["usage_estimated"]) == ("abandoned", "", 1)
    assert row["completion_tokens"] == len("".join(texts)) // 4


@BOTH_FACES
def test_asynchronous_stream_that_is_left_has_a_row(face: str, site: ScriptedSite) -> None:
    gateway = site.gateway(_endless_script(face))

    async def leave() -> None:
        stream: Any = gateway.astream("hi")
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert site.row()["outcome"] == "abandoned"


@BOTH_FACES
def test_stream_that_is_dropped_without_closing_has_a_row(face: str, site: ScriptedSite) -> None:
    script = _endless_script(face)
    gateway = site.gateway(script)

    async def drop() -> None:
        async for _ in gateway.astream("hi"):
            break

    for _ in gateway.stream("hi"):
        break
    asyncio.run(drop())
    assert eventually(lambda: [row["outcome"] for row in site.rows()] == ["abandoned"] * 2)
    assert eventually(lambda: script.running == 0)


@pytest.mark.parametrize("face", ["stream", "astream", "infer", "ainfer"])
def test_cancelled_call_has_a_row(face: str, site: ScriptedSite) -> None:
    go_on = threading.Event()

    def hang(prompt: Any) -> Iterator[str]:
        go_on.wait(30)
        yield "a"

    async def ahang(prompt: Any) -> AsyncIterator[str]:
        await asyncio.sleep(30)
        yield "a"

    script = Script("only", ahang if face[0] == "a" else hang, face=face)
    gateway = site.gateway(script)

    async def cancel() -> None:
        task = asyncio.ensure_future(gateway.aask("hi"))
        while not script.calls:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    go_on.set()
    row = site.row()
    assert (row["outcome"], row["prompt_tokens"]) == ("abandoned", 1)


def test_call_that_is_cancelled_before_it_begins_is_charged_nothing(site: ScriptedSite) -> None:
    release = threading.Event()

    def held(prompt: Any) -> Iterator[str]:
        release.wait(30)
        yield "a"

    script = Script("only", held, max_concurrency=1)
    gateway = site.gateway(script)

    async def cancel() -> None:
        holder = asyncio.ensure_future(gateway.aask("hold"))
        while not script.calls:
            await asyncio.sleep(0.005)
        waiting = asyncio.ensure_future(gateway.aask("hi"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()
        await holder

    asyncio.run(cancel())
    assert eventually(lambda: len(site.rows()) == 2)
    abandoned = next(row for row in site.rows() if row["outcome"] == "abandoned")
    assert (abandoned["prompt_tokens"], abandoned["completion_tokens"]) == (0, 0)
    assert abandoned["on_premises"] is None, "the prompt went nowhere"


INTERRUPTED = """
import os, signal, sys, threading, time
sys.path[:0] = {path!r}
from scripted_plugin import SCRIPTS, Script
from iaop_core import LLMGateway
def hang(prompt):
    print("begun", flush=True)
    time.sleep(60)
    yield "a"
SCRIPTS["only"] = Script("only", hang)
gateway = LLMGateway.from_values({{
    "backends": {{"b": {{"plugin": "scripted", "settings": {{"script": "only"}}}}}},
    "audit": {{"url": "sqlite:///audit.db"}},
}})
gateway.load()
try:
    gateway.ask("{prompt}")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_interrupted_call_has_a_row_though_nobody_closed_the_gateway(
    site: ScriptedSite, scripted_folder: Path
) -> None:
    path = [str(scripted_folder), str(Path(__file__).parent)]
    code = INTERRUPTED.format(path=path, prompt=PROMPT)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=site.folder, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert site.row()["outcome"] == "abandoned"


def test_every_call_of_a_crowd_has_one_row_of_its_own(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only", max_concurrency=8))

    async def crowd() -> None:
        await asyncio.gather(*(gateway.aask("hi") for _ in range(100)))

    threads = [threading.Thread(target=lambda: asyncio.run(crowd())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = site.rows()
    assert len({row["request_id"] for row in rows}) == len(rows) == 300


# -- what is not in it --------------------------------------------------------------------------


def test_no_word_of_a_call_is_in_the_database_or_the_log(
    site: ScriptedSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")

    def answer(prompt: Any) -> Iterator[Any]:
        yield f"{REPLY} "
        if "fail" in str(prompt):
            yield ValueError(f"{PROMPT} {REPLY}")

    def down(prompt: Any) -> Iterator[Any]:
        yield BackendUnavailableError(f"{PROMPT} {REPLY}")

    gateway = site.gateway(Script("down", down), Script("only", answer))
    gateway.ask(PROMPT, [f"{PROMPT} source"])
    list(gateway.stream([{"role": "user", "content": PROMPT}]))
    stream: Any = gateway.stream(PROMPT)
    next(stream)
    stream.close()
    wrong: list[Callable[[], Any]] = [
        lambda: gateway.ask(f"fail {PROMPT}"),
        lambda: gateway.ask([{"role": PROMPT, "content": PROMPT}]),
        lambda: gateway.ask("hi", route=PROMPT),
        lambda: gateway.ask("hi", tenant=PROMPT),
        lambda: gateway.ask("hi", params={"stop": [PROMPT], "top_k": 1}),
    ]
    for call in wrong:
        with pytest.raises(IaopError):
            call()
    gateway.close()
    assert len(site.rows()) == 8
    content = b"".join(file.read_bytes() for file in site.folder.glob("audit.db*"))
    for text in (PROMPT, REPLY):
        assert text.encode() not in content
        assert text not in caplog.text


def test_values_and_repr_of_a_gateway_hold_no_secret(
    site: ScriptedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINE_KEY", "sk-zebra")
    gateway = site.gateway(Script("only"), tenants={"t": {"api_key": "${env:LINE_KEY}"}})
    assert "sk-zebra" not in repr(gateway.values) + repr(gateway) + repr(gateway._site)


# -- the database -------------------------------------------------------------------------------


def test_answer_that_can_not_be_recorded_is_not_served(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only"))
    gateway.ask("hi")
    connection = sqlite3.connect(site.folder / "audit.db")
    connection.execute("alter table iaop_calls rename to gone")
    connection.commit()
    for call in (lambda: gateway.ask("hi"), lambda: list(gateway.stream("hi"))):
        with pytest.raises(AuditError, match="can't be written"):
            call()
    with pytest.raises(InvalidRequestError):
        gateway.ask([])  # the call's own error is the one that is told
    connection.execute("alter table gone rename to iaop_calls")
    connection.commit()
    connection.close()
    assert gateway.ask("hi").text == "a hi"


def test_database_that_can_not_be_opened_is_told_at_start(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only"), url="sqlite:////no/such/folder/audit.db", load=False)
    with pytest.raises(AuditError, match=r"can't be opened.*check audit\.url"):
        gateway.load()


@pytest.mark.parametrize("url", ["nonsense", "nodialect://x", "postgresql+nodriver://x/y"])
def test_url_that_means_nothing_is_told_at_start(url: str, site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only"), url=url, load=False)
    with pytest.raises(AuditError):
        gateway.load()


def test_password_of_the_database_is_in_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PG", "sk-zebra")
    log = AuditLog(Secret("nodialect://iaop:${env:PG}@db/audit"))
    with pytest.raises(AuditError) as opened:
        log.opened.result(10)
    with pytest.raises(AuditError) as written:
        log.write(audit_row()).result(10)
    log.close()
    with pytest.raises(AuditError) as literal:
        AuditLog("sqlite://iaop:sk-zebra@db/audit").opened.result(10)
    for text in (str(opened.value), str(written.value), str(literal.value), caplog.text):
        assert "sk-zebra" not in text


def test_row_that_the_database_refuses_does_not_cost_the_others(tmp_path: Path) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'audit.db'}")
    log.opened.result(10)
    gate = threading.Event()
    log._jobs.put(lambda: gate.wait(10) and None)  # all that follows is one batch
    rows = [audit_row(prompt_tokens=2**70 if number == 3 else 1) for number in range(6)]
    futures = [log.write(row) for row in rows]
    gate.set()
    failed = [number for number, future in enumerate(futures) if future.exception(10)]
    assert failed == [3]
    assert log.usage().result(10)[0].calls == 5
    log.close()


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "\x1b[31m", "x" * 10_000])
def test_names_of_a_backend_are_kept_in_a_form_that_every_database_takes(
    text: str, tmp_path: Path
) -> None:
    row = audit_row(model=text, device=text, error_kind=text)
    assert row.model.isprintable()
    assert len(row.model) <= 200
    row.model.encode()
    log = AuditLog(f"sqlite:///{tmp_path / 'audit.db'}")
    log.write(row).result(10)
    log.close()


def test_many_rows_are_written_with_few_commits(tmp_path: Path) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'audit.db'}")
    log.opened.result(10)
    commits: list[Any] = []
    sqlalchemy.event.listen(log._engine, "commit", commits.append)
    gate = threading.Event()
    log._jobs.put(lambda: gate.wait(10) and None)  # all that follows is waiting when it opens
    futures = [log.write(audit_row()) for _ in range(2000)]
    gate.set()
    for future in futures:
        future.result(30)
    assert len(commits) <= 5
    assert log.usage().result(10)[0].calls == 2000
    log.close()


def test_close_writes_what_is_queued_and_may_come_again(tmp_path: Path) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'audit.db'}")
    futures = [log.write(audit_row()) for _ in range(50)]
    log.close()
    log.close()
    assert all(future.done() and not future.exception() for future in futures)
    for late in (log.write(audit_row()), log.usage(), log.tokens_on("2026-01-01", "t")):
        with pytest.raises(AuditError, match="closed"):
            late.result(10)


def test_two_processes_may_share_a_database(site: ScriptedSite, run_python: Run) -> None:
    gateway = site.gateway(Script("only"))
    code = (
        "from iaop_core import LLMGateway\n"
        "with LLMGateway.from_values({'backends': {'e': {'plugin': 'echo'}},"
        " 'audit': {'url': 'sqlite:///audit.db'}}) as gateway:\n"
        "    for _ in range(20): gateway.ask('hi')\n"
    )
    other = threading.Thread(target=lambda: done.append(run_python("-c", code)))
    done: list[subprocess.CompletedProcess[str]] = []
    other.start()
    while other.is_alive():
        gateway.ask("hi")
    other.join()
    assert done[0].returncode == 0, done[0].stderr
    rows = [row for row in site.rows() if row["backend"] == "e"]
    assert len(rows) == 20


# -- usage --------------------------------------------------------------------------------------


def _at(day: int, **facts: Any) -> AuditRow:
    time = datetime.datetime(2026, 1, day, 23, 59, tzinfo=datetime.UTC)
    return audit_row(time=time, **facts)


def test_usage_is_by_day_tenant_and_backend(tmp_path: Path) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'audit.db'}")
    for row in (
        _at(1, tenant="a"),
        _at(1, tenant="a", outcome="failed", usage_estimated=True),
        _at(1, tenant="b"),
        _at(2, tenant="a"),
        _at(2, tenant="a", backend="c"),
    ):
        log.write(row)
    everything = [attrs.astuple(usage) for usage in log.usage().result(10)]
    assert everything == [
        ("2026-01-01", "a", "b", 2, 1, 6, 8, 1),
        ("2026-01-01", "b", "b", 1, 1, 3, 4, 0),
        ("2026-01-02", "a", "b", 1, 1, 3, 4, 0),
        ("2026-01-02", "a", "c", 1, 1, 3, 4, 0),
    ]
    assert len(log.usage(since="2026-01-02").result(10)) == 2
    assert [usage.tenant for usage in log.usage(tenant="b").result(10)] == ["b"]
    assert log.tokens_on("2026-01-01", "a").result(10) == 14
    assert log.tokens_on("2026-01-03", "a").result(10) == 0
    log.close()


# -- the end of a gateway, and a fork -----------------------------------------------------------


def test_closed_gateway_answers_no_call_and_makes_no_backend(site: ScriptedSite) -> None:
    made = []
    script = Script("only", make=lambda: made.append(1))
    gateway = site.gateway(script)
    gateway.close()
    for call in (lambda: gateway.ask("hi"), lambda: asyncio.run(gateway.aask("hi"))):
        with pytest.raises(AuditError, match="closed"):
            call()
    with pytest.raises(AuditError, match="the gateway is closed"):
        gateway.load()
    assert (script.calls, made) == ([], [1])
    assert not gateway.health()


def test_row_that_comes_after_the_gateways_end_is_not_lost_in_silence(
    site: ScriptedSite, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = site.gateway(Script("only", _endless))
    stream: Any = gateway.stream("hi")
    next(stream)
    gateway.close()
    assert caplog.text == ""
    stream.close()
    assert "an audit row is lost: the gateway is closed" in caplog.text


FORKED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from iaop_core import LLMGateway
from iaop_core.errors import AuditError
gateway = LLMGateway.from_values(
    {"backends": {"e": {"plugin": "echo"}}, "audit": {"url": "sqlite:///audit.db"}}
)
gateway.ask("hi")
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        gateway.ask("hi")
    except AuditError as error:
        gateway.close()
        os._exit(0 if "make a gateway in each process" in str(error) else 2)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
gateway.ask("hi")
child = os.fork()
if child == 0:
    signal.alarm(20)
    with LLMGateway.from_values(
        {"backends": {"e": {"plugin": "echo"}}, "audit": {"url": "sqlite:///child.db"}}
    ) as own:
        own.ask("hi")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
gateway.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_gateway_in_a_forked_child_refuses_instead_of_hanging(run_python: Run) -> None:
    done = run_python("-c", FORKED)
    assert done.returncode == 0, done.stderr


# -- a database that answers late ---------------------------------------------------------------


def test_database_that_hangs_does_not_hang_the_call(
    site: ScriptedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iaop_core.call._AUDIT_PATIENCE_S", 0.2)
    gateway = site.gateway(Script("only"), tenants={"t": {"tokens_per_day": 10**6}})
    release = threading.Event()
    gateway._site.audit._jobs.put(lambda: release.wait(30) and None)
    with pytest.raises(AuditError, match="in time"):
        gateway.ask("hi", timeout_ms=300)
    with pytest.raises(AuditError, match="in time"):
        gateway.ask("hi", tenant="t", timeout_ms=300)
    release.set()
    assert gateway.ask("hi", tenant="t", params=GenerationParams(max_tokens=5)).text == "a hi"
    with pytest.raises(QuotaExceededError):
        gateway.ask("hi", tenant="t", params=GenerationParams(max_tokens=10**6))
