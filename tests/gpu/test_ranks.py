"""Two ranks of one program, each a process with an allocator of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.drives_processes

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


# Between two GPUs.
NCCL = """
import os
import sys

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
from_rank = [dist.new_group([0, 1]) for _ in range(2)]  # A communicator for each direction.


def send_to_peer(tensor):
    dist.send(tensor, 1 - rank, group=from_rank[rank])


def receive_from_peer(tensor):
    dist.recv(tensor, 1 - rank, group=from_rank[1 - rank])


leave = dist.destroy_process_group
"""

# Between two processes on one GPU, where NCCL refuses. Here too neither side's work ends before the other's has begun.
MEETING = """
import ctypes
import os
import sys

import torch

rank = int(os.environ["LOCAL_RANK"])
driver = ctypes.CDLL("libcuda.so.1")
GREATER_OR_EQUAL = 0


class Direction:
    # Both processes see how many messages the receiver has asked for and the sender has put there, and the last one.
    def __init__(self, words, sender):
        counts = words[sender * 1024 : sender * 1024 + 2]
        self.asked_for, self.put = (ctypes.c_uint64(count.data_ptr()) for count in counts)
        self.message = words[2048:].chunk(2)[sender]
        self.number = 0

    def send(self, tensor):
        self.number += 1
        self.wait(self.asked_for)
        self.message[: tensor.numel()].copy_(tensor, non_blocking=True)
        self.tell(self.put)

    def receive(self, tensor):
        self.number += 1
        self.tell(self.asked_for)
        self.wait(self.put)
        tensor.copy_(self.message[: tensor.numel()], non_blocking=True)

    def tell(self, count):
        self.call(driver.cuStreamWriteValue32_v2, count, 0)

    def wait(self, count):
        self.call(driver.cuStreamWaitValue32_v2, count, GREATER_OR_EQUAL)

    def call(self, function, count, flags):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert function(stream, count, ctypes.c_uint32(self.number), ctypes.c_uint(flags)) == 0


torch.cuda.init()
words = torch.from_file(sys.argv[2], shared=True, size=os.path.getsize(sys.argv[2]) // 4, dtype=torch.int32)
assert int(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, 0)) == 0
assert words.is_pinned()  # So that copies are the stream's work, and not the host's.
send_to_peer, receive_from_peer = Direction(words, rank).send, Direction(words, 1 - rank).receive


def leave():
    pass
"""

EXCHANGE = """
import json

MIB = 1 << 20
peer = 1 - rank
compute, sending, receiving = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
count = 64 * MIB // 4


def send(number):
    tensor = torch.full((count,), number, dtype=torch.int32, device="cuda")
    sending.wait_stream(compute)
    with torch.cuda.stream(sending):
        send_to_peer(tensor)
    tensor.record_stream(sending)


def receive():
    tensor = torch.empty(count, dtype=torch.int32, device="cuda")
    receiving.wait_stream(compute)
    with torch.cuda.stream(receiving):
        receive_from_peer(tensor)
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
leave()
"""


def run_two_ranks(run_python: RunPython, folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program on two ranks under rallocator; each writes its answer to FOLDER/RANK.json."""
    script = folder / "ranks.py"
    script.write_text(program)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # An address instead of --standalone, which asks for the machine's own name: that need not resolve.
    where = ("--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
    launcher = ("-m", "torch.distributed.run", *where, "--nproc-per-node", "2", "-m", "rallocator", "run")
    run_python(options=(*launcher, str(script), str(folder), *arguments))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check_exchange(answers: list[dict[str, Any]]) -> None:
    """Prove that everything arrived, within the limit."""
    for answer in answers:
        assert answer["wrong"] == 0
        assert answer["most"] <= answer["limit"]


@pytest.mark.two_gpus
def test_torchrun_trains_on_both_gpus_with_no_line_of_the_script_changed(run_python: RunPython, tmp_path: Path) -> None:
    answers = run_two_ranks(run_python, tmp_path, TRAIN)
    assert all(answer["attached"] for answer in answers)
    assert answers[0]["weights"] == answers[1]["weights"]
    assert answers[0]["weights"][0] == answers[0]["weights"][1]


# Were the receiving tensor's memory to wait on the GPU for what is being sent, neither rank would ever receive.


@pytest.mark.two_gpus
def test_ranks_that_send_before_they_receive_never_wait_for_each_other(run_python: RunPython, tmp_path: Path) -> None:
    check_exchange(run_two_ranks(run_python, tmp_path, NCCL + EXCHANGE))


def test_ranks_on_one_gpu_that_send_before_they_receive_never_wait_for_each_other(
    run_python: RunPython, tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:  # What lies on a disk cannot be pinned everywhere.
        shared.truncate(2 * 4096 + 2 * (64 << 20))
        check_exchange(run_two_ranks(run_python, tmp_path, MEETING + EXCHANGE, shared.name))
