"""The compiled core of rallocator. Private: use the functions of `rallocator`."""

from collections.abc import Callable, Sequence
from typing import Any, final

__version__: str

def _install(config: str, *, simulated_bytes: int | None = None, simulated_devices: int = 1) -> bool:
    """Make the process's allocator. Touches no driver.

    Arguments:
        config: the settings, in torch's grammar.
        simulated_bytes: for tests: run on simulated devices with so much memory each. None: real GPUs.
        simulated_devices: how many simulated devices there are.

    Returns:
        True if the allocator was made; False if there is one with these very settings.

    Raises:
        ConfigError: a setting is wrong, or there is an allocator with other settings.
    """

def _is_installed() -> bool:
    """Whether this process has an allocator."""

def _hook_addresses() -> dict[str, int]:
    """The addresses of the hooks in this library, by the name of torch's setter for each."""

def _malloc_address() -> int:
    """The address of `rallocator_malloc` in this library."""

def _api_address() -> int:
    """The address of the table of functions, `rallocator_api_v1()`."""

def _answer_cache_info() -> bool:
    """Have torch's present allocator, which must be this one, answer cuDNN's question for its largest free block.

    Returns:
        False if this torch is built in another way, so that nothing was changed.
    """

def _tell_profiler() -> bool:
    """Tell torch's profiler of each allocation and each free from now on, while it listens.

    Returns:
        False if this torch is built in another way.
    """

def _probe_hooks(calls: Callable[[], object]) -> list[str]:
    """Run something while the hooks, on this thread, only note what reaches them.

    Arguments:
        calls: what to run. Its exceptions pass through.

    Returns:
        The hooks reached, in order, each with its arguments, as text.
    """

def _quiet_counters() -> dict[str, int]:
    """How often a hook quietly did nothing.

    Returns:
        Counts since the process began: "foreign_pointers" (frees and uses of memory that is not ours),
        "repeated_frees", "leaked_frees" (the device is marked broken), "caught_panics", and "ignored_errors" of the
        driver. All are 0 in a healthy process.
    """

def _stats(device: int) -> dict[str, int]:
    """All statistics of a device, by torch's names, flat with dots; empty for an index that is no device."""

def _private_reserved(device: int) -> dict[tuple[int, int], dict[str, int]]:
    """What each private pool of a device has reserved.

    Returns:
        By the pool's id its statistics, flat with dots: "all.current", "small_pool.peak" and so on, in bytes.
    """

def _reset_peak_stats(device: int) -> None:
    """Set the peaks of a device to the present values."""

def _reset_accumulated_stats(device: int) -> None:
    """Set the totals of a device since the start to zero."""

def _memory_fraction(device: int) -> float:
    """The part of its memory that a device is limited to; 1 where no limit was set."""

def _restrict_moves(device: int, pool: tuple[int, int], moving: str) -> None:
    """Have the memory of a private pool, which has none yet, change its address no more than `moving` lets it.

    Raises:
        RallocatorError: there is no such pool, it has memory, or the policy puts its blocks together.
        ValueError: `moving` is neither "off" nor "contiguous".
    """

def _empty_cache() -> None:
    """Give cached memory back to the driver.

    Raises:
        RallocatorError: the driver refused.
    """

def _snapshot(*, pool: tuple[int, int] | None = None, events: bool = True) -> dict[str, Any]:
    """A picture of all memory, in the layout of `torch.cuda.memory._snapshot()`.

    The segments and the events of a device are of one moment; a recording notes that a snapshot was taken.

    Arguments:
        pool: the segments of this pool only; None for all. Events are those of all pools.
        events: whether events are wanted.
    """

def _record_history(*, limit: int | None, stacks: str, skipped: Sequence[str], forget: bool) -> None:
    """Start, change or stop the recording of what happens to memory.

    Arguments:
        limit: how many of the latest events are kept, at least 1; None to stop and forget everything.
        stacks: which calls have their Python stack taken, and what carries it: "none"; "state" (held memory);
            "alloc" (events too, a free those of its allocation); "all" (frees have their own).
        skipped: the actions that are not kept, by their names.
        forget: whether earlier events are dropped.

    Raises:
        ValueError: `stacks` or an action is unknown.
        RallocatorError: a device is broken.
    """

def _is_recording() -> bool:
    """Whether anything is recorded."""

def _stop_taking_stacks() -> None:
    """Take no Python stacks any more, since Python is ending."""

def _allocation_stack(address: int) -> list[dict[str, Any]] | None:
    """The Python stack by which the memory at an allocated address was obtained; None if that was not recorded."""

def _annotate(address: int, text: str) -> None:
    """Record that the program says something of the memory at an allocated address."""

