"""The sampling kernel beside the torch sampler: kept sets, drawn tokens, edges, independence."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from kernels.sampling import SamplingConfig, draw, draw_and_thresholds
from kernels.vocabulary import Parameters, ScanConfig
from plugins.executor.sampler import NO_TOKEN
from tests.kernels.sampling_case import DEVICE, MIXED, NARROW, SMALL, Case, random_logits

INF = float("inf")


@pytest.fixture(autouse=True)
def _overflow_is_infinity():
    """The interpreter computes with numpy, which warns where float32 arithmetic yields -inf or
    NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def drawn(case, config=SMALL, logits=None):
    logits = case.logits if logits is None else logits
    return draw(logits.to(DEVICE), Parameters(**case.columns()), config).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "spread", "config"),
    [(97, 1.0, SMALL), (530, 3.0, SMALL), (290, 1.0, NARROW)],
)
def test_tokens_equal_the_torch_sampler(vocab_size, spread, config):
    case = Case(random_logits(len(MIXED), vocab_size, spread), MIXED)
    assert drawn(case, config) == case.sample()[0].tokens.tolist()


@pytest.mark.parametrize("config", [SMALL, NARROW])
def test_kept_sets_equal_the_torch_filters(config):
    params = (
        SamplingParams(top_k=70),
        SamplingParams(top_k=650, top_p=0.97),
        SamplingParams(top_p=0.02),
        SamplingParams(top_p=0.995),
        SamplingParams(top_k=200, top_p=0.5, temperature=2.0),
        SamplingParams(min_p=0.3, top_p=0.99),
    )
    case = Case(random_logits(len(params), 680, 1.5, seed=3), params)
    columns = case.columns() | {"temperature": torch.from_numpy(case.rows.temperature).to(DEVICE)}
    _, least = draw_and_thresholds(case.logits.to(DEVICE), Parameters(**columns), config)
    kept, expected = case.kept(least)
    assert kept.sum(-1).tolist() == expected.sum(-1).tolist()
    assert torch.equal(kept, expected)
    assert expected.sum(-1)[0] == 70


@pytest.mark.parametrize("value", [-INF, 2.5])
def test_a_sample_unlike_its_row_misleads_no_search(value):
    params = (
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.2),
        SamplingParams(top_k=400, top_p=0.7),
    )
    logits = random_logits(len(params), 680, 1.0, seed=11)
    group = torch.arange(680 // 32)
    logits[:, group * 32 + group % 32] = value  # one token of each group
    case = Case(logits, params)
    _, least = draw_and_thresholds(logits.to(DEVICE), Parameters(**case.columns()), NARROW)
    kept, expected = case.kept(least)
    assert torch.equal(kept, expected)


def test_ties_with_the_threshold_are_kept():
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0]).repeat(3, 40)
    params = (SamplingParams(top_k=60), SamplingParams(top_k=40), SamplingParams(top_p=0.5))
    case = Case(logits, params)
    columns = Parameters(**case.columns())
    _, least = draw_and_thresholds(logits.to(DEVICE), columns, NARROW)
    kept, expected = case.kept(least)
    assert torch.equal(kept, expected)
    assert kept.sum(-1).tolist() == [160, 40, 160]


def test_odd_rows_draw_as_the_torch_sampler():
    vocab_size = 300
    one_hot = torch.full((vocab_size,), -1e30)
    one_hot[123] = 5.0
    half = random_logits(1, vocab_size)[0]
    half[::2] = -INF
    few = torch.full((vocab_size,), -INF)
    few[[7, 250]] = torch.tensor([1.0, 1.5])
    wide = 2 * torch.linspace(-1.5e38, 1.5e38, vocab_size)
    rows = [torch.full((vocab_size,), -INF), torch.zeros(vocab_size), one_hot, half, few, wide]
    params = (SamplingParams(), SamplingParams(top_k=20, top_p=0.9, min_p=0.02))
    case = Case(torch.stack([row for row in rows for _ in params]), params)
    expected = case.sample()[0].tokens.tolist()
    assert expected[:2] == [NO_TOKEN, NO_TOKEN]
    assert min(expected[2:]) >= 0
    assert drawn(case, NARROW) == expected


