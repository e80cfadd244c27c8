"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rallocator
from rallocator import _demo, _demo_training, _doctor, _gpu
from rallocator._cli import main
from rallocator._cli.app import app
from rallocator._replay import POLICIES
from rallocator._run import Program
from rallocator._sizes import format_size, parse_size
from rallocator._text import printable
from rallocator.errors import RallocatorError
from tests.histories import MIB, TRACES, event, free, segment, write, write_history

WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
"""The environment of a machine without a GPU and with a narrow terminal."""


def command(*words: object, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    line = [sys.executable, "-m", "rallocator", *map(str, words)]
    options.setdefault("env", WITHOUT_GPU)
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=100, check=False, **options)


def invoke(*words: object) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})


# replay


def test_replay_prints_json_on_stdout_and_nothing_else(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history", [event("alloc", 64, 3 * MIB), *free(64, 3 * MIB)])
    done = command("replay", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [(row["schema"], row["file"], row["policy"], row["peak_reserved"]) for row in rows] == [
        (1, str(path), "native", 20 * MIB),
        (1, str(path), "expandable", 20 * MIB),
        (1, str(path), "rallocator", 4 * MIB),
    ]


def test_replay_takes_its_options(tmp_path: Path) -> None:
    events = [event("alloc", 64, 60 * MIB), *free(64, 60 * MIB), event("alloc", 4096, 60 * MIB, 5, stream=3)]
    path = write_history(tmp_path / "history", events)
    result = invoke(
        "replay", path, "--json", "--policy", "native", "--streams", "merge", "--config", "policy:expandable"
    )
    (row,) = json.loads(result.stdout)
    assert row["peak_reserved"] == 60 * MIB
    assert "policy has no effect" in result.stderr
    limited = ("--policy", "native", "--budget", "100MiB", "--json")
    for lag_ms, waits in (("0", 0), ("1", 1)):
        (row,) = json.loads(invoke("replay", path, *limited, "--lag-ms", lag_ms).stdout)
        assert (row["ooms"], row["retries"], row["host_waits"]) == (0, 1, waits)


def test_one_bad_file_among_several_is_named_and_the_others_answered(tmp_path: Path) -> None:
    bad, missing = tmp_path / "bad", tmp_path / "missing"
    bad.write_bytes(b"\x80\x04 damaged")
    done = command("replay", bad, TRACES / "graphs.pickle.xz", missing, "--json")
    assert done.returncode == 2
    assert len(json.loads(done.stdout)) == 3
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"rallocator: {bad}: ")
    assert lines[1] == f"rallocator: {missing}: No such file or directory"


def test_only_bad_files_give_an_empty_list(tmp_path: Path) -> None:
    done = command("replay", tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (2, [])


def test_a_state_is_an_answer_and_no_error(tmp_path: Path) -> None:
    path = write(tmp_path / "state", [segment(0, (512, "inactive"))])
    result = invoke("replay", path)
    assert result.exit_code == 0
    assert "cannot be replayed: a state without a history" in result.stdout


def test_a_guard_does_not_pass_where_there_is_no_history(tmp_path: Path) -> None:
    state = write(tmp_path / "state", [segment(0, (512, "inactive"))])
    for options in ([], ["--json"]):
        result = invoke("replay", state, TRACES / "graphs.pickle.xz", "--budget", "20GiB", *options)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"rallocator: {state}: nothing tells whether it fits in 20.00 GiB: a state")
        assert "call torch.cuda.memory._record_memory_history()" in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "torch"], "choose from native, expandable, rallocator"),
        (["--policy", ""], "choose from native, expandable, rallocator"),
        (["--budget", "much"], "24GiB"),
        (["--config", "max_split_size_mb:many"], "max_split_size_mb"),
        (["--lag-ms", "-3"], "lag"),
        (["--streams", "split"], "keep"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_options_are_named_with_what_is_accepted(options: list[str], message: str) -> None:
    result = invoke("replay", TRACES / "graphs.pickle.xz", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_no_file_is_wrong_usage() -> None:
    assert invoke("replay").exit_code == 2


def test_tables_fit_80_columns(tmp_path: Path) -> None:
    long_name = write_history(tmp_path / ("name" * 20), [event("alloc", 64, 1 << 43), *free(64, 1 << 43)] * 50)
    done = command("replay", TRACES / "kv_decode.pickle.xz", long_name, "--budget", "20GiB")
    assert done.returncode == 1, "neither fits"
    tables = [line for line in done.stdout.splitlines() if "name" not in line and "/" not in line]
    assert max(map(len, tables)) <= 80
    assert "expandable" in done.stdout
    assert "(recorded)  48.53 GiB" in done.stdout


@pytest.mark.parametrize("columns", ["50", "30", "1"])
def test_no_figure_is_cut_in_a_narrow_terminal(columns: str) -> None:
    line = [TRACES / "graphs.pickle.xz", "--budget", "252MiB"]
    wide, narrow = (
        command("replay", *line, env={**WITHOUT_GPU, "COLUMNS": width}).stdout for width in ("200", columns)
    )
    figures = [re.sub(r"\s+", " ", text).strip() for text in wide.splitlines() if re.search(r"\d MiB .*%", text)]
    assert len(figures) == 4, "the recorded ones and those of three policies"
    assert set(figures) <= {re.sub(r"\s+", " ", text).strip() for text in narrow.splitlines()}


def test_names_from_outside_are_neither_markup_nor_control_codes(tmp_path: Path) -> None:
    name = "[bold red]x[b]\x1b[31m\nnew"
    write_history(tmp_path / name, [event("alloc", 64)])
    done = command("replay", name, f"missing{name}", cwd=tmp_path)
    assert "[bold red]x[b]\\x1b[31m\\nnew" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_printable_text_stays_as_it_is() -> None:
    assert printable("größer ✓ [x]") == "größer ✓ [x]"
    assert printable("a\x9b\u202e\x7f\t") == "a\\x9b\\u202e\\x7f\\t"


# demo


def test_demo_without_a_gpu_replays_the_shipped_history_in_ten_seconds(tmp_path: Path) -> None:
    begin = time.perf_counter()
    done = command("demo", cwd=tmp_path)
    assert time.perf_counter() - begin < 10
    assert done.returncode == 0
    assert "no training on a GPU, since" in done.stderr
    assert "71.22 GiB" in done.stdout
    assert "23.49 GiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_demo_of_another_history_shows_its_figures() -> None:
    shipped, other = (json.loads(invoke("demo", "--json", *words).stdout) for words in ([], ["--history", _moe()]))
    assert [row["policy"] for row in shipped] == [row["policy"] for row in other] == list(POLICIES)
    assert all(row["kind"] == "replay" and row["schema"] == 1 for row in shipped + other)
    assert shipped[0]["peak_reserved"] != other[0]["peak_reserved"]
    table = invoke("demo", "--history", _moe()).stdout
    assert "5.63 GiB" in table
    least = other[-1]["peak_reserved"] / (1 << 30)
    assert f"Under rallocator the same program takes {least:.2f} GiB in place of 5.63 GiB." in table


def _moe() -> Path:
    return TRACES / "moe.pickle.xz"


def test_demo_of_an_unreadable_history_is_an_error(tmp_path: Path) -> None:
    result = invoke("demo", "--history", tmp_path / "missing")
    assert result.exit_code == 2
    assert "missing: No such file or directory" in result.stderr


def test_the_shipped_history_is_small_and_ours() -> None:
    assert _demo.HISTORY.stat().st_size < 600_000
    assert _demo.HISTORY.read_bytes() == (TRACES / _demo.HISTORY.name).read_bytes()


def test_a_training_that_fails_is_reported_and_the_history_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "missing_gpu_reason", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(_demo, "TRAINING_MODULE", "rallocator.no_such_module")
    result = invoke("demo")
    assert result.exit_code == 0
    assert "the training under torch failed" in result.stderr
    assert "no_such_module" in result.stderr
    assert "71.22 GiB" in result.stdout


def test_trainings_are_shown_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [_demo.Training("torch", 100, 200, 1.5, 9.0), _demo.Training("rallocator", 100, 125, 1.5, 9.0)]
    monkeypatch.setattr(_demo, "train", lambda _step_done: trainings)
    rows = json.loads(invoke("demo", "--json").stdout)
    assert [(row["schema"], row["allocator"], row["utilization"]) for row in rows] == [
        (1, "torch", 0.5),
        (1, "rallocator", 0.8),
    ]
    assert "80.0%" in invoke("demo").stdout


@pytest.mark.torch
def test_the_training_learns() -> None:
    pytest.importorskip("torch")
    first = _demo_training.train("cpu", steps=1, tokens=256, width=32, layers=1)
    last = _demo_training.train("cpu", steps=5, tokens=256, width=32, layers=1)
    assert 0 < last < 2 * first


# doctor


def report(**changes: Any) -> _doctor.Report:
    """A report of a machine on which all is well."""
    device = _doctor.Device(0, 80 << 30, virtual_memory=True, virtual_memory_missing=None)
    fields = {
        "works": True,
        "rallocator": "0.1.0",
        "python": "3.12.0",
        "torch": "2.11.0",
        "torch_cuda": "12.8",
        "driver": "580.65.06",
        "devices": (device,),
        "devices_reason": None,
        "attach": "pluggable",
        "attach_reason": "as every release",
        "settings": (),
        "inert": (),
        "host": (),
        "caching_note": None,
        "settings_reason": None,
    }
    return _doctor.Report(**{**fields, **changes})


def test_doctor_exits_with_1_where_nothing_would_work() -> None:
    done = command("doctor")
    assert done.returncode == 1
    assert "rallocator does not work here." in done.stdout
    assert "CUDA_VISIBLE_DEVICES" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_nothing_in_the_current_folder_is_run_to_look_at_torch_or_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "torch", "rallocator"):
        (tmp_path / f"{name}.py").write_text(f"open('{name} was run', 'w')")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise ImportError('the one of PYTHONPATH')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["path", *filter(None, sys.path)]))
    assert "the one of PYTHONPATH" in _doctor._probe()["reason"]
    with pytest.raises(_demo.NoTrainingError, match="the one of PYTHONPATH"):
        _demo._train_under("rallocator")
    assert list(tmp_path.glob("*was run")) == []


