"""Noise made in kernels: the torch sampler's words to the bit, its floats to the last digits."""

import torch

from kernels.philox import noise_rows
from plugins.executor.philox import gumbel_rows, philox

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORD = 0xFFFFFFFF


def columns():
    seeds = torch.tensor([5, -5, 2**62 + 5, -(2**63), 0])
    positions = torch.tensor([0, 3, 1, 2**31 - 1, 7])
    choices = torch.tensor([0, 1, 0, 2, 0])
    return seeds, positions, choices


def test_words_equal_the_torch_sampler_bit_for_bit():
    seeds, positions, choices = columns()
    blocks = torch.arange(300)
    counter = (blocks, positions[:, None], choices[:, None], torch.zeros(1, dtype=torch.int64))
    key = (seeds[:, None] & WORD, (seeds[:, None] >> 32) & WORD)
    expected = torch.stack(philox(counter, key), -1).flatten(1)[:, :1199]
    words, _ = noise_rows(*(column.to(DEVICE) for column in columns()), 1199)
    assert torch.equal(words.cpu(), expected)


def test_noise_equals_the_torch_sampler_within_rounding():
    _, noise = noise_rows(*(column.to(DEVICE) for column in columns()), 6001)
    expected = gumbel_rows(*columns(), 6001)
    assert (noise.cpu() - expected).abs().max() < 4e-6


def test_noise_picks_tokens_by_their_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -3.0, 0.0])
    seeds = torch.arange(2000, device=DEVICE) * 7919
    zeros = torch.zeros_like(seeds)
    rows = 3 if DEVICE.type == "cpu" else len(seeds)
    # One row of 8000 tokens serves as 1000 independent draws of 8.
    noise = noise_rows(seeds[:rows], zeros[:rows], zeros[:rows], 8000)[1].view(-1, 8).cpu()
    counts = (logits + noise).argmax(-1).bincount(minlength=8).double()
    expected = logits.double().softmax(-1) * len(noise)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom, p = 0.001
