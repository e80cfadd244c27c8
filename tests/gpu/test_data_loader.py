"""Workers forked by a DataLoader live beside a parent that uses CUDA."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.usefixtures("allocator")
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_forked_data_loader_finishes_and_inherited_tensors_are_left_alone(torch: Any, pin_memory: bool) -> None:
    class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
        """Squares, beside a tensor on the GPU that the workers inherit and free."""

        def __init__(self) -> None:
            self.on_gpu = torch.full((1 << 20,), 5, dtype=torch.int32, device="cuda")

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.full((1000,), index * index, dtype=torch.int64)

    def free_inherited(_worker: int) -> None:
        torch.utils.data.get_worker_info().dataset.on_gpu = None

    numbers = Numbers()
    loader = torch.utils.data.DataLoader(
        numbers,
        batch_size=8,
        num_workers=2,
        pin_memory=pin_memory,
        multiprocessing_context="fork",
        worker_init_fn=free_inherited,
        timeout=60,
    )
    for _ in range(2):
        total = sum(int(batch.to("cuda", non_blocking=pin_memory)[:, 0].sum().item()) for batch in loader)
        assert total == sum(index * index for index in range(64))
    assert bool((numbers.on_gpu == 5).all())
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20


@pytest.mark.usefixtures("allocator")
def test_cuda_in_a_child_of_a_parent_that_used_it_is_a_clear_error(torch: Any) -> None:
    context = torch.multiprocessing.get_context("fork")
    answers = context.Queue()
    tensor = torch.ones(1 << 20, device="cuda")

    def use_cuda() -> None:
        try:
            torch.ones(8, device="cuda")
            answers.put("no error")
        except RuntimeError as error:
            answers.put(str(error))

    process = context.Process(target=use_cuda)
    process.start()
    answer = answers.get(timeout=60)
    process.join(60)
    assert "fork" in answer
    assert process.exitcode == 0
    assert tensor.sum().item() == 1 << 20
