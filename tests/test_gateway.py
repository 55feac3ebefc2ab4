"""The gateway's path of a call: every end has one row, and gives its slot back."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iaop_core import LLMGateway
from iaop_core.errors import (
    AuditError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapabilityNotSupportedError,
    InvalidRequestError,
    QuotaExceededError,
)

SECRET = "zebra-4711"


def values(path: Path, *, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "backends": {"e": {"plugin": "echo", "settings": settings or {}}},
        "audit": {"url": f"sqlite:///{path / 'audit.db'}"},
        **more,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    connection = sqlite3.connect(path / "audit.db")
    connection.row_factory = sqlite3.Row
    try:
        found = connection.execute("select * from iaop_calls order by id").fetchall()
    finally:
        connection.close()
    return [dict(row) for row in found]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[LLMGateway]:
    with LLMGateway.from_values(values(tmp_path)) as gateway:
        yield gateway


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[LLMGateway]:
    """A second for each word, one call at a time."""
    settings = {"delay_ms": 1000, "max_concurrency": 1}
    with LLMGateway.from_values(
        values(tmp_path, settings=settings, gateway={"slot_wait_ms": 50, "retries": 0})
    ) as gateway:
        yield gateway


def test_answered_calls_have_one_row_each(gateway: LLMGateway, tmp_path: Path) -> None:
    async def asynchronously() -> None:
        await gateway.aask("a b")
        assert [chunk.delta async for chunk in gateway.astream("a b")] == ["a ", "b", ""]

    gateway.ask("a b")
    list(gateway.stream("a b"))
    asyncio.run(asynchronously())
    found = rows(tmp_path)
    assert [row["outcome"] for row in found] == ["ok"] * 4
    assert [row["streamed"] for row in found] == [0, 1, 0, 1]
    assert {row["completion_tokens"] for row in found} == {2}
    assert len({row["request_id"] for row in found}) == 4


def test_refused_calls_have_one_row_each(gateway: LLMGateway, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        gateway.ask([])
    with pytest.raises(InvalidRequestError):
        gateway.ask("a", route="nowhere")
    with pytest.raises(InvalidRequestError):
        gateway.ask("a", tenant="nobody")
    with pytest.raises(CapabilityNotSupportedError):
        gateway.ask("a", params={"temperature": 1})
    assert [row["outcome"] for row in rows(tmp_path)] == ["refused"] * 4
    assert all(row["error_kind"] for row in rows(tmp_path))


def test_stream_left_early_is_abandoned_and_charged_for_its_text(
    gateway: LLMGateway, tmp_path: Path
) -> None:
    async def leave() -> None:
        stream: Any = gateway.astream("one two three")
        await anext(stream)
        await stream.aclose()

    stream = gateway.stream("one two three")
    next(stream)
    stream.close()
    asyncio.run(leave())
    gateway.close()
    found = rows(tmp_path)
    assert [row["outcome"] for row in found] == ["abandoned", "abandoned"]
    assert all(row["completion_tokens"] >= 1 and row["usage_estimated"] for row in found)


def test_stream_whose_end_was_taken_is_no_abandoned_one(
    gateway: LLMGateway, tmp_path: Path
) -> None:
    stream = gateway.stream("a")
    while next(stream).result is None:
        pass
    stream.close()
    assert [row["outcome"] for row in rows(tmp_path)] == ["ok"]


def test_total_deadline_holds_for_a_backend_that_does_not_look(
    slow: LLMGateway, tmp_path: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError):
        slow.ask("a b c", timeout_ms=100)
    assert time.monotonic() - started < 2.5  # of the 3 s that the backend takes
    assert [row["outcome"] for row in rows(tmp_path)] == ["timed_out"]


def test_slot_is_waited_for_within_bounds_and_given_back(slow: LLMGateway, tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: slow.ask("a"))
    thread.start()
    while not slow._site.backends["e"].slots.in_use:
        time.sleep(0.01)
    with pytest.raises(BackendUnavailableError) as caught:
        slow.ask("b")
    assert caught.value.busy
    thread.join()
    assert slow.ask("c").text == "c"
    assert [row["outcome"] for row in rows(tmp_path)] == ["failed", "ok", "ok"]


def test_cancelled_tasks_leak_no_slot(tmp_path: Path) -> None:
    settings = {"delay_ms": 5, "max_concurrency": 3}
    with LLMGateway.from_values(values(tmp_path, settings=settings)) as gateway:

        async def cancel_many() -> None:
            tasks = [asyncio.create_task(gateway.aask("a b c")) for _ in range(60)]
            for number, task in enumerate(tasks):
                await asyncio.sleep(0.001)
                if number % 3:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.aask("still here")

        asyncio.run(cancel_many())
        deadline = time.monotonic() + 5
        while gateway._site.backends["e"].slots.in_use and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gateway._site.backends["e"].slots.in_use == 0
    assert {row["outcome"] for row in rows(tmp_path)} <= {"ok", "abandoned"}


def test_quota_admits_only_what_it_holds_of_many_at_once(tmp_path: Path) -> None:
    tenants = {"line-3": {"requests_per_minute": 2}}
    with LLMGateway.from_values(values(tmp_path, tenants=tenants)) as gateway:

        async def ask_all() -> list[Any]:
            calls = [gateway.aask("a", tenant="line-3") for _ in range(50)]
            return await asyncio.gather(*calls, return_exceptions=True)

        answers = asyncio.run(ask_all())
    refused = [answer for answer in answers if isinstance(answer, QuotaExceededError)]
    assert len(refused) == 48


def test_days_tokens_are_seeded_from_the_audit(tmp_path: Path) -> None:
    settings = values(tmp_path, tenants={"line-3": {"tokens_per_day": 20}})
    with LLMGateway.from_values(settings) as gateway:
        gateway.ask("a b c d e f g h", tenant="line-3", params={"max_tokens": 8})
    with LLMGateway.from_values(settings) as gateway, pytest.raises(QuotaExceededError):
        gateway.ask("a", tenant="line-3", params={"max_tokens": 8})


def test_no_prompt_and_no_reply_is_in_the_database(gateway: LLMGateway, tmp_path: Path) -> None:
    gateway.ask(f"{SECRET} a", [f"{SECRET} b"])
    gateway.close()
    content = b"".join(file.read_bytes() for file in tmp_path.glob("audit.db*"))
    assert b"iaop_calls" in content
    assert SECRET.encode() not in content


def test_deleted_audit_database_is_begun_anew(gateway: LLMGateway, tmp_path: Path) -> None:
    gateway.ask("a")
    for file in tmp_path.glob("audit.db*"):
        file.unlink()
    gateway.ask("b")
    assert len(rows(tmp_path)) == 1


def test_call_that_can_not_be_recorded_is_not_answered(tmp_path: Path) -> None:
    settings = values(tmp_path)
    settings["audit"]["url"] = f"sqlite:///{tmp_path / 'missing' / 'audit.db'}"
    gateway = LLMGateway.from_values(settings)
    try:
        with pytest.raises(AuditError):
            gateway.load()
        with pytest.raises(AuditError):
            gateway.ask("a")
        chunks = gateway.stream("a")
        assert next(chunks).result is None
        with pytest.raises(AuditError):
            next(chunks)
    finally:
        gateway.close()


def test_loading_an_unknown_route_is_an_error(gateway: LLMGateway) -> None:
    with pytest.raises(InvalidRequestError):
        gateway.load(route="nowhere")