def _set_label(text: str) -> None:
    """Label the events that the calling thread causes from now on; "" for none."""

def _label() -> str:
    """The label of the calling thread's events."""

def _attach_out_of_memory_observer(observer: Callable[[int, int, int, int], object]) -> None:
    """Have a function called at each request that fails for want of memory, before the error is raised.

    Arguments:
        observer: takes the device, then in bytes what was asked for, what the device has or may be reserved of it, and
            what the driver has free. What it raises is printed.
    """

@final
class ParsedConfig:
    """What a text of settings says."""

    @property
    def given(self) -> list[tuple[str, str]]:
        """Each key that the text gives, once, with the value that counts, without white space. Inert keys too."""

    @property
    def inert(self) -> list[str]:
        """The given keys of torch's that change nothing here."""

    @property
    def effective(self) -> list[tuple[str, str]]:
        """Every setting that acts and its value in words, in a fixed order."""

    @property
    def text(self) -> str:
        """The settings that differ from the defaults, in a fixed order: equal texts are equal settings."""

def parse_config(text: str) -> ParsedConfig:
    """Read settings written as `key:value,key:value`, in torch's grammar.

    Arguments:
        text: the settings. White space does not count; of a repeated key the last value wins.

    Raises:
        ConfigError: the first thing wrong with the text, with the key and what would have been accepted.
    """

