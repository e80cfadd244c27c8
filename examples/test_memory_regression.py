"""Guards a program's need for GPU memory in CI, on a machine without a GPU.

Record a snapshot once on a GPU, commit it (or have a nightly run refresh it), and let CI replay it:

    torch.cuda.memory._record_memory_history()
    train_a_few_steps()
    torch.cuda.memory._dump_snapshot("training.pickle")
"""

from pathlib import Path

import pytest

import rallocator

RECORDING = Path(__file__).parents[1] / "tests" / "traces" / "frames.pickle.xz"  # yours: Path("training.pickle")
GIB = 1 << 30


@pytest.fixture(scope="module")
def result() -> rallocator.ReplayResult:
    return rallocator.replay(RECORDING, policies=["native", "rallocator"], budget="12GiB")


def test_training_fits_on_the_card_that_we_rent(result: rallocator.ReplayResult) -> None:
    assert result.fits


def test_the_model_does_not_grow_unnoticed(result: rallocator.ReplayResult) -> None:
    # The same for every policy: what the program itself holds.
    peak_allocated = result.row("native").peak_allocated
    assert peak_allocated is not None
    assert peak_allocated <= 8.7 * GIB


def test_hardly_anything_is_lost_to_fragmentation(result: rallocator.ReplayResult) -> None:
    utilization = result.row("rallocator").utilization
    assert utilization is not None
    assert utilization >= 0.97


def test_nothing_new_is_to_be_said(result: rallocator.ReplayResult) -> None:
    causes = {advice.cause for found in result.advice.values() for advice in found}
    assert causes <= {"fragmentation"}
