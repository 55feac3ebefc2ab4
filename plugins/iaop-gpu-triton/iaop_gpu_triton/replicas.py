"""The servers of one model, and which of them takes a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from iaop_core.errors import IaopError, ServiceError
from iaop_gpu_triton.replica import Replica, ReplicaState

_log = logging.getLogger(__name__)


class Replicas:
    """One server or several. Used on core's event loop only."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.all = tuple(replicas)
        self._model = ""
        self._turn = 0
        self._late: set[asyncio.Task[None]] = set()

    async def load(self, model: str) -> None:
        """Load the model on every server that can be reached, one at least.

        A server that is down gets it when it is back. Raises the first server's error when none
        has the model, and any error that is the model's or the values' fault.
        """
        loads = await asyncio.gather(
            *(replica.load(model) for replica in self.all), return_exceptions=True
        )
        failures = [error for error in loads if isinstance(error, BaseException)]
        for error in failures:
            if len(failures) == len(self.all) or not isinstance(error, ServiceError):
                raise error
        for error in failures:
            _log.warning("model %r is not loaded on every server: %s", model, error)
        self._model = model

    async def unload(self) -> None:
        self._model = ""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*(replica.unload() for replica in self.all))

    def in_order(self) -> list[Replica]:
        """The servers that have the model, in the order in which to try them.

        The one with the fewest calls comes first, and those that were dead a moment ago last.
        """
        if len(self.all) == 1:
            return [self.all[0]]
        self._load_late()
        self._turn += 1
        count = len(self.all)
        turned = [self.all[(self._turn + i) % count] for i in range(count)]
        usable = [replica for replica in turned if self._has_model(replica)]
        return sorted(usable, key=lambda replica: (replica.is_skipped, replica.in_flight))

    def _has_model(self, replica: Replica) -> bool:
        return replica.loaded is not None and replica.loaded.name == self._model

    def _load_late(self) -> None:
        if self._late or not self._model:
            return
        for replica in self.all:
            if not self._has_model(replica) and not replica.is_skipped:
                replica.skip()
                task = asyncio.ensure_future(self._try_load(replica, self._model))
                self._late.add(task)
                task.add_done_callback(self._late.discard)

    async def _try_load(self, replica: Replica, model: str) -> None:
        try:
            await replica.load(model)
        except IaopError as error:
            _log.warning("model %r is not loaded on every server: %s", model, error)

    async def probe(self) -> list[ReplicaState]:
        return list(await asyncio.gather(*(replica.probe() for replica in self.all)))
