"""The figures of one device of one file under one policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rallocator._replay.state import MemoryState

SCHEMA = 1
"""The version of the rows' JSON. Within it fields may be added, never changed."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One device of one file under one policy. Figures are None where the history cannot be replayed."""

    file: str
    """The file, as it was named to the replay."""
    device: int
    """The device's index in the recording."""
    policy: str
    """The policy under which it was replayed."""
    replayable: bool
    """Whether the file holds a history of this device."""
    reason: str | None
    """Why it does not; None when it does."""
    events: int
    """Recorded events of blocks: allocations, both halves of frees, failed allocations."""
    recorded_peak_reserved: int | None
    """Bytes that torch had reserved at most while it recorded, as far as the file shows."""
    peak_requested: int | None = None
    """The most bytes that the program had asked for and not given back, or given back but not yet finished with."""
    peak_allocated: int | None = None
    """The most bytes that were allocated, each request rounded up to 512 bytes: the same for every policy."""
    peak_active: int | None = None
    """The most bytes of blocks that were in use, or freed but still in use by another stream."""
    peak_reserved: int | None = None
    """The most bytes that were obtained from the driver and not returned."""
    peak_device: int | None = None
    """The same as the simulated GPU counts it."""
    utilization: float | None = None
    """`peak_allocated / peak_reserved`; None also when nothing was reserved."""
    ooms: int | None = None
    """Allocations that failed. Each was left out, and so was its free."""
    retries: int | None = None
    """Times that cached memory was returned to the driver to try again."""
    host_waits: int | None = None
    """Times that the program would have had to wait for the GPU."""
    host_wait_us: int | None = None
    """Microseconds spent in these."""
    gpu_waits: int | None = None
    """Times that a stream was made to wait for another one on the GPU."""
    driver_calls: dict[str, int] | None = field(default=None, hash=False)
    """Calls of the driver, by CUDA's name."""
    driver_time_us: int | None = None
    """Microseconds that these calls take on the simulated GPU, waits for queued work left out."""
    handles_moved: int | None = None
    """Pieces of physical memory that were moved to another address."""
    peak_address_bytes: int | None = None
    """The most bytes of addresses that had memory behind them; memory at two addresses counts twice."""
    minimum_budget: int | None = None
    """The smallest budget in bytes without a failure; None when it was not looked for."""
    state: MemoryState | None = None
    """The device's memory when the recording ended; None if the file shows no segment."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON has it: bytes and microseconds are whole numbers."""
        state = None if self.state is None else self.state.to_json()
        return {"schema": SCHEMA, **dataclasses.asdict(self), "state": state}
