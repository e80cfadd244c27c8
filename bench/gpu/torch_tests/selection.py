"""Which of torch's tests are about memory: a rule over files, classes and names, not a list of what passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Tests of one file."""

    file: str
    """Relative to torch's folder `test`."""
    classes: str = ".*"
    """A pattern for the whole name of the class."""
    tests: str = ".*"
    """A pattern that is searched for in the name of the test, without `test_`."""
    but_not: str = r"(?!)"
    """The same, for those that are left out."""

    def holds(self, class_name: str, test_name: str) -> bool:
        """Whether a test is among them."""
        name = test_name.removeprefix("test_")
        return bool(
            re.fullmatch(self.classes, class_name) and re.search(self.tests, name) and not re.search(self.but_not, name)
        )


# Whatever allocates, frees, orders memory by streams and events, pins or captures.
_MEMORY = (
    "mem|alloc|oom|pinned|stream|event|graph|workspace|cudart|context|thread|blocking|caching|check_error|leak|lazy_init"
    "|ipc|storage|copy|synchronize|external|serialization"
)

PARTS: Sequence[Part] = (
    # Not optimisers, autocast, files read by the GPU, and compiled kernels, which torch tests in the same file.
    # What optimisers do inside a graph is theirs too, and random numbers in one are the generator's.
    Part("test_cuda.py", "TestCuda", _MEMORY, "optim|grad_scal|rng_(functional|distributions)|manual_seed"),
    # Not what asks NVML about temperature, power and clocks.
    Part("test_cuda.py", "TestCudaAllocator", but_not="temperature|power|clock|nvml|uuid|raw_amdsmi"),
    Part("test_cuda.py", "TestBlockStateAbsorption|TestCachingHostAllocatorCudaGraph|TestMemPool"),
    Part("test_cuda.py", "TestCudaDeviceParametrized.*|TestFXMemoryProfiler|TestCudaGreenContexts.*"),
    Part("test_cuda_multigpu.py", "TestCudaMultiGPU", _MEMORY, "grad_scal|nonexistent"),
    Part("test_cuda_trace.py"),
    Part("test_cuda_primary_ctx.py"),
    Part("test_accelerator.py"),
    Part("test_multiprocessing.py", "TestMultiprocessing", "cuda|event"),
    # Graph trees. Not how the compiler cuts a program into graphs and whether it may, which are most of that file.
    Part(
        "inductor/test_cudagraph_trees.py",
        "CudaGraphTreeTests|TestSAC",
        but_not="graph_partition|annotation|capture_sizes|dispatch|incompatible|skip_|_msg$|dynamic_shape|multi_device",
    ),
    Part("dynamo/test_cudagraphs.py"),
)

FILES = tuple(dict.fromkeys(part.file for part in PARTS))


def is_selected(file: str, class_name: str, test_name: str) -> bool:
    """Whether a test is to be run."""
    return any(part.file == file and part.holds(class_name, test_name) for part in PARTS)
