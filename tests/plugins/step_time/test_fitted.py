"""fitted: what it learns from steps whose time is known."""

import itertools

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import StepEvent, StepTimeQuery
from core.records import StepRecord
from plugins.executor.fake import Fake
from plugins.step_time.fitted import Fitted, non_negative
from tests.engine_harness import Arrival, make_engine, run

TRUE = np.array([4e-3, 2e-5, 3e-5, 1e-8, 2e-10])
LOADS = [
    (1, 1, 500, 500),
    (32, 32, 40_000, 40_000),
    (33, 544, 40_512, 171_000),
    (1, 512, 512, 131_328),
]


def asked(**arguments):
    """A model that someone listens to, so that it learns."""
    return Fitted(**arguments).build_step_time_model(StepTimeQuery(model=None))


def teach(model, num_steps, true=TRUE, noise=0.0, seed=0, late=()):
    """Steps of random loads that take what `true` says; those in `late` a second longer."""
    rng = np.random.default_rng(seed)
    now_s = 0.0
    for step in range(num_steps):
        rows, chunk = int(rng.integers(1, 64)), int(rng.choice([0, 0, 128, 512]))
        context = int(rng.integers(50, 2000, rows).sum())
        loads = (
            rows + (chunk > 0),
            rows + chunk,
            context + chunk,
            context + chunk * (chunk + 1) // 2,
        )
        seconds = float(true @ [1, *loads]) * (1 + noise * rng.standard_normal())
        seconds += step in late
        record = StepRecord(
            step,
            now_s,
            end_s=now_s + seconds,
            num_rows=loads[0],
            decode_tokens=rows,
            prefill_tokens=chunk,
            kv_tokens=loads[2],
            attended=loads[3],
        )
        model.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))
        now_s += seconds
    return model


def errors(model, true=TRUE):
    return [abs(model.seconds(*load) / float(true @ [1, *load]) - 1) for load in LOADS]


def test_prior_answers_before_the_first_step():
    model = Fitted(prior_step_s=0.02, prior_token_s=0.001)
    assert model.seconds(3, 5, 1000, 1000) == pytest.approx(0.02 + 0.005)
    assert model.build_step_time_model(StepTimeQuery(model=lambda: None)) is model


def test_exact_steps_are_learnt_within_a_hundredth():
    assert max(errors(teach(asked(), 64))) < 0.01


def test_first_steps_are_fitted_at_once():
    assert errors(teach(asked(), 1))[1] < 0.7 < errors(asked())[1]
    assert max(errors(teach(asked(), 8))) < 0.2


def test_noise_and_late_steps_move_it_little():
    model = teach(asked(), 640, noise=0.05, late=(0, 5, 50, 400))
    assert max(errors(model)) < 0.05


def test_it_follows_a_machine_that_becomes_slower():
    model = asked(memory_steps=100)
    teach(model, 400)
    teach(model, 400, true=2 * TRUE, seed=1)
    assert max(errors(model, 2 * TRUE)) < 0.05


def test_coefficients_are_never_negative_and_arrays_broadcast():
    model = teach(asked(), 50, noise=0.5)
    assert min(model.coefficients) >= 0
    tokens = np.array([1, 10, 100])
    many = model.seconds(1, tokens, 100, tokens[:, None])
    assert many.shape == (3, 3)
    assert many[2, 1] == pytest.approx(model.seconds(1, 10, 100, 100))
    assert (np.diff(many) >= 0).all()


def test_overlapped_steps_count_from_the_end_of_the_one_before():
    model = asked()
    for step in range(32):  # each lasts 2 ms and starts to be planned while the one before runs
        record = StepRecord(step, 0.002 * step - 0.001, end_s=0.002 * step + 0.002)
        record.num_rows = record.decode_tokens = 1
        model.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))
    assert model.seconds(1, 1, 0, 0) == pytest.approx(0.002, rel=0.05)


def test_steps_that_went_in_one_are_taken_by_their_mean():
    """Eight steps of 4 rows: a context of 400 that grows by 4 a step."""
    model, now_s = asked(), 0.0
    true = np.array([0.004, 0.0, 0.0, 1e-5, 0.0])
    for number in range(64):
        context = 400 + 100 * (number % 7)
        kv_tokens = 8 * context + 4 * 28
        seconds = 8 * true[0] + kv_tokens * true[3]
        record = StepRecord(8 * number, now_s, end_s=now_s + seconds, steps=8, num_rows=4)
        record.decode_tokens, record.kv_tokens, record.attended = 32, kv_tokens, kv_tokens
        now_s += seconds
        model.on_step(StepEvent(record, (), (), np.empty(0, np.int32)))
    assert model.seconds(4, 4, 400, 400) == pytest.approx(0.008, rel=0.01)
    assert model.seconds(4, 4, 1000, 1000) == pytest.approx(0.014, rel=0.01)


def test_steps_that_compute_nothing_teach_nothing():
    model = asked()
    model.on_step(StepEvent(StepRecord(0, 0.0, end_s=5.0), (), (), np.empty(0, np.int32)))
    assert model.num_steps == 0


def test_nothing_is_learnt_where_another_plugin_says_how_long_steps_take():
    assert teach(Fitted(), 64).num_steps == 0


def test_non_negative_is_the_best_of_a_fine_search():
    rng = np.random.default_rng(3)
    for _ in range(20):
        root = rng.standard_normal((5, 5))
        gram, moment = root @ root.T + 0.1 * np.eye(5), rng.standard_normal(5)

        def cost(x, gram=gram, moment=moment):
            return 0.5 * x @ gram @ x - moment @ x

        found = non_negative(gram, moment)
        assert (found >= 0).all()
        slope = gram @ found - moment  # 0 where x > 0, else >= 0: the conditions of an optimum
        assert np.allclose(slope[found > 0], 0, atol=1e-9)
        assert (slope >= -1e-9).all()
        for step in itertools.product((-0.01, 0.0, 0.01), repeat=5):
            assert cost(np.maximum(found + step, 0)) >= cost(found) - 1e-12


@pytest.mark.parametrize("overlap", [False, True])
def test_it_learns_the_simulated_device_in_an_engine(overlap):
    model = Fitted()
    executor = Fake(vocab_size=1000, step_s=0.004, token_s=0.00002)
    engine = make_engine(pages=100, overlap=overlap, step_time=model, executor=executor)
    run(engine, [Arrival(3 * i, f"r{i}", 20 + 7 * i, 20) for i in range(12)])
    assert model.num_steps > 30
    for rows, tokens in ((1, 1), (8, 8), (4, 60)):
        truth = 0.004 + 0.00002 * tokens
        assert model.seconds(rows, tokens, 50 * rows, 50 * tokens) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("prior_step_s", 0.0, "> 0"),
        ("prior_token_s", -1.0, ">= 0"),
        ("pull", 0.0, "> 0"),
        ("memory_steps", 0, ">= 1"),
        ("refit_every", 0, ">= 1"),
    ],
)
def test_bad_settings_are_refused(field, value, rule):
    with pytest.raises(ConfigError, match=rf"step_time\.{field} must be {rule}, got {value}"):
        Fitted(**{field: value})
