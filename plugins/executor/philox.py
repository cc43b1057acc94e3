"""Counter-based random numbers: Philox4x32-10 in torch integer operations.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same
words on every device, and each a pure function of its key and counter, so that a draw depends on
nothing but who asks for it: here key = the request's seed, counter = (vocabulary index // 4, output
position, choice, draw), and vocabulary index % 4 picks one of the four words."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
CPU_CHUNK = 1 << 15
"""Counters worked on at a time on a CPU: few enough to stay in a core's cache through all
rounds."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Four 32-bit words for each counter and key. All int64 with values below 2^32, broadcast
    together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return [c0, c1, c2, c3]


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise float32, finite, of 32-bit words in int64.

    -log(e) of e = -log(1 - u), u = (word + 1/2) / 2^32. Small e win, and near u = 0 float32 still
    tells all 2^32 words apart; at the other end u is kept below 1."""
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def gumbel_rows(seeds: Tensor, positions: Tensor, choices: Tensor, vocab_size: int) -> Tensor:
    """Noise for every token of the vocabulary: float32 [rows, vocab_size]. seeds, positions,
    choices: int64 [rows]. It belongs to draw 0 of an output position."""
    num_blocks = -(-vocab_size // 4)
    rows = len(seeds) if seeds.is_cuda else max(1, CPU_CHUNK // num_blocks)
    out = torch.empty(len(seeds), vocab_size, device=seeds.device)
    blocks = torch.arange(num_blocks, device=seeds.device)
    zero = torch.zeros_like(blocks[:1])
    for begin in range(0, len(seeds), rows):
        part = slice(begin, begin + rows)
        counter = (blocks, positions[part].unsqueeze(1), choices[part].unsqueeze(1), zero)
        words = torch.stack(philox(counter, _key(seeds[part].unsqueeze(1))), dim=-1)
        out[part] = gumbel(words.flatten(1))[:, :vocab_size]
    return out


def gumbel_at(seeds: Tensor, positions: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
    """The entries of `gumbel_rows` for single tokens: float32 [n], all arguments int64 [n]."""
    words = philox((tokens // 4, positions, choices, torch.zeros_like(tokens)), _key(seeds))
    chosen = torch.stack(words, dim=-1).gather(1, (tokens % 4).unsqueeze(1)).squeeze(1)
    return gumbel(chosen)


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    # The product wraps into the sign bit; masking after the shift makes its upper word right.
    product = value * factor
    return (product >> 32) & WORD, product & WORD


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & WORD, (seeds >> 32) & WORD
