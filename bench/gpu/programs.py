"""The six workloads, each a generator that does one step of training or serving and yields the step's result.

Shapes are random with fixed seeds, so every allocator sees the same requests. As in `models.py`, the order of the
random draws and the lifetime of every local name are part of the measurement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.models import GPT, UNet

DEVICE = torch.device("cuda")

Program = Callable[[], Iterator[Tensor]]


def train_gpt(steps: int, rank: int = 0, checkpointed: bool = False, most_tokens: int = 16384) -> Iterator[Tensor]:
    """Train a 12-layer GPT on batches of random length; each batch holds half to all of `most_tokens` tokens."""
    vocabulary = 32000
    shapes = random.Random(0)
    torch.manual_seed(0)
    model = GPT(rank=rank, checkpointed=checkpointed, vocabulary=vocabulary).to(DEVICE)
    if rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".adapter_down", ".adapter_up")))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(steps):
        length = shapes.randint(64, 4096)
        batch = max(1, shapes.randint(most_tokens // 2, most_tokens) // length)
        tokens = torch.randint(0, vocabulary, (batch, length + 1), device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def gpt_varlen() -> Iterator[Tensor]:
    """Full training with a new sequence length in each step."""
    return train_gpt(40)


def lora_checkpoint() -> Iterator[Tensor]:
    """Adapter training with activation checkpointing and large batches."""
    return train_gpt(40, rank=16, checkpointed=True, most_tokens=65536)


def unet_varsize() -> Iterator[Tensor]:
    """Convolutions over images whose size and number change in each step."""
    shapes = random.Random(1)
    torch.manual_seed(0)
    model = UNet().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for _ in range(40):
        height, width, batch = shapes.randint(64, 640), shapes.randint(64, 640), shapes.randint(2, 12)
        images = torch.randn(batch, 3, height, width, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(images).float(), images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def kv_decode() -> Iterator[Tensor]:
    """Decoding with a key-value cache that grows by one token at a time, by concatenation."""
    shapes = random.Random(2)
    layers, heads, width = 24, 16, 128
    for _ in range(6):
        batch = shapes.randint(4, 32)
        length = shapes.randint(100, 3000)
        cache = [
            (
                torch.randn(batch, heads, length, width, device=DEVICE, dtype=torch.bfloat16),
                torch.randn(batch, heads, length, width, device=DEVICE, dtype=torch.bfloat16),
            )
            for _ in range(layers)
        ]
        query = torch.randn(batch, heads, 1, width, device=DEVICE, dtype=torch.bfloat16)
        output = query
        for _ in range(shapes.randint(20, 60)):
            for layer in range(layers):
                keys, values = cache[layer]
                cache[layer] = (torch.cat([keys, query], 2), torch.cat([values, query], 2))
                output = F.scaled_dot_product_attention(query, *cache[layer])
            yield output


def moe() -> Iterator[Tensor]:
    """A mixture of 16 experts, two for each token, so that every expert's batch has another size in each step."""
    torch.manual_seed(3)
    width, count = 1024, 16
    router = nn.Linear(width, count).to(DEVICE)
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()], 1e-3)
    for step in range(40):
        x = torch.randn(8192 + (step * 977) % 8192, width, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            probabilities = router(x).softmax(-1)
            weights, chosen = probabilities.topk(2, -1)
            output = torch.zeros_like(x)
            for expert in range(count):
                rows, slots = (chosen == expert).nonzero(as_tuple=True)
                output.index_add_(0, rows, (experts[expert](x[rows]) * weights[rows, slots, None]).float())
            loss = (output - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def fsdp1_streams() -> Iterator[Tensor]:
    """Sharded layers gathered on a side stream and released with record_stream, as FSDP1 does."""
    torch.manual_seed(4)
    layers, width = 24, 4096
    shards = [torch.randn(width * width // 8, device=DEVICE, dtype=torch.bfloat16) * 0.01 for _ in range(layers)]
    gather_stream = torch.cuda.Stream()
    for step in range(20):
        x = torch.randn(2048 + (step * 331) % 2048, width, device=DEVICE, dtype=torch.bfloat16)
        for layer in range(layers):
            with torch.cuda.stream(gather_stream):
                weight = shards[layer].repeat(8).view(width, width)
            torch.cuda.current_stream().wait_stream(gather_stream)
            x = F.gelu(x @ weight)
            weight.record_stream(torch.cuda.current_stream())
            del weight
        yield x


ALL: dict[str, Program] = {
    program.__name__: program for program in (gpt_varlen, lora_checkpoint, unet_varsize, kv_decode, moe, fsdp1_streams)
}
