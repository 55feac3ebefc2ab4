"""What tenants may use: reserved before a call, settled after it, so that parallel calls can't
slip through together."""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections import deque
from collections.abc import Mapping

from iaop_core.audit import AuditLog
from iaop_core.bridge import Wait
from iaop_core.errors import AuditError, QuotaExceededError
from iaop_core.values import TenantSettings

__all__ = ["QuotaLedger", "Reservation"]

_MINUTE_S = 60.0


class _Account:
    def __init__(self) -> None:
        self.day = ""
        self.used = 0
        """Tokens of the day, settled."""
        self.reserved = 0
        self.calls: deque[float] = deque()
        """When the calls of the last minute began."""


class Reservation:
    """Tokens put aside for one call."""

    def __init__(self, ledger: QuotaLedger, tenant: str, tokens: int) -> None:
        self._ledger = ledger
        self._tenant = tenant
        self._tokens = tokens
        self._settled = False

    def settle(self, tokens: int) -> None:
        """Book what was really used and give the rest back; only the first time counts."""
        if not self._settled:
            self._settled = True
            self._ledger._settle(self._tenant, self._tokens, tokens)


class QuotaLedger:
    """The accounts of this process's tenants; a day's tokens begin with what the audit knows."""

    def __init__(self, tenants: Mapping[str, TenantSettings], audit: AuditLog) -> None:
        self._tenants = tenants
        self._audit = audit
        self._accounts = {name: _Account() for name in tenants}
        self._lock = threading.Lock()

    async def reserve(
        self, tenant: str, tokens: int, wait: Wait, timeout_s: float | None = None
    ) -> Reservation:
        """Put tokens aside. `timeout_s` is for the audit's answer, which a day begins with.

        Raises `QuotaExceededError` and `AuditError`.
        """
        limits, account = self._tenants[tenant], self._accounts[tenant]
        today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        booked = None
        if limits.tokens_per_day is not None and account.day != today:
            try:
                booked = await wait(self._audit.tokens_on(today, tenant), timeout_s)
            except TimeoutError:
                raise AuditError(
                    "the audit database has not told the tenant's tokens of today in time"
                ) from None
        with self._lock:
            if booked is not None and account.day != today:
                account.day, account.used = today, booked
            self._check_rate(tenant, limits, account)
            self._check_tokens(tenant, limits, account, tokens)
            account.calls.append(time.monotonic())
            account.reserved += tokens
        return Reservation(self, tenant, tokens)

    def _check_rate(self, tenant: str, limits: TenantSettings, account: _Account) -> None:
        now = time.monotonic()
        while account.calls and account.calls[0] <= now - _MINUTE_S:
            account.calls.popleft()
        limit = limits.requests_per_minute
        if limit is not None and len(account.calls) >= limit:
            raise QuotaExceededError(
                f"tenant {tenant!r} has made its {limit} requests of this minute",
                tenant=tenant,
                retry_after_s=account.calls[0] + _MINUTE_S - now,
            )

    def _check_tokens(
        self, tenant: str, limits: TenantSettings, account: _Account, tokens: int
    ) -> None:
        limit = limits.tokens_per_day
        if limit is not None and account.used + account.reserved + tokens > limit:
            now = datetime.datetime.now(datetime.UTC)
            midnight = (now + datetime.timedelta(days=1)).replace(hour=0, minute=0, second=0)
            raise QuotaExceededError(
                f"tenant {tenant!r} has {max(0, limit - account.used - account.reserved)} of its "
                f"{limit} tokens of today left, and the call may need {tokens}; lower max_tokens, "
                "or wait until midnight UTC",
                tenant=tenant,
                retry_after_s=math.ceil((midnight - now).total_seconds()),
            )

    def _settle(self, tenant: str, reserved: int, used: int) -> None:
        account = self._accounts[tenant]
        with self._lock:
            account.reserved -= reserved
            account.used += used
