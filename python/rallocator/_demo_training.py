"""A short training on the GPU, for `rallocator demo`: one process per allocator, and one line of JSON at the end.

A small language model on sequences of changing length, in mixed precision: what fragments a caching allocator. It takes
up to about 5 GiB and some seconds on a recent card. Run as `python -m rallocator._demo_training torch` or `rallocator`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

STEPS = 30
TOKENS = 8192
"""Tokens of the largest batch."""
LENGTHS = (64, 2048)
"""Shortest and longest sequence of a batch."""
WIDTH, LAYERS, HEADS, VOCABULARY = 512, 8, 8, 16_000


def _model(width: int, layers: int, vocabulary: int) -> nn.Module:
    from torch import nn

    block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), encoder, nn.LayerNorm(width), nn.Linear(width, vocabulary))


def train(device: str, steps: int = STEPS, tokens: int = TOKENS, width: int = WIDTH, layers: int = LAYERS) -> float:
    """Train on random text, the same for every allocator, and return the last loss."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    lengths = random.Random(0)  # noqa: S311 — the same lengths for every allocator are what is wanted.
    model = _model(width, layers, VOCABULARY).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss: Tensor = torch.zeros(())
    for _ in range(steps):
        length = lengths.randint(LENGTHS[0], min(LENGTHS[1], tokens))
        batch = max(1, lengths.randint(tokens // 2, tokens) // length)
        text = torch.randint(0, VOCABULARY, (batch, length + 1), device=device)
        with torch.autocast(device, torch.bfloat16):
            scores = model(text[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def _peaks(allocator: str) -> dict[str, int]:
    import torch

    import rallocator

    stats = rallocator.stats(0) if allocator == "rallocator" else torch.cuda.memory_stats(0)
    return {
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
    }


def main() -> None:
    """Train under the allocator that the first argument names and print the figures."""
    allocator = sys.argv[1]
    import torch

    import rallocator

    if allocator == "rallocator":
        rallocator.enable()
    train("cuda", steps=2)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = train("cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    figures = {"seconds": round(seconds, 3), "loss": round(loss, 4), **_peaks(allocator)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
