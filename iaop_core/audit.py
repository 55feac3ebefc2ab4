"""The record of every call, whatever its end: who, which backend, how many tokens. No text."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import asdict, field, frozen

from iaop_core.errors import AuditError
from iaop_core.secret import Secret

if TYPE_CHECKING:
    import sqlalchemy

__all__ = ["AuditLog", "AuditRow", "Outcome", "Usage"]

Outcome: TypeAlias = Literal["ok", "refused", "failed", "timed_out", "abandoned"]
"""`refused`: the caller's or the values' fault, or a quota. `abandoned`: the caller left."""

_log = logging.getLogger(__name__)
_BATCH = 500


def _as_text(text: str) -> str:
    """Something that every database takes and every terminal may show, 200 characters at most."""
    text = text[:200]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@frozen(kw_only=True)
class AuditRow:
    """One call. Times are in milliseconds; token counts are estimates when so marked."""

    time: datetime.datetime = field(factory=_now)
    """When the call ended, in UTC."""
    request_id: str
    tenant: str
    """As the values name it; `""` for none and for a stranger."""
    route: str
    """As the values name it; `""` for an unknown one: a caller's own words are never kept."""
    backend: str
    """The backend's name in the values; of the last one that was tried or would have been."""
    plugin: str
    model: str = field(converter=_as_text)
    on_premises: bool | None
    """Whether the prompt stayed on the site; None when it went nowhere."""
    streamed: bool
    attempts: int
    outcome: Outcome
    error_kind: str = field(converter=_as_text)
    """`""`, or `IaopError.kind`, or the name of another exception's class."""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    usage_estimated: bool
    latency_ms: float
    time_to_first_token_ms: float | None
    offline: bool
    device: str = field(converter=_as_text)


@frozen
class Usage:
    """What one tenant used of one backend on one day (of UTC)."""

    day: str
    tenant: str
    backend: str
    calls: int = field(converter=int)
    ok: int = field(converter=int)
    prompt_tokens: int = field(converter=int)
    completion_tokens: int = field(converter=int)
    estimated_calls: int = field(converter=int)
    """Calls whose token counts are estimates."""


