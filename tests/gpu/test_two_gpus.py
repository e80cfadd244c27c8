"""Two GPUs in one process: what one of them allocated, the other can read, also while both are busy."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.two_gpus

GIB = 1 << 30

# About half a second on an H200 (1.98 GHz).
SLEEP_CYCLES = 1_000_000_000


def keep_both_busy(torch: Any) -> None:
    """Leave a kernel running on a side stream of each GPU."""
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.usefixtures("allocator")
def test_copies_to_the_other_gpu_are_right_after_ten_gibibytes_and_beside_kernels(torch: Any) -> None:
    large = torch.arange(10 * GIB // 8, device="cuda:0")
    torch.ones(8, device="cuda:1")
    keep_both_busy(torch)

    copied = large.to("cuda:1")
    strided = torch.empty((1024, 512), dtype=torch.int64, device="cuda:1")
    strided.copy_(large[: 1024 * 1024].view(1024, 1024)[:, ::2])
    transposed = large[: 1024 * 1024].view(1024, 1024).t().to("cuda:1")

    expected = torch.arange(1024 * 1024).view(1024, 1024)
    assert torch.equal(copied, torch.arange(10 * GIB // 8, device="cuda:1"))
    assert torch.equal(strided.cpu(), expected[:, ::2])
    assert torch.equal(transposed.cpu(), expected.t())


@pytest.mark.usefixtures("allocator")
def test_memory_made_before_the_other_gpu_was_used_can_be_copied_both_ways(torch: Any) -> None:
    before = torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda:0")
    there = before.to("cuda:1")
    after = torch.full((64 << 20,), 9, dtype=torch.uint8, device="cuda:0")
    keep_both_busy(torch)
    there_strided = torch.zeros((8192, 4096), dtype=torch.uint8, device="cuda:1")
    there_strided.copy_(after.view(8192, 8192)[:, ::2])
    back = torch.zeros((8192, 8192), dtype=torch.uint8, device="cuda:0")
    back[:, ::2].copy_(there_strided)
    assert bool((there == 7).all())
    assert bool((there_strided == 9).all())
    assert int(back.sum(dtype=torch.int64).item()) == 9 * 8192 * 4096


def test_each_gpu_has_its_own_statistics(torch: Any, allocator: Any) -> None:
    first = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:0")
    second = torch.empty(5 << 20, dtype=torch.uint8, device="cuda:1")
    assert allocator.stats(0)["requested_bytes.all.current"] == first.nbytes
    assert allocator.stats(1)["requested_bytes.all.current"] == second.nbytes


@pytest.mark.usefixtures("allocator")
def test_tensor_freed_while_another_gpu_is_current_is_reused_on_its_own(torch: Any) -> None:
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    address = tensor.data_ptr()
    with torch.cuda.device("cuda:1"):
        del tensor
        assert torch.cuda.current_device() == 1
        other = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
        assert other.data_ptr() != address
    assert torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0").data_ptr() == address


TRAIN = """
import json
import os
import sys

import torch
import torch.distributed as dist
import rallocator

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(rank)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
weight = model.module[0].weight.detach().double().sum().reshape(1)
both = [torch.zeros_like(weight) for _ in range(2)]
dist.all_gather(both, weight)
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"attached": rallocator.attached(), "weights": [value.item() for value in both]}, file)
dist.destroy_process_group()
"""


EXCHANGE = """
import json
import os
import sys

import torch
import torch.distributed as dist

MIB = 1 << 20
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
peer = 1 - rank
from_rank = [dist.new_group([0, 1]) for _ in range(2)]  # A communicator for each direction.
compute, sending, receiving = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
count = 64 * MIB // 4


def send(number):
    tensor = torch.full((count,), number, dtype=torch.int32, device="cuda")
    sending.wait_stream(compute)
    with torch.cuda.stream(sending):
        dist.send(tensor, peer, group=from_rank[rank])
    tensor.record_stream(sending)


def receive():
    tensor = torch.empty(count, dtype=torch.int32, device="cuda")
    receiving.wait_stream(compute)
    with torch.cuda.stream(receiving):
        dist.recv(tensor, peer, group=from_rank[peer])
    tensor.record_stream(receiving)
    compute.wait_stream(receiving)
    return tensor


# The communicators are made at their first use, by both ranks at once.
for step in (send, receive) if rank == 0 else (receive, send):
    step(0) if step is send else step()
torch.cuda.synchronize()
torch.cuda.empty_cache()
# What is being sent, what is received, and no third.
limit = torch.cuda.memory_reserved() + 2 * 64 * MIB + 24 * MIB
torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
wrong = torch.zeros((), dtype=torch.int64, device="cuda")
for step in range(1, 41):
    send(2 * step + rank)
    received = receive()
    wrong += received[:: count // 1000].ne(2 * step + peer).sum()
    del received
torch.cuda.synchronize()
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"wrong": wrong.item(), "most": torch.cuda.max_memory_reserved(), "limit": limit}, file)
dist.destroy_process_group()
"""


def run_two_ranks(run_python: RunPython, folder: Path, program: str) -> list[dict[str, Any]]:
    """Run a program on two ranks under rallocator; each writes its answer to FOLDER/RANK.json."""
    script = folder / "ranks.py"
    script.write_text(program)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # An address instead of --standalone, which asks for the machine's own name: that need not resolve.
    where = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
    launcher = ("-m", "torch.distributed.run", *where, "--nproc-per-node", "2", "-m", "rallocator", "run")
    run_python(options=(*launcher, str(script), str(folder)))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.drives_processes
def test_torchrun_trains_on_both_gpus_with_no_line_of_the_script_changed(run_python: RunPython, tmp_path: Path) -> None:
    answers = run_two_ranks(run_python, tmp_path, TRAIN)
    assert all(answer["attached"] for answer in answers)
    assert answers[0]["weights"] == answers[1]["weights"]
    assert answers[0]["weights"][0] == answers[0]["weights"][1]


@pytest.mark.drives_processes
def test_ranks_that_send_before_they_receive_never_wait_for_each_other(run_python: RunPython, tmp_path: Path) -> None:
    # Were the receiving tensor's memory to wait on the GPU for what is being sent, neither rank would ever receive.
    for answer in run_two_ranks(run_python, tmp_path, EXCHANGE):
        assert answer["wrong"] == 0
        assert answer["most"] <= answer["limit"]
