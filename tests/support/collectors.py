"""A collector of memory operations that needs no GPU."""

from __future__ import annotations

from recordings import Row, records_of

from umem.core.errors import UnsupportedError
from umem.core.report import Source
from umem.telemetry import RecordKind
from umem.telemetry.records import MigrationRecords, concatenate


class StandInCollector:
    """In place of CUPTI: records that the test writes, and a clock that ticks when it is read.

    Parameters
    ----------
    refusal
        Why it does not record; empty if it does.
    at
        Whether it refuses at the ``start`` or at the ``stop``.
    dropped
        Records that it says were lost.
    """

    source: Source = "cupti"

    def __init__(self, refusal: str = "", at: str = "start", dropped: int = 0) -> None:
        self.refusal, self.at, self.dropped = refusal, at, dropped
        self.time_ns = 1_000_000
        self.rows: list[Row] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self._call("start")

    def now_ns(self) -> int:
        self.time_ns += 10
        return self.time_ns

    def stop(self) -> tuple[MigrationRecords, int]:
        self._call("stop")
        return concatenate([records_of(self.rows)]), self.dropped

    def late(self) -> int:
        return 0

    def notes(self) -> tuple[str, ...]:
        return ()

    def moves(self, address: int, size_bytes: int, cause: int = 2) -> None:
        """Record a transfer to the device that happens now."""
        start_ns = self.now_ns()
        kind = RecordKind.TO_DEVICE
        self.rows.append((kind, start_ns, self.now_ns(), address, size_bytes, 0, cause))

    def _call(self, name: str) -> None:
        if self.refusal and self.at == name:
            raise UnsupportedError(self.refusal)
        self.calls.append(name)