def test_doctor_exits_with_0_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "examine", report)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "80.00 GiB; policies: native, expandable, rallocator" in result.stdout
    assert "pluggable: as every release" in result.stdout
    (element,) = json.loads(invoke("doctor", "--json").stdout)
    assert element["schema"] == 1
    assert element["devices"][0]["total_bytes"] == 80 << 30


def test_doctor_says_why_memory_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _doctor.Device(0, 8 << 30, virtual_memory=False, virtual_memory_missing="this GPU cannot")
    monkeypatch.setattr(_doctor, "examine", lambda: report(devices=(device,)))
    assert "native only: this GPU cannot" in invoke("doctor").stdout


def test_doctor_shows_each_setting_and_its_source() -> None:
    env = {**WITHOUT_GPU, "RALLOCATOR_CONF": "policy:native", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    (element,) = json.loads(command("doctor", "--json", env=env).stdout)
    sources = {setting["key"]: (setting["value"], setting["source"]) for setting in element["settings"]}
    assert sources["policy"] == ("native", "RALLOCATOR_CONF")
    assert sources["max_split_size_mb"] == ("64", "PYTORCH_CUDA_ALLOC_CONF")
    assert sources["peers"] == ("used", "default")


def test_doctor_says_that_settings_of_pinned_memory_are_torchs_own() -> None:
    text = "pinned_use_cuda_host_register:True,throw_on_cudamalloc_oom:True"
    lines = command("doctor", env={**WITHOUT_GPU, "PYTORCH_CUDA_ALLOC_CONF": text}).stdout.splitlines()
    source = "from PYTORCH_CUDA_ALLOC_CONF"
    assert f"pinned_use_cuda_host_register:True {source} is torch's own, for pinned host memory" in lines
    assert f"throw_on_cudamalloc_oom:True {source} changes nothing here" in lines


def test_doctor_says_that_memory_is_cached_all_the_same() -> None:
    done = command("doctor", env={**WITHOUT_GPU, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    (line,) = (line for line in done.stdout.splitlines() if "PYTORCH_NO_CUDA_MEMORY_CACHING" in line)
    assert "do not enable rallocator in that run" in line


def test_doctor_names_a_wrong_setting() -> None:
    done = command("doctor", env={**WITHOUT_GPU, "RALLOCATOR_CONF": "policy:fast"})
    assert done.returncode == 1
    assert "Settings: RALLOCATOR_CONF: " in done.stdout


# run

PROBE = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "main is this": main.__dict__ is globals(),
    "builtins": print.__self__ is __builtins__,
}))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that tell how they were run."""
    for name in ("probe", "hmod", "amod"):
        (tmp_path / f"{name}.py").write_text(PROBE)
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "__main__", "inner"):
        (package / f"{name}.py").write_text("" if name == "__init__" else PROBE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(PROBE)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    (tmp_path / "linked.py").symlink_to(package / "inner.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["probe.py"],
        ["./package/../probe.py", "--config", "x", "-m", "-h", "--", "--help", ""],
        ["package/inner.py", "1"],
        ["linked.py"],
        ["folder", "a"],
        ["archive.zip", "a"],
        ["-m", "probe", "--json"],
        ["-m", "package", "-x"],
        ["-mpackage.inner", "a", "b"],
        ["-mhmod"],
        ["-mamod", "--config", "lr:3", "--attach=glue", "--help", "--", "-h"],
        ["-m", "amod", "--config", "lr:3", "--", "-m"],
    ],
    ids=" ".join,
)
def test_a_program_finds_what_it_finds_under_python(programs: Path, words: list[str]) -> None:
    plain = subprocess.run([sys.executable, *words], cwd=programs, capture_output=True, text=True, check=True)
    ours = command("run", *words, cwd=programs)
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def run_script(tmp_path: Path, source: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source))
    return command("run", *words, path, **options)


def test_run_enables_the_allocator_before_the_first_line_or_warns(tmp_path: Path) -> None:
    done = run_script(tmp_path, "print('the program ran')")
    assert (done.returncode, done.stdout) == (0, "the program ran\n")
    assert done.stderr.startswith("rallocator: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("filters", "lines"), [("error", 1), ("always", 1), ("ignore", 0)])
def test_filters_of_warnings_decide_what_is_said_and_never_whether_the_program_runs(
    tmp_path: Path, filters: str, lines: int
) -> None:
    done = run_script(tmp_path, "print('the program ran')", env={**WITHOUT_GPU, "PYTHONWARNINGS": filters})
    assert (done.returncode, done.stdout) == (0, "the program ran\n"), done.stderr
    assert len(done.stderr.splitlines()) == lines


@pytest.mark.parametrize("redirection", ["2>&-", "2> >(true)"])
def test_the_program_runs_where_nobody_listens_to_warnings(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "script.py").write_text("print('the program ran')")
    line = f'"{sys.executable}" -m rallocator run "{tmp_path}/script.py" {redirection}'
    done = subprocess.run(["bash", "-c", line], env=WITHOUT_GPU, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the program ran\n")


def test_run_takes_settings_and_refuses_wrong_ones(tmp_path: Path) -> None:
    done = run_script(tmp_path, "print('not reached')", "--config", "policy:fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert "policy" in done.stderr
    done = run_script(tmp_path, "print('not reached')", "--attach", "glue")
    assert (done.returncode, done.stdout) == (2, "")
    assert "attach" in done.stderr


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit", 0),
        ("raise SystemExit('words')", 1),
        ("raise ValueError('a failure of the program')", 1),
        ("import os; os._exit(5)", 5),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise EOFError", 1),
        ("this is no Python", 1),
    ],
)
def test_run_ends_as_the_program_does(tmp_path: Path, source: str, code: int) -> None:
    done = run_script(tmp_path, source)
    assert done.returncode == code
    if "failure" in source:
        assert 'script.py", line 1, in <module>' in done.stderr
        assert done.stderr.rstrip().endswith("ValueError: a failure of the program")


def test_the_programs_main_module_outlives_its_last_line(tmp_path: Path) -> None:
    source = """
        import atexit, pickle, threading, time

        class Thing:
            pass

        def later():
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            print("later")

        atexit.register(later)
        threading.Thread(target=lambda: (time.sleep(0.2), later())).start()
    """
    done = run_script(tmp_path, source)
    assert done.stdout == "later\nlater\n", done.stderr


def test_a_program_may_start_processes_of_every_kind(tmp_path: Path) -> None:
    source = """
        import multiprocessing

        def double(value):
            return 2 * value

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [21]))
    """
    done = run_script(tmp_path, source)
    assert done.stdout == "fork [42]\nspawn [42]\nforkserver [42]\n", done.stderr


def test_where_enabling_fails_nothing_is_handed_to_processes(tmp_path: Path) -> None:
    source = "from multiprocessing import spawn; print(spawn.get_preparation_data.__module__)"
    assert run_script(tmp_path, source).stdout == "multiprocessing.spawn\n"


def test_a_program_reads_its_own_input(tmp_path: Path) -> None:
    assert run_script(tmp_path, "print(input())", input="hello\n").stdout == "hello\n"


@pytest.mark.parametrize(
    "words", [[], ["-m"], ["missing.py"], ["-m", "no_such_module"], ["-m", "package.no_such"], ["--confg", "x", "a.py"]]
)
def test_a_program_that_is_not_there_is_wrong_usage(programs: Path, words: list[str]) -> None:
    done = command("run", *words, cwd=programs)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_words_are_split_into_program_and_arguments() -> None:
    assert Program.parse(["a.py", "-m", "x"]) == Program("a.py", is_module=False, arguments=("-m", "x"))
    assert Program.parse(["-m", "a.b", "--", "x"]) == Program("a.b", is_module=True, arguments=("--", "x"))
    assert Program.parse(["-ma", "x"]) == Program("a", is_module=True, arguments=("x",))


def test_options_of_run_come_before_the_program_however_they_are_written(programs: Path) -> None:
    for options in (["--attach", "pluggable"], ["--attach=pluggable", "--config", "policy:native"], ["--config="]):
        done = command("run", *options, "-mamod", "--config", "lr:3", cwd=programs)
        assert json.loads(done.stdout)["argv"][1:] == ["--config", "lr:3"], done.stderr
    assert "Usage" in command("run", "--help", "-mamod", cwd=programs).stdout
    assert "Usage" in command("run", "-h", cwd=programs).stdout


# The command line as a whole, and sizes.


def test_the_version_and_the_commands_are_listed() -> None:
    assert command("--version").stdout == f"rallocator {rallocator.__version__}\n"
    help_text = command("--help").stdout
    assert all(name in help_text for name in ("run", "replay", "doctor", "demo"))


@pytest.mark.skipif(shutil.which("rallocator") is None, reason="the package is not installed, only on the path")
def test_the_installed_command_is_the_module() -> None:
    installed = subprocess.run(["rallocator", "--version"], capture_output=True, text=True, check=True)
    assert installed.stdout == command("--version").stdout


def test_a_closed_pipe_is_no_traceback() -> None:
    path = str(TRACES / "graphs.pickle.xz")
    line = f'"{sys.executable}" -m rallocator replay --json {path} {path} {path} | head -1'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[\n"
    assert "Traceback" not in done.stderr


def shell(line: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `rallocator` is the command line."""
    line = line.replace("rallocator", f'"{sys.executable}" -m rallocator', 1)
    env = {**WITHOUT_GPU, **variables}
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=60, check=False, env=env
    )


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", "Bad file descriptor"), ("> /dev/full", "No space left on device")]
)
def test_output_that_cannot_be_printed_is_one_line_and_not_the_code_of_an_answer(
    tmp_path: Path, options: str, redirection: str, reason: str
) -> None:
    path = write_history(tmp_path / "history", [event("alloc", 64), *free(64)])
    done = shell(f"rallocator replay {path} {options} {redirection}")
    assert done.returncode == 2
    assert done.stderr.startswith("rallocator: ")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_closed_pipe_is_quiet_and_not_the_code_of_an_answer(tmp_path: Path, options: str) -> None:
    path = write_history(tmp_path / "history", [event("alloc", 64), *free(64)])
    done = shell(f"set -o pipefail; rallocator replay {path} {options} {'history ' * 100} | true", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_stderr_that_takes_nothing_changes_no_exit_code(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history", [event("alloc", 64), *free(64)])
    for redirection in ("2>&-", "2> /dev/full"):
        assert shell(f"rallocator replay {path} --config policy:native {redirection}").returncode == 0
        assert shell(f"rallocator replay missing {redirection}").returncode == 2


def test_characters_that_the_terminal_lacks_are_written_out(tmp_path: Path) -> None:
    name = "café.pickle"
    path = write_history(tmp_path / name, [event("alloc", 64), *free(64)])
    done = shell(f"rallocator replay {path}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9.pickle: 3 events" in done.stdout


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *words: str) -> object:
    """The exit code of the whole command line where an error comes up that nobody foresaw."""

    def examine() -> None:
        raise error

    monkeypatch.setattr(_doctor, "examine", examine)
    monkeypatch.setattr(sys, "argv", ["rallocator", "doctor", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("what\nis this"), "a defect of rallocator: KeyError: "),
        (MemoryError(), "this machine has too little memory"),
        (PermissionError(13, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
        (RallocatorError("remedy"), "remedy"),
    ],
)
def test_what_nobody_foresaw_is_one_line_and_not_the_code_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    assert failing(monkeypatch, error) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"rallocator: {line}")
    assert len(err.splitlines()) == 1


def test_the_development_mode_of_python_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("from rallocator import _doctor; del _doctor.examine")
    places = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    env = {**WITHOUT_GPU, "PYTHONPATH": places}
    assert "Traceback" not in command("doctor", env=env).stderr
    done = command("doctor", env={**env, "PYTHONDEVMODE": "1"})
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rallocator: a defect of rallocator: AttributeError: ")


def test_sizes_are_read_and_written() -> None:
    assert [parse_size(text) for text in ("24GiB", "1.5 mib", "4096", "2kb", "1 TB")] == [
        24 << 30,
        3 << 19,
        4096,
        2000,
        10**12,
    ]
    written = [format_size(size) for size in (0, 1023, 1536, 3 << 19, 18_980_274_176, 3 << 40)]
    assert written == ["0 B", "1023 B", "1.5 KiB", "1.50 MiB", "17.68 GiB", "3.00 TiB"]
