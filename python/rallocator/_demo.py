"""The allocator's main job on what is here: a training on the GPU, or a recorded history on a simulated one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallocator import _gpu
from rallocator._own_python import python_command
from rallocator._replay import POLICIES, ReplayResult, replay

HISTORY = Path(__file__).parent / "data" / "lora_checkpoint.pickle.xz"
"""The recorded history that ships with the package: a language model that is fine-tuned with LoRA and activation
checkpoints, on batches of every length. Recorded on an H200 with torch 2.11."""

TRAINING_TIMEOUT_SECONDS = 55
"""For each of the two trainings, so that the demonstration ends within two minutes."""

TRAINING_MODULE = "rallocator._demo_training"

ALLOCATORS = ("torch", "rallocator")


@dataclass(frozen=True, slots=True)
class Training:
    """One training under one allocator."""

    allocator: str
    peak_allocated: int
    peak_reserved: int
    seconds: float
    loss: float

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "schema": 1,
            "kind": "training",
            "allocator": self.allocator,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "utilization": self.peak_allocated / self.peak_reserved if self.peak_reserved else None,
            "elapsed_us": round(self.seconds * 1e6),
            "loss": self.loss,
        }


class NoTrainingError(Exception):
    """The training cannot run here; the text says why, as a clause."""


def train(step_done: Callable[[], None]) -> list[Training]:
    """Run the training once under each allocator, in a process of its own.

    Arguments:
        step_done: called after each training.

    Raises:
        NoTrainingError: there is no GPU or no torch, or a training failed or took too long.
    """
    if importlib.util.find_spec("torch") is None:
        raise NoTrainingError("torch is not installed")
    if reason := _gpu.missing_gpu_reason():
        raise NoTrainingError(reason)
    trainings = []
    for allocator in ALLOCATORS:
        trainings.append(_train_under(allocator))
        step_done()
    return trainings


def _train_under(allocator: str) -> Training:
    command = python_command(f"from {TRAINING_MODULE} import main; main()", allocator)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoTrainingError(
            f"the training under {allocator} took more than {TRAINING_TIMEOUT_SECONDS} s and was stopped"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NoTrainingError(f"the training under {allocator} failed: {last}")
    return Training(allocator, **json.loads(done.stdout.strip().splitlines()[-1]))


def replay_history(history: Path | None) -> ReplayResult:
    """Replay a history, or the one that ships with the package, under every policy.

    Raises:
        SnapshotError: the history cannot be read.
    """
    return replay(HISTORY if history is None else history, POLICIES)