@final
class SimulatedGpu:
    """A program's view of a simulated GPU: what `rallocator.testing.SimulatedGpu` documents, with sizes in bytes."""

    def __new__(
        cls, capacity_bytes: int, devices: int, vmm: bool, config: str, granularity_bytes: int, peers: bool
    ) -> SimulatedGpu: ...
    def malloc(self, size: int, stream: int, device: int) -> int: ...
    def free(self, address: int, device: int) -> None: ...
    def record_stream(self, address: int, stream: int) -> None: ...
    def launch(self, stream: int, reads: Sequence[int], writes: Sequence[int], us: int) -> None: ...
    def wait(self, stream: int, on: int) -> None: ...
    def complete(self, stream: int | None) -> None: ...
    def advance(self, us: int) -> None: ...
    def begin_pool(self, pool: tuple[int, int], stream: int) -> None: ...
    def end_pool(self, pool: tuple[int, int]) -> None: ...
    def release_pool(self, pool: tuple[int, int]) -> None: ...
    def restrict_moves(self, pool: tuple[int, int], moving: str) -> None: ...
    def begin_capture(self, stream: int, mode: str) -> None: ...
    def end_capture(self, stream: int) -> int: ...
    def abort_capture(self, stream: int) -> None: ...
    def replay(self, graph: int, stream: int) -> None: ...
    def destroy_graph(self, graph: int) -> None: ...
    def destroy_stream(self, stream: int) -> None: ...
    def retire_stream(self, stream: int) -> None: ...
    def set_current_device(self, device: int) -> None: ...
    def fork_child(self) -> None: ...
    def fork_parent(self) -> None: ...
    def shutdown_driver(self) -> None: ...
    def fail_next(self, call: str, after: int, error: str) -> None: ...
    @property
    def calls(self) -> dict[str, int]: ...
    @property
    def elapsed_us(self) -> float: ...
    @property
    def host_waits(self) -> int: ...
    @property
    def host_wait_us(self) -> float: ...
    def physical_bytes(self, device: int) -> tuple[int, int]: ...
    def stats(self, device: int) -> dict[str, int]: ...
    def reset_peak_stats(self) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def empty_cache(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

def devices() -> list[tuple[int, str]]:
    """Ask the driver for the GPUs of this machine. It is initialised by this, so that forked children cannot use a GPU.

    Returns:
        For each its bytes of memory, and why its memory cannot be mapped; "" where it can.

    Raises:
        RuntimeError: the driver is missing, or failed; the message names the call and the status.
    """

@final
class PickleScanner:
    """Looks through a pickle, chunk by chunk, for anything that a memory snapshot does not hold."""

    def __new__(cls) -> PickleScanner: ...
    def feed(self, chunk: bytes) -> int | None:
        """Look at the next bytes.

        Returns:
            The pickle's length in bytes once its end was seen; None before. What follows the end is not looked at.

        Raises:
            ValueError: an opcode, length, index or key that no memory snapshot has; the message names its position.
        """

def read_chrome_trace(read: Callable[[], bytes]) -> list[tuple[int, int, int, int | None, int, int]]:
    """Read the memory events of GPUs from a Chrome trace, while the rest of it streams by.

    Arguments:
        read: returns the next bytes of the document, and none at its end. What it raises is passed on.

    Returns:
        For each event microseconds, device, address, bytes (negative for a free; None for a failed allocation), bytes
        without a sign, and bytes reserved after it (0 if it does not say).

    Raises:
        ValueError: the document is no JSON, no trace, or one of its memory events is damaged.
    """

def native_segment_size(size: int) -> int:
    """The bytes of the segment that torch's default rules obtain for a request of `size` bytes."""

@final
class ReplaySteps:
    """The steps of a recorded program, packed once and replayed many times. Other Python threads run meanwhile.

    `asked` says how to replay: "policy" (the one in "config" does not count), "config" (settings in torch's grammar),
    "budget_bytes" (None for as many as it takes), "lag_us" (microseconds after it was queued that work is taken to
    end), "handle_granularity_bytes" (a power of two), "empty_cache_before" (a list of positions of steps), "late_from"
    (such a position, or None), "with_layout" (whether to begin with the memory that the recording began with). The
    methods that take it raise ValueError for what there is not, and RuntimeError for a defect.
    """

    def __new__(
        cls,
        *,
        kinds: list[int],
        allocations: list[int],
        sizes: list[int],
        streams: list[int],
        pools: list[int],
        times_us: list[int],
        uses_end_us: list[int],
    ) -> ReplaySteps:
        """Pack the columns of `rallocator._replay.steps.Steps`.

        Arguments:
            kinds: with the next six, the columns.
            allocations: see there, as for all columns.
            sizes: bytes.
            streams: numbers, of which 0 is the default stream.
            pools: numbers, of which 0 is the default pool.
            times_us: microseconds, never falling.
            uses_end_us: microseconds, on the same clock.

        Raises:
            ValueError: the columns differ in length, or there is no such kind of step.
        """

    def __len__(self) -> int: ...
    def after(
        self, layout: list[tuple[int, int, int, int, bool | None, list[tuple[int, int | None, bool]]]]
    ) -> ReplaySteps:
        """Return the same program with memory that there is before its first step, where "with_layout" asks for it.

        Arguments:
            layout: of each segment its address, bytes, stream, pool, whether it is a range for small requests (None if
                it is no range) and pieces; of each piece its bytes, the allocation that had it or None, and whether
                there was memory. Addresses are names.
        """

    def growth(self, asked: dict[str, Any]) -> list[int]:
        """Return the steps in which more memory was obtained from the driver than there was before."""

    def follow(
        self, asked: dict[str, Any], *, places: list[int | None], most_steps: int
    ) -> tuple[list[tuple[int, int]], int, int]:
        """Find out when the recorded program emptied its cache, from where its blocks lay. Policy native, no budget.

        Arguments:
            asked: how to replay; "empty_cache_before" is what is known already.
            places: for each step the address of the block that it allocates, or None where that tells nothing.
            most_steps: how many may be replayed for it, beyond one run; with 0 nothing is inferred.

        Returns:
            The steps before which the cache was emptied, each with the bytes that would have been reserved after it
            otherwise; the most that was reserved; the number of blocks that lay where this cannot explain.
        """

    def changed(
        self, *, merge_streams: bool = False, merge_pools: bool = False, free_at_once: bool = False
    ) -> ReplaySteps:
        """Return the same program with something changed.

        Arguments:
            merge_streams: all requests are for the default stream.
            merge_pools: requests for private pools are for the default pool, on the default stream.
            free_at_once: no free waits for another stream.
        """

    def replay(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of `rallocator._replay.ReplayRow` by their names.

        Besides them "peak_reserved_late": the most bytes reserved after each step from "late_from" on.
        """

    def minimum_budget(self, asked: dict[str, Any]) -> int | None:
        """Return the smallest budget in bytes under which no allocation fails, by bisection; None if there is none."""

    def timeline(self, asked: dict[str, Any]) -> dict[str, bytes]:
        """Return what was where at every moment, as columns of little-endian numbers.

        Addresses and sizes have 64 bits, steps 32, of which all set mean never. What begins with step b and ends with e
        is there after each step from b to before e.

        - "block_address", "block_size", "block_begin", "block_freed" (by the program), "block_end" (reusable)
        - "segment_address", "segment_size", "segment_begin", "segment_end"
        - "level_step", "level_allocated", "level_active", "level_reserved": bytes after each step that changed them
        """

    def state_after(self, count: int, asked: dict[str, Any]) -> list[tuple[int, int, list[tuple[int, int, str]]]]:
        """Return the allocator's own picture of its memory after the first steps.

        Returns:
            Segments as address, size and blocks, and these as address, size and torch's name of their state.
        """

    def held(self) -> bytes:
        """Return the bytes that the program holds after each step, as little-endian numbers of 64 bits.

        Each request is rounded up to 512 bytes.
        """
