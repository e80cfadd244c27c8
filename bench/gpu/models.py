"""The models that the workloads train: a GPT with optional low-rank adapters, and a small U-Net.

Two things here are part of the measurement and must not change. Parameters are created in a fixed order, because each
draws from the seeded generator. Local names are rebound where they are, because a name keeps its tensor alive, and what
is alive decides the peak.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):  # type: ignore[misc]
    """One transformer layer: causal attention, then a feed-forward part, each behind a layer norm.

    `rank` above zero adds a low-rank adapter to the attention's input projection.
    """

    def __init__(self, width: int, heads: int, rank: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_up = nn.Linear(width, 4 * width)
        self.feed_down = nn.Linear(4 * width, width)
        self.rank = rank
        if rank:
            self.adapter_down = nn.Parameter(torch.randn(rank, width) * 0.01)
            self.adapter_up = nn.Parameter(torch.zeros(3 * width, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        y = self.attention_norm(x)
        q = self.attention_in(y)
        if self.rank:
            q = q + F.linear(F.linear(y, self.adapter_down), self.adapter_up)
        q, k, v = q.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.attention_out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        )
        feed: Tensor = self.feed_down(F.gelu(self.feed_up(self.feed_norm(x))))
        return x + feed


class GPT(nn.Module):  # type: ignore[misc]
    """A decoder over integer tokens. `checkpointed` recomputes each layer's activations in the backward pass."""

    def __init__(
        self,
        width: int = 1024,
        layers: int = 12,
        heads: int = 16,
        vocabulary: int = 32000,
        rank: int = 0,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, rank) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):  # type: ignore[misc]
    """An image-to-image network that halves the image three times and joins each level again on the way up."""

    def __init__(self, channels: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            _double_convolution(3 if level == 0 else widths[level - 1], widths[level]) for level in range(levels)
        )
        self.up = nn.ModuleList(
            _double_convolution(widths[level] + widths[level - 1], widths[level - 1])
            for level in range(levels - 1, 0, -1)
        )
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, height, width) to the same shape."""
        kept = []
        for level, down in enumerate(self.down):
            x = down(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2) if level < len(self.down) - 1 else x
        kept.pop()
        for up in self.up:
            y = kept.pop()
            x = up(torch.cat([F.interpolate(x, y.shape[-2:]), y], 1))
        image: Tensor = self.out(x)
        return image
