"""The commands, their options and their exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

import rallocator
from rallocator._cli import bridge as bridge_command
from rallocator._cli import demo as demo_command
from rallocator._cli import doctor as doctor_command
from rallocator._cli import replay as replay_command
from rallocator._cli.console import warn
from rallocator._replay import DEFAULT_LAG_MS, POLICIES, ReplaySettings, Streams
from rallocator._report import Frames
from rallocator._run import Program
from rallocator.errors import RallocatorError

USAGE_ERROR = 2
"""The exit code for wrong usage, unreadable input, and all else that is no answer."""

app = typer.Typer(
    name="rallocator",
    help="A GPU memory allocator for PyTorch. Start with `rallocator demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ProgramToRun(BaseException):
    """Not an error: carries the program of `rallocator run` out of the command line's own handling of exceptions."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program


class RunCommand(TyperCommand):
    """Reads the options before the program only, also before `-mMODULE`: the letters of that are no options of ours."""

    # Newer releases of typer bring click's classes themselves, so that the context's has no name in all of them.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Say where the program begins, then read the words as other commands do."""
        begin = 0
        # Every option takes a value, in the same word or in the next.
        while begin < len(args) and args[begin].startswith("--") and args[begin] != "--":
            begin += 1 if "=" in args[begin] else 2
        if begin < len(args) and args[begin].startswith("-m"):
            args = [*args[:begin], "--", *args[begin:]]
        return super().parse_args(ctx, args)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rallocator {rallocator.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _fail(message: object) -> NoReturn:
    warn(message)
    raise typer.Exit(USAGE_ERROR)


@app.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    short_help="Run a Python program with the allocator enabled, no line of it changed.",
)
def run(
    program: Annotated[list[str], typer.Argument(metavar="SCRIPT.py|-m MODULE [ARGS]...", show_default=False)],
    config: Annotated[
        str | None, typer.Option(help="Settings as key:value,key:value. They come before those of the environment.")
    ] = None,
    attach: Annotated[str, typer.Option(help="The way into torch: auto, pluggable or bridge.")] = "auto",
) -> None:
    """Run a Python program with the allocator enabled, no line of it changed.

    Options come before the program; all that follows it is the program's own.
    Without a GPU a warning says so, and the program runs all the same.
    What it starts with multiprocessing has the allocator too; a launcher's ranks
    have it by: torchrun ... -m rallocator run SCRIPT.py
    """
    try:
        request = Program.parse(program, config=config, attach=attach)
    except ValueError as error:
        _fail(error)
    raise ProgramToRun(request)


@app.command(short_help="Replay recorded allocation histories under other policies and budgets.")
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", show_default=False, help="Memory snapshots, Chrome traces, or logs of RMM."),
    ],
    policy: Annotated[str, typer.Option(help="Policies, separated by commas.")] = ",".join(POLICIES),
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that may be reserved, as 24GiB. No limit if left out.")
    ] = None,
    minimum: Annotated[
        bool, typer.Option("--minimum", help="Look for the smallest budget in which each policy completes.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(metavar="TEXT", help="More settings, as in PYTORCH_CUDA_ALLOC_CONF.")
    ] = None,
    streams: Annotated[Streams, typer.Option(help="Keep the recorded streams, or merge them into one.")] = Streams.KEEP,
    lag_ms: Annotated[
        float, typer.Option(help="Milliseconds after it was queued that work is taken to end.")
    ] = DEFAULT_LAG_MS,
    handle_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What sizes of physical handles are multiples of. 2MiB if left out."),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Unpacked size above which a file is refused. 4GiB if left out."),
    ] = None,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a report: one page of HTML that opens offline.")
    ] = None,
    frames: Annotated[
        Frames, typer.Option(help="What the report shows of files in stacks: base names, full paths, or no stacks.")
    ] = Frames.BASE,
) -> None:
    """Replay recorded allocation histories on a simulated GPU, without a real one.

    Each FILE is a memory snapshot of torch (torch.cuda.memory._dump_snapshot), a Chrome trace
    of its profiler with [memory] events, or the CSV log of RMM; plain, gzip or xz.
    The exit code is 1 if a history fits under none of the policies, and 2 if a file cannot be read
    or, with a budget, holds no history.
    """
    policies = [name.strip() for name in policy.split(",") if name.strip()]
    try:
        settings = ReplaySettings.check(
            policies,
            budget,
            config,
            streams.value,
            lag_ms,
            handle_size=handle_size,
            minimum=minimum,
            max_size=max_size,
        )
        answer = replay_command.run(files, settings, as_json=as_json, page=html, frames=frames.value)
    except RallocatorError as error:
        _fail(error)
    if answer.unreadable or (settings.budget_bytes is not None and answer.unproven):
        raise typer.Exit(USAGE_ERROR)
    if not answer.fits:
        raise typer.Exit(1)


@app.command(short_help="Say what is installed, what the GPU can do, and which settings are in force.")
def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed, what the GPU can do, and which settings are in force.

    It tries to attach to torch in a process of its own, and says how, or why not.
    The exit code is 1 if rallocator cannot be used here.
    """
    if not doctor_command.run(as_json=as_json):
        raise typer.Exit(1)


@app.command("build-bridge", short_help="Compile the faster way into the torch that is installed.")
def build_bridge(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write it here, for RALLOCATOR_BRIDGE, and not into your cache folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the bridge, the faster way into the torch that is installed.

    It takes seconds and needs a C++ compiler and CUDA's headers.
    From then on rallocator takes it wherever nothing else was asked for.
    """
    try:
        bridge_command.run(out, as_json=as_json)
    except RallocatorError as error:
        warn(error)
        raise typer.Exit(1) from None


@app.command(short_help="Show what the allocator saves, on a GPU or on a recorded history.")
def demo(
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay this memory snapshot of torch, also where there is a GPU."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the allocator saves.

    On a GPU a short training runs under torch's allocator and under this one.
    Without one, a recorded history is replayed on a simulated GPU.
    """
    try:
        demo_command.run(history, as_json=as_json)
    except RallocatorError as error:
        _fail(error)