def test_extreme_parameters_draw_as_the_torch_sampler():
    params = (
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=5e-324, top_k=3),
        SamplingParams(temperature=100.0),
        SamplingParams(temperature=100.0, top_p=0.5),
        SamplingParams(top_p=1e-12, top_k=299),
        SamplingParams(top_k=300, top_p=1.0),
        SamplingParams(top_k=9_999_999),
        SamplingParams(min_p=1.0, temperature=0.7),
        SamplingParams(top_p=1 - 1e-6),
    )
    case = Case(random_logits(len(params), 300, seed=8), params)
    assert drawn(case) == case.sample()[0].tokens.tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of the interpreter
@pytest.mark.parametrize("value", [torch.nan, INF])
def test_a_row_that_is_not_finite_yields_no_token_and_others_theirs(value):
    params = (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=4, top_p=0.9))
    places = [None, 0, 279, slice(100, 200), slice(None)]  # in the second chunk of two: 256 ..
    logits = random_logits(3, 280, seed=2)
    case = Case(torch.cat([logits] * len(places)), params)
    sound = case.sample()[0].tokens.tolist()
    for index, place in enumerate(places[1:], 1):
        case.logits[3 * index : 3 * index + 3, place] = value
    expected = sound[:3] + [NO_TOKEN] * (len(sound) - 3)
    assert drawn(case, NARROW) == case.sample()[0].tokens.tolist() == expected


def test_equal_maxima_yield_the_lowest_token():
    logits = torch.zeros(1, 1000)
    logits[0, [300, 700, 701]] = 1.0
    case = Case(logits, (SamplingParams(temperature=0),))
    assert drawn(case) == [300]


def test_rows_are_independent_of_neighbours_and_strides():
    params = MIXED[1:5]
    logits = random_logits(len(params), 600, seed=5)
    case = Case(logits, params)
    together = drawn(case)
    storage = torch.full((len(params), 777), torch.nan)
    storage[:, :600] = logits
    assert drawn(case, logits=storage[:, :600]) == together
    columns = case.columns()
    for row in (0, 2, 3):
        alone = {name: column[row : row + 1].contiguous() for name, column in columns.items()}
        token = draw(logits[row : row + 1].to(DEVICE), Parameters(**alone), SMALL)
        assert token.tolist() == [together[row]]


@pytest.mark.parametrize(
    ("dtype", "config"), [(torch.float16, SMALL), (torch.bfloat16, NARROW)], ids=("half", "brain")
)
def test_rounded_logits_draw_as_the_same_values_in_float32(dtype, config):
    rounded = random_logits(len(MIXED), 290).to(dtype)
    case = Case(rounded.float(), MIXED)
    given = rounded.to(DEVICE)
    tokens, thresholds = draw_and_thresholds(given, Parameters(**case.columns()), config)
    wanted, least = draw_and_thresholds(
        case.logits.to(DEVICE), Parameters(**case.columns()), config
    )
    assert torch.equal(tokens, wanted)
    assert torch.equal(thresholds, least)
    assert tokens.tolist() == case.sample()[0].tokens.tolist()


def test_no_rows_draw_nothing():
    empty = Parameters(*(torch.empty(0, dtype=torch.int64, device=DEVICE) for _ in range(7)))
    assert draw(torch.empty(0, 64, device=DEVICE), empty).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": torch.zeros(3, dtype=torch.int64)}, r"top_k must be \[2\], got \(3,\)"),
        ({"seed": torch.zeros(2)}, "seed dtype must be int64, got 'float32'"),
        ({"min_p_log": torch.zeros(4, device=DEVICE)[::2]}, "min_p_log strides must be contiguous"),
    ],
)
def test_misfit_parameters_are_refused(change, message):
    columns = Case(torch.zeros(2, 64), MIXED).columns()
    columns |= {name: column.to(DEVICE) for name, column in change.items()}
    with pytest.raises(ValueError, match=message):
        draw(torch.zeros(2, 64, device=DEVICE), Parameters(**columns))


