"""A GPU that exists only in this process, to try programs and the allocator on, without any hardware.

    from rallocator.testing import SimulatedGpu

    with SimulatedGpu(capacity="8GiB") as gpu:
        block = gpu.malloc("64MiB", stream=0)
        gpu.launch(7, writes=[block], us=100)   # a kernel on another stream
        gpu.record_stream(block, 7)             # without this, the next line but one would be a race
        gpu.free(block)
        gpu.launch(0, writes=[gpu.malloc("64MiB", stream=0)], us=100)

Leaving the block frees everything and proves that nothing is left on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from rallocator import _core
from rallocator._config import Config
from rallocator._sizes import parse_size

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SimulatedGpu"]


class SimulatedGpu:
    """A program's view of a machine with simulated GPUs, under rallocator's real allocator.

    Each method is something that a training script does. Memory holds no data and kernels compute nothing: what is
    simulated is which stream does what, in which order, to which physical memory, and what the driver does and refuses.
    Everything is deterministic.

    A race oracle watches. It knows the order of things only from streams, waits, and what the host has seen to end,
    never from how long a kernel happened to take, so that a race is found at the first try:

    - `RaceError`: two allocations share memory, and nothing orders a use of one after a use of the other. Either the
      program left `record_stream` out, or the allocator handed the memory on too early. The text names both uses. Two
      unordered uses of one allocation are the program's own business.
    - `UseAfterFreeError`: the program used an allocation that it had freed.
    - `UnmappedAccessError`: a kernel touched memory that was not mapped when it ran, or memory was unmapped although
      the host had not seen the end of a kernel on it.
    - `InvariantError`: the allocator did what no program may make it do, or contradicts itself.

    A call may raise what earlier calls have led to: a fault shows once the kernel runs, not where it was launched.

    Streams are numbers. 0 is the default stream of each device; any other number is a stream of its own, which belongs
    to the device that is current when it is first used. No stream waits for another by itself. As a context manager,
    leaving the block normally calls `close`.
    """

    def __init__(
        self,
        capacity: int | str = "8GiB",
        devices: int = 1,
        vmm: bool = True,
        config: Config | str | None = None,
        *,
        granularity: int | str = "2MiB",
        peers: bool = True,
    ) -> None:
        """Make a machine with idle, empty devices, on which device 0 is current.

        Arguments:
            capacity: memory of each device: bytes, or text such as "8GiB".
            devices: how many devices there are, 1 to 64.
            vmm: whether the devices have virtual memory management (`cuMemCreate` and its family). Without it the
                policy is "native", whatever `config` says.
            config: the allocator's settings, as a `Config` or as text such as "policy:native". None: the defaults; no
                environment variable is read.
            granularity: what sizes of physical handles are multiples of, a power of two: bytes or text. A real device
                says 2 MiB.
            peers: whether the devices can reach each other's memory.

        Raises:
            ConfigError: a setting that does not exist, or a value out of its range.
            ValueError: a size, number of devices or granularity that cannot be.
        """
        text = "" if config is None else str(config)
        self._gpu = _core.SimulatedGpu(parse_size(capacity), devices, vmm, text, parse_size(granularity), peers)

    def malloc(self, nbytes: int | str, stream: int = 0, device: int = 0) -> int:
        """Allocate memory for use on a stream.

        Arguments:
            nbytes: bytes, or text such as "20MiB".
            stream: the stream that may use the memory at once.
            device: index of the device.

        Returns:
            The address; 0 for a request of 0 bytes.

        Raises:
            OutOfMemoryError: the device has too little memory, also after everything cached was given back.
            RallocatorError: the driver refuses, as in a forked child.
            ValueError: there is no such device, or `nbytes` is no size.
        """
        return self._gpu.malloc(parse_size(nbytes, minimum=0), stream, device)

    def free(self, address: int, size: int | None = None, device: int = 0, stream: int | None = None) -> None:
        """Free an allocation, which may still be in use on the streams that the allocator knows of.

        Freeing 0, an address that was never allocated, or one that is free already does nothing.

        Arguments:
            address: where the allocation starts.
            size: its size in bytes, as torch passes it along. The allocator does not trust it; nor the next two.
            device: index of the device that the program believes it to be on.
            stream: the stream that the program believes it to belong to.
        """
        del size, stream
        self._gpu.free(address, device)

    def record_stream(self, address: int, stream: int) -> None:
        """Say that the program uses an allocation on a stream other than its own, until it frees it.

        Arguments:
            address: where the allocation starts.
            stream: the other stream.
        """
        self._gpu.record_stream(address, stream)

    def launch(self, stream: int, reads: Iterable[int] = (), writes: Iterable[int] = (), us: int = 0) -> None:
        """Queue a kernel. No time passes, and the kernel runs later.

        Arguments:
            stream: where to queue it. On a stream that is capturing it is captured instead.
            reads: addresses, each somewhere in an allocation that the kernel reads as a whole. 0 is nothing.
            writes: the same for allocations that it writes.
            us: how long it takes once it runs, in whole microseconds.

        Raises:
            RaceError: nothing orders it after a use of the same memory by another allocation. It is not queued.
            UseAfterFreeError: one of the allocations was freed.
            ValueError: nothing was ever allocated at one of the addresses.
        """
        self._gpu.launch(stream, list(reads), list(writes), us)

    def wait(self, stream: int, on: int) -> None:
        """Make what a stream gets from now on wait for what another has queued now, as an event does.

        If the other stream is capturing, this one joins the capture.

        Arguments:
            stream: the stream that waits.
            on: the stream that it waits for.

        Raises:
            RallocatorError: `stream` is capturing and `on` is not in the same capture; the capture is spoiled.
        """
        self._gpu.wait(stream, on)

    def complete(self, stream: int | None = None) -> None:
        """Let the GPU finish what a stream has queued, and what that waits for, at once.

        The host learns nothing of it until somebody asks, so it orders nothing.

        Arguments:
            stream: the stream; None for all of them.
        """
        self._gpu.complete(stream)

    def advance(self, us: int) -> None:
        """Let time pass.

        Arguments:
            us: whole microseconds.
        """
        self._gpu.advance(us)

    def begin_pool(self, pool: int | tuple[int, int], stream: int) -> None:
        """Route a stream's requests to a private pool, and those of streams that are captured together with it.

        Arguments:
            pool: the pool's name: a number, or a pair of numbers as torch has it. It is made, or gets one more user.
            stream: the stream.
        """
        self._gpu.begin_pool(_pool_id(pool), stream)

    def end_pool(self, pool: int | tuple[int, int]) -> None:
        """End the last routing to a private pool, which lives on.

        Arguments:
            pool: the pool's name.

        Raises:
            ValueError: the pool was not begun, or is released.
        """
        self._gpu.end_pool(_pool_id(pool))

    def release_pool(self, pool: int | tuple[int, int]) -> None:
        """Answer one `begin_pool`. With the last, no graph may use the pool's freed memory any more.

        Arguments:
            pool: the pool's name.

        Raises:
            ValueError: the pool was not begun, or is released.
        """
        self._gpu.release_pool(_pool_id(pool))

    def restrict_moves(self, pool: int | tuple[int, int], moving: Literal["off", "contiguous"]) -> None:
        """Keep a private pool's memory at its address, as `rallocator.restrict_moves` does.

        Arguments:
            pool: the pool's name.
            moving: "off", or "contiguous": each block is one piece of physical memory, too.

        Raises:
            ValueError: the pool was not begun, or `moving` is another word.
            RallocatorError: the pool has memory already, or is to be contiguous under the policy "expandable".
        """
        self._gpu.restrict_moves(_pool_id(pool), moving)

    def begin_capture(self, stream: int, mode: Literal["global", "thread_local", "relaxed"] = "global") -> None:
        """Capture what a stream gets from now on, instead of running it.

        Arguments:
            stream: any stream but 0.
            mode: what other calls are refused meanwhile, and to whom: torch's `capture_error_mode`.

        Raises:
            RallocatorError: the stream is a default stream, or is capturing.
        """
        self._gpu.begin_capture(stream, mode)

    def end_capture(self, stream: int) -> int:
        """End a capture.

        Arguments:
            stream: the stream that it began on.

        Returns:
            The graph, for `replay`.

        Raises:
            RallocatorError: the capture was spoiled, or a stream that joined it was not waited for. It is over.
        """
        return self._gpu.end_capture(stream)

    def abort_capture(self, stream: int) -> None:
        """Give a capture up, spoiled or not.

        Arguments:
            stream: a stream that takes part in it.
        """
        self._gpu.abort_capture(stream)

    def replay(self, graph: int, stream: int) -> None:
        """Queue all that a graph captured, as one launch.

        Arguments:
            graph: what `end_capture` returned.
            stream: where to queue it.

        Raises:
            RaceError: nothing orders it after a use of the same memory by an allocation outside the graph.
            UseAfterFreeError: it uses an allocation that was freed, other than in a private pool that is still held.
            RallocatorError: there is no such graph.
        """
        self._gpu.replay(graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph, though not the pool that it used. Replays that are queued still run.

        Arguments:
            graph: what `end_capture` returned.
        """
        self._gpu.destroy_graph(graph)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream, without a word to the allocator, as programs do. Its work goes on.

        The number names a new stream from its next use on, as handles come back in CUDA; `record_stream` is no use.

        Arguments:
            stream: any stream but 0.
        """
        self._gpu.destroy_stream(stream)

    def retire_stream(self, stream: int) -> None:
        """Tell the allocator that a stream is about to be destroyed.

        Arguments:
            stream: the stream.
        """
        self._gpu.retire_stream(stream)

    def set_current_device(self, device: int) -> None:
        """Make a device the calling thread's current one. It is device 0 before.

        Arguments:
            device: index of the device.
        """
        self._gpu.set_current_device(device)

    def fork_child(self) -> None:
        """Go on as the child of a fork, in which the driver answers nothing: requests fail, frees do nothing."""
        self._gpu.fork_child()

    def fork_parent(self) -> None:
        """Go on as the parent again."""
        self._gpu.fork_parent()

    def shutdown_driver(self) -> None:
        """Shut the driver down for good, as at the end of a process: frees do nothing, requests that need it fail."""
        self._gpu.shutdown_driver()

    def fail_next(self, call: str, after: int = 0, error: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Make one driver call fail.

        Arguments:
            call: CUDA's name of the call, such as "cuMemSetAccess".
            after: how many such calls succeed before.
            error: CUDA's name of the error.

        Raises:
            ValueError: the allocator makes no such call, or there is no such error.
        """
        self._gpu.fail_next(call, after, error)

    @property
    def calls(self) -> dict[str, int]:
        """How often each driver call was made, failed ones too, by CUDA's name; without those never made."""
        return self._gpu.calls

    @property
    def elapsed_us(self) -> float:
        """Host time spent in driver calls so far, in microseconds, by costs measured on an H200; without host waits."""
        return self._gpu.elapsed_us

    @property
    def host_waits(self) -> int:
        """How often a driver call had to wait for the GPU."""
        return self._gpu.host_waits

    @property
    def host_wait_us(self) -> float:
        """Host time spent waiting for the GPU so far, in microseconds."""
        return self._gpu.host_wait_us

    def physical_bytes(self, device: int = 0) -> tuple[int, int]:
        """Return the bytes that the device has given out and not got back, now and at most, by its own count.

        Arguments:
            device: index of the device.
        """
        return self._gpu.physical_bytes(device)

    def stats(self, device: int = 0) -> dict[str, int]:
        """Return the allocator's statistics of a device.

        Arguments:
            device: index of the device.

        Returns:
            The keys of `torch.cuda.memory_stats()`, flat with dots; sizes are in bytes.
        """
        return self._gpu.stats(device)

    def reset_peak_stats(self) -> None:
        """Start the peaks in the statistics of all devices anew from the present values."""
        self._gpu.reset_peak_stats()

    def snapshot(self) -> dict[str, Any]:
        """Return a picture of all memory, in the layout of `torch.cuda.memory._snapshot()`; sizes are in bytes.

        Events are recorded in it if `config` sets `history_limit`.
        """
        return self._gpu.snapshot()

    def empty_cache(self) -> None:
        """Give cached memory back to the devices."""
        self._gpu.empty_cache()

    def check(self) -> None:
        """Check everything that holds at any time.

        Raises:
            InvariantError: the allocator's state contradicts itself, its count of reserved bytes is not the device's,
                or it did earlier what it must never do.
            UnmappedAccessError: one that was raised before, again.
        """
        self._gpu.check()

    def close(self) -> None:
        """Wait for all work, free all that the program holds, and prove that nothing is left on any device.

        A driver that was shut down, or a device that a fault has stopped, has taken everything with it: there is
        nothing to prove then.

        Raises:
            InvariantError: as `check`, or something is left: memory, an address range, an event.
        """
        self._gpu.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An error on its way out says more than what its interruption left behind.
        if kind is None:
            self.close()


def _pool_id(pool: int | tuple[int, int]) -> tuple[int, int]:
    return (pool, 0) if isinstance(pool, int) else pool