def _calls_table() -> sqlalchemy.Table:
    import sqlalchemy as sa

    def text(name: str, *, index: bool = False) -> sa.Column[str]:
        return sa.Column(name, sa.Text, nullable=False, index=index)

    return sa.Table(
        "iaop_calls",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        text("day", index=True),
        text("request_id"),
        text("tenant", index=True),
        text("route"),
        text("backend"),
        text("plugin"),
        text("model"),
        sa.Column("on_premises", sa.Boolean),
        sa.Column("streamed", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        text("outcome"),
        text("error_kind"),
        text("finish_reason"),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("usage_estimated", sa.Boolean, nullable=False),
        sa.Column("latency_ms", sa.Float, nullable=False),
        sa.Column("time_to_first_token_ms", sa.Float),
        sa.Column("offline", sa.Boolean, nullable=False),
        text("device"),
    )


_Job: TypeAlias = Callable[[], None] | tuple[AuditRow, Future[None]] | None
"""A query, a row to write, or the end."""


class AuditLog:
    """Rows in a database, written by one thread, many to a transaction when many are waiting.

    The database is opened in that thread, so that a start need not wait for its library.
    """

    def __init__(self, url: str | Secret) -> None:
        self._url = url
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.opened: Future[None] = Future()
        """Resolved when the database is ready; its exception is an `AuditError`."""
        self.opened.set_running_or_notify_cancel()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="iaop-audit", daemon=True)
        self._thread.start()
        atexit.register(self._end, 5.0)  # the row of a call that was interrupted, perhaps

    def write(self, row: AuditRow) -> Future[None]:
        """Queue a row. The future is resolved when it is committed; its exception an AuditError."""
        future: Future[None] = Future()
        self._put((row, future), future)
        return future

    def usage(self, *, since: str = "", tenant: str | None = None) -> Future[list[Usage]]:
        """Calls and tokens by day, tenant and backend, from the day `since` (YYYY-MM-DD) on."""

        def query(engine: sqlalchemy.Engine, calls: sqlalchemy.Table) -> list[Usage]:
            import sqlalchemy as sa

            def count_if(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
                return sa.func.sum(sa.case((condition, 1), else_=0))

            keys = (calls.c.day, calls.c.tenant, calls.c.backend)
            statement = (
                sa.select(
                    *keys,
                    sa.func.count(),
                    count_if(calls.c.outcome == "ok"),
                    sa.func.sum(calls.c.prompt_tokens),
                    sa.func.sum(calls.c.completion_tokens),
                    count_if(calls.c.usage_estimated),
                )
                .where(calls.c.day >= since)
                .group_by(*keys)
                .order_by(*keys)
            )
            if tenant is not None:
                statement = statement.where(calls.c.tenant == tenant)
            with engine.connect() as connection:
                return [Usage(*row) for row in connection.execute(statement)]

        return self._ask(query)

    def tokens_on(self, day: str, tenant: str) -> Future[int]:
        """Prompt and answer tokens of the tenant on that day."""

        def query(engine: sqlalchemy.Engine, calls: sqlalchemy.Table) -> int:
            import sqlalchemy as sa

            total = sa.func.sum(calls.c.prompt_tokens + calls.c.completion_tokens)
            statement = sa.select(total).where(calls.c.day == day, calls.c.tenant == tenant)
            with engine.connect() as connection:
                return int(connection.execute(statement).scalar() or 0)

        return self._ask(query)

    def check_open(self) -> None:
        """Raise `AuditError` when rows can't be written any more."""
        if self._process != os.getpid():
            raise AuditError(
                "the gateway was made before this process was forked, and its threads stayed with "
                "the parent; make a gateway in each process"
            )
        if self._closed:
            raise AuditError("the gateway is closed, and its audit with it; make a new one")

    def close(self) -> None:
        """Write what is queued and close the database."""
        atexit.unregister(self._end)
        self._end(None)

    def _end(self, patience_s: float | None) -> None:
        if self._process != os.getpid():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(patience_s)

    # -- in the thread ---------------------------------------------------------------------------

    def _ask(self, query: Callable[[Any, Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                self.opened.result()
                future.set_result(query(self._engine, self._calls))
            except Exception as error:
                future.set_exception(self._explain("read", error))

        self._put(job, future)
        return future

    def _put(self, job: _Job, future: Future[Any]) -> None:
        future.set_running_or_notify_cancel()
        try:
            self.check_open()
            with self._lock:
                self.check_open()
                self._jobs.put(job)
        except AuditError as error:
            if isinstance(job, tuple):
                _log.error("an audit row is lost: %s", error)
            future.set_exception(error)

    def _work(self) -> None:
        try:
            self._open()
        except Exception as error:
            self.opened.set_exception(self._explain("opened", error))
        else:
            self.opened.set_result(None)
        jobs: list[_Job] = []
        while None not in jobs:
            jobs = [self._jobs.get()]
            while len(jobs) < _BATCH and not self._jobs.empty():
                jobs.append(self._jobs.get())
            if rows := [job for job in jobs if isinstance(job, tuple)]:
                self._write(rows)
            for job in jobs:
                if callable(job):
                    job()
        if not self.opened.exception():
            self._engine.dispose()

    def _open(self) -> None:
        import sqlalchemy as sa

        url = sa.make_url(self._url.reveal() if isinstance(self._url, Secret) else self._url)
        if url.password and not isinstance(self._url, Secret):
            raise AuditError(
                "audit.url holds a password; give it by reference, ${env:NAME} or ${file:PATH}"
            )
        self._engine = sa.create_engine(url, hide_parameters=True)
        if url.get_backend_name() == "sqlite":
            sa.event.listen(self._engine, "connect", _tune_sqlite)
        self._calls = _calls_table()
        try:
            self._calls.metadata.create_all(self._engine)
        except sa.exc.DatabaseError:  # another process has just made it
            if not sa.inspect(self._engine).has_table(self._calls.name):
                raise

    def _reopen_if_deleted(self) -> None:
        # SQLite would go on writing into a file that has no name any more.
        url = self._engine.url
        path = url.database if url.get_backend_name() == "sqlite" else None
        if path and not path.startswith((":memory:", "file:")) and not os.path.exists(path):
            _log.error("the audit database %s is gone; a new one is begun", url.database)
            self._engine.dispose()
            self._calls.metadata.create_all(self._engine)

    def _write(self, batch: list[tuple[AuditRow, Future[None]]]) -> None:
        try:
            self.opened.result()
            self._reopen_if_deleted()
            rows = [{**asdict(row), "day": f"{row.time:%Y-%m-%d}"} for row, _ in batch]
            with self._engine.begin() as connection:
                connection.execute(self._calls.insert(), rows)
        except Exception as error:
            if len(batch) > 1 and not self.opened.exception():
                for one in batch:  # one row that the database refuses is not to cost the others
                    self._write([one])
                return
            explained = self._explain("written", error)
            _log.error("an audit row is lost: %s", explained)
            for _, future in batch:
                future.set_exception(explained)
        else:
            for _, future in batch:
                future.set_result(None)

    def _explain(self, what: str, error: Exception) -> AuditError:
        if isinstance(error, AuditError):
            return error
        # SQLAlchemy's own text quotes statement and URL; the driver's is enough.
        cause = getattr(error, "orig", None) or error
        return AuditError(
            f"the audit database can't be {what}: {type(cause).__name__}: {cause}; "
            "check audit.url in the values, its disk and its server"
        )


def _tune_sqlite(connection: Any, _record: Any) -> None:
    # Readers do not stop the writer, and a commit survives the end of the process.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}").close()
