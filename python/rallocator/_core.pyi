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

def _reset_peak_stats(device: int) -> None:
    """Set the peaks of a device to the present values."""

def _empty_cache() -> None:
    """Give cached memory back to the driver.

    Raises:
        RallocatorError: the driver refused.
    """

def _snapshot() -> dict[str, Any]:
    """A picture of all memory, in the layout of `torch.cuda.memory._snapshot()`."""

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
            ValueError: an opcode, a length or an index that no memory snapshot has; the message names its position.
        """

def replay(
    *,
    kinds: list[int],
    allocations: list[int],
    sizes: list[int],
    streams: list[int],
    pools: list[int],
    times_us: list[int],
    uses_end_us: list[int],
    policy: str,
    config: str,
    budget_bytes: int | None,
    lag_us: int,
) -> dict[str, Any]:
    """Replay steps on a simulated GPU. Other Python threads run meanwhile.

    Arguments:
        kinds: with the next six, the columns of `rallocator._replay.steps.Steps`.
        allocations: see there, as for all columns.
        sizes: bytes.
        streams: numbers, of which 0 is the default stream.
        pools: numbers, of which 0 is the default pool.
        times_us: microseconds, never falling.
        uses_end_us: microseconds, on the same clock.
        policy: the policy to replay under; the one in `config` does not count.
        config: settings, in torch's grammar.
        budget_bytes: bytes that may be reserved; None for as many as it takes.
        lag_us: microseconds after it was queued that work is taken to end.

    Returns:
        The figures of `rallocator._replay.ReplayRow` by their names.

    Raises:
        ValueError: there is no such policy, or a column is wrong.
        RuntimeError: the allocator failed for another reason than lack of memory: a defect in it.
    """
