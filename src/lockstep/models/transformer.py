"""A small transformer over tokens, as one chain of layers.

    tokens (N, T) -> embed -> blocks.0 -> blocks.1 -> ... -> norm -> (pool) -> head -> logits

Every place that draws dropout is a child of a Sequential, so its randomness can be keyed and the chain can be
cut anywhere.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError


class TokenEmbedding(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, vocabulary_size: int, width: int, max_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(max_length, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token numbers (N, T), T at most ``max_length``, to (N, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(positions)
        return embedded


class SelfAttention(nn.Module):
    """Multi-head self-attention, causal or not."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, T, width) to (N, T, width)."""
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with its LayerNorm before, dropout after, and a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), SelfAttention(width, heads, causal=causal), nn.Dropout(dropout)
        )
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, T, width) to (N, T, width)."""
        x = x + self.attention(x)
        result: Tensor = x + self.perceptron(x)
        return result


class MeanOverTime(nn.Module):
    """The mean over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, T, width) to (N, width)."""
        return x.mean(1)


def transformer(
    *,
    vocabulary_size: int,
    max_length: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.1,
    tied: bool = False,
    num_classes: int | None = None,
) -> nn.Sequential:
    """A decoder that predicts the next token, or an encoder that classifies sequences.

    Args:
        vocabulary_size: number of different tokens.
        max_length: longest sequence.
        width: size of a token's representation, a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads per block.
        dropout: share of each branch's output left out in training.
        tied: the output layer of the decoder uses the weight of the token embedding.
        num_classes: None for the decoder, with logits (N, T, vocabulary_size); otherwise the encoder, whose
            attention sees both sides, with logits (N, num_classes).
    """
    if width % heads:
        raise ConfigError(f"width={width} cannot be split over heads={heads}. Choose a multiple of {heads}.")
    if tied and num_classes is not None:
        raise ConfigError("tied=true needs an output over the vocabulary, and num_classes asks for another. Use one.")
    embedding = TokenEmbedding(vocabulary_size, width, max_length)
    blocks = [Block(width, heads, dropout, causal=num_classes is None) for _ in range(depth)]
    head = nn.Linear(width, num_classes or vocabulary_size, bias=num_classes is not None)
    if tied:
        head.weight = embedding.token.weight
    layers: list[tuple[str, nn.Module]] = [
        ("embed", nn.Sequential(OrderedDict(table=embedding, dropout=nn.Dropout(dropout)))),
        ("blocks", nn.Sequential(*blocks)),
        ("norm", nn.LayerNorm(width)),
    ]
    if num_classes is not None:
        layers.append(("pool", MeanOverTime()))
    return nn.Sequential(OrderedDict([*layers, ("head", head)]))
