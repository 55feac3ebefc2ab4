"""Whether inference makes progress: what has become of the calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_FAILURES = 3
_REMEMBERED_S = 30.0


class Progress:
    """Counts calls under way, and remembers the last success and the last failure."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._failures_in_a_row = 0
        self._last_success: datetime | None = None
        self._last_failure: datetime | None = None
        self._failed_at = 0.0
        self._reason = ""

    def succeeded(self) -> None:
        self._failures_in_a_row = 0
        self._last_success = datetime.now(UTC)

    def failed(self, reason: str) -> None:
        """The server, or the way to it, failed a call. A caller's own mistake is no failure."""
        self._failures_in_a_row += 1
        self._last_failure = datetime.now(UTC)
        self._failed_at = time.monotonic()
        self._reason = reason

    @property
    def is_stuck(self) -> bool:
        """Three calls have failed in a row, the last one within the last 30 seconds.

        After that the server is worth another try.
        """
        recent = time.monotonic() - self._failed_at < _REMEMBERED_S
        return self._failures_in_a_row >= _FAILURES and recent

    def facts(self) -> Mapping[str, Any]:
        """What is known, in JSON's types; times are ISO 8601 in UTC, or None."""
        return {
            "in_flight": self.in_flight,
            "last_success": _shown(self._last_success),
            "last_failure": _shown(self._last_failure),
            "last_failure_kind": self._reason,
            "failures_in_a_row": self._failures_in_a_row,
        }


def _shown(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
