"""A small transformer that predicts the next byte, in five sizes."""

import functools
import math

import torch
from text import CONTEXT
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

SIZES = {  # width, layers, heads, by parameters in millions
    "0.05": (40, 2, 2),
    "0.1": (56, 2, 2),
    "0.2": (72, 3, 3),
    "0.4": (88, 4, 4),
    "1": (128, 5, 4),
}
TOKENS = 20  # of a training, for each parameter
OF_BYTES = "embedding.weight", "positions.weight"  # no matrices of a map from inputs to outputs: not for Muon


class Layer(nn.Module):
    """Attention to earlier bytes, then a network of one hidden layer; each adds to what it is given."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_hidden = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.join = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        parts = self.attend(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.before_hidden(x))))


class Transformer(nn.Module):
    """Bytes ``(n, CONTEXT)`` to the logits of the bytes that follow each, ``(n, CONTEXT, 256)``."""

    def __init__(self, size, seed):
        super().__init__()
        width, layers, heads = SIZES[size]
        dice = torch.Generator().manual_seed(seed)
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = math.sqrt(2 * layers) if name.endswith(("join.weight", "down.weight")) else 1
                std = 0.02 if name in OF_BYTES else 1 / math.sqrt(p.shape[1]) / deep
                nn.init.normal_(p, std=std, generator=dice)

    def forward(self, x):
        h = self.embedding(x) + self.positions.weight
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.embedding.weight.T

    def loss(self, windows):
        """The mean loss, in nats a byte, of windows ``(n, CONTEXT + 1)`` of bytes."""
        x = torch.from_numpy(windows.astype("int64"))
        return cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@functools.cache
def parameters(size):
    """How many a model of this size has."""
    return sum(p.numel() for p in Transformer(size, 0).parameters())