def test_settings_beyond_their_range_are_taken_to_its_end():
    logits = random_logits(3, 300).to(DEVICE)
    columns = Case(logits.cpu(), [SamplingParams(temperature=1.0)] * 3).columns()

    def tokens(**changed):
        changed = {
            name: torch.tensor([value] * 3, device=DEVICE) for name, value in changed.items()
        }
        return draw(logits, Parameters(**columns | changed), SMALL).tolist()

    free, best = tokens(), logits.argmax(1).tolist()
    assert free != best
    for off in (2**32 + 1, 2**31, 301, -(2**32) + 1, -5):
        assert tokens(top_k=off) == free
    assert tokens(top_k=1) == tokens(min_p_log=0.0) == tokens(min_p_log=0.5) == best


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 64, dtype=torch.float64), "logits dtype must be one of torch.float32"),
        (torch.zeros(64, 2).T, "logits strides must be 1 along a row"),
    ],
)
def test_misfit_logits_are_refused(logits, message):
    columns = Parameters(**Case(torch.zeros(2, 64), MIXED).columns())
    with pytest.raises(ValueError, match=message):
        draw(logits.to(DEVICE), columns)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.3), SamplingParams(top_k=30, top_p=0.9), SamplingParams(min_p=0)],
)
def test_many_draws_follow_the_filtered_softmax(params):
    logits, count = random_logits(1, 64, 1.0, seed=4), 50_000
    case = Case(logits.repeat(8, 1), (params,))
    temperature = case.rows.temperature[0]
    counts = torch.zeros(64, dtype=torch.int64)
    one = {name: column[:1].repeat(count) for name, column in case.columns().items()}
    _, least = draw_and_thresholds(case.logits.cuda(), Parameters(**case.columns()))
    for part in range(4):
        one["seed"] = torch.arange(count, device="cuda") * 7919 + part
        counts += (
            draw(logits.cuda().expand(count, 64).contiguous(), Parameters(**one))
            .cpu()
            .bincount(minlength=64)
        )
    scores = (logits[0] - logits.max()) / temperature
    scores[scores < least[0].cpu()] = -INF
    expected = scores.double().softmax(-1) * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5


@pytest.mark.gpu
def test_a_captured_graph_draws_for_new_logits():
    case = Case(random_logits(32, 131_072, seed=6), MIXED)
    columns, logits = Parameters(**case.columns()), case.logits.cuda()
    draw(logits, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(logits, columns)
    for seed in (7, 8):
        logits.copy_(random_logits(32, 131_072, seed=seed))
        graph.replay()
        assert torch.equal(tokens, draw(logits, columns))


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_full_vocabulary_equals_the_torch_sampler(spread):
    case = Case(random_logits(54, 131_072, spread, seed=9), MIXED)
    config = SamplingConfig(scan=ScanConfig())
    assert drawn(case, config) == case.sample()[0].tokens.tolist()


@pytest.mark.gpu
def test_lanes_agree_on_the_target_of_a_search():
    # Rows for which lanes that fuse a product with a sum differ in a bit and wait for each other.
    code = """
import torch
from core.request import SamplingParams
from kernels.sampling import draw
from kernels.vocabulary import Parameters
from tests.kernels.sampling_case import Case

for seed in (722, 1089, 2148, 3435, 4435, 5208):
    logits = torch.randn(1, 131_072, generator=torch.Generator().manual_seed(seed))
    case = Case(logits, (SamplingParams(temperature=0.8, top_p=0.9),))
    tokens = draw(logits.cuda(), Parameters(**case.columns()))
    assert tokens.tolist() == case.sample()[0].tokens.tolist(), seed
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120, check=True)
