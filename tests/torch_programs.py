"""Programs that are attached to the real torch over the simulated driver, each in a process of its own.

`fake_cudart.c` answers what torch asks of CUDA before it calls the hooks. Only tensors need a GPU: memory is obtained
by the two functions of torch's that take a number of bytes and an address.
"""

from __future__ import annotations

import textwrap

from tests.processes import build_library, succeed

SIMULATED = {"RALLOCATOR_SIMULATE": "2x1GiB"}

_BEGIN = """
import torch
import rallocator

rallocator.enable({settings!r})
torch.cuda._initialized = True  # What torch's Python side asks before it asks the allocator.
memory = torch.cuda.memory
allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
release = torch._C._cuda_cudaCachingAllocator_raw_delete
MiB = 1 << 20
"""


def play(code: str, settings: str = "policy:native") -> list[str]:
    """Run a program with rallocator enabled; it must end well and without a word on stderr.

    Arguments:
        code: the program, indented as the test is.
        settings: for `rallocator.enable`.

    Returns:
        The lines that it printed.
    """
    fake = build_library("fake_cudart.c")
    program = _BEGIN.format(settings=settings) + textwrap.dedent(code)
    return succeed(program, environment=SIMULATED, preload=fake).splitlines()
