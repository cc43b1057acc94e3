"""The random numbers: published vectors, and the noise made of them."""

import pytest
import torch

from plugins.executor.philox import gumbel, gumbel_at, gumbel_rows, philox

# Counter, key and result of philox4x32-10, from the known-answer file of the authors' Random123.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(case):
    counter, key, expected = ([int(word, 16) for word in text.split()] for text in case)
    words = philox(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert [int(word) for word in words] == expected


def test_gumbel_is_finite_at_both_ends():
    noise = gumbel(torch.tensor([0, 1, 2**32 - 2, 2**32 - 1]))
    assert noise.isfinite().all()
    assert noise[0] > noise[1] > 20  # neighbours at the winning end differ
    assert -3 < noise[3] <= noise[2] < -2


def test_gumbel_has_the_moments_of_its_distribution():
    noise = gumbel_rows(torch.tensor([7]), torch.tensor([0]), torch.tensor([0]), 200_000)
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - 1.64493) < 0.03


def test_noise_depends_on_seed_position_choice_and_token_alone():
    seeds = torch.tensor([5, -5, 2**62 + 5, 5, 5, 5])
    positions = torch.tensor([0, 0, 0, 1, 0, 0])
    choices = torch.tensor([0, 0, 0, 0, 1, 0])
    noise = gumbel_rows(seeds, positions, choices, 1003)
    assert noise.shape == (6, 1003)
    assert torch.equal(noise[0], noise[5])
    for row in range(1, 5):
        assert (noise[0] == noise[row]).sum() < 5
    alone = gumbel_rows(seeds[2:3], positions[2:3], choices[2:3], 517)
    assert torch.equal(alone[0], noise[2, :517])
    tokens = torch.tensor([0, 1, 2, 3, 4, 700, 1002])
    single = gumbel_at(*(column[1].expand(7) for column in (seeds, positions, choices)), tokens)
    assert torch.equal(single, noise[1, tokens])
