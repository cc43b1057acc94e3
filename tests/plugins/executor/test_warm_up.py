"""What start-up computes before the first request, and the watch over what is compiled after it."""

from types import SimpleNamespace

import pytest

from core.launch import PoolLayout
from plugins.executor.torch_runner import TorchRunner
from plugins.executor.warm_up import SAMPLED, row_counts, warm_up_launches
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query


def parts_of(launch):
    return list(zip(launch.first_positions.tolist(), launch.num_tokens.tolist(), strict=True))


def test_start_up_touches_the_reserved_page_alone_and_changes_no_answer():
    model = ToyModel()
    core = Driver(TorchRunner().build_executor(executor_query(model)))
    launches = list(warm_up_launches(core.layout, model.max_model_len))
    for launch in launches:
        core.executor.launch(launch)
        assert len(core.executor.collect().tokens) == len(launch.row_ids)
    kv = core.executor._state.forward.pool.kv
    assert kv[:, :, 0].any()
    assert not kv[:, :, 1:].any()
    for row in range(len(SAMPLED)):
        prompt = [row + 1, row + 2, row + 3]
        core.start(row, prompt)
        assert core.run(row, 4) == model.greedy(prompt, 4)


@pytest.mark.parametrize("pages", [1, 3, 64])
@pytest.mark.parametrize("rows", [1, 2, 8, 300])
@pytest.mark.parametrize("budget", [1, 2, 100, 600, 2048])
def test_launches_of_start_up_fit_the_limits(pages, rows, budget):
    layout = PoolLayout(pages + 1, 16, rows, pages, budget)
    launches = list(warm_up_launches(layout, 1000))
    for launch in launches:
        counts = launch.num_tokens
        assert len(counts) <= rows
        assert counts.min() > 0
        assert counts.sum() == len(launch.token_ids) <= budget
        assert (launch.first_positions + counts).max() <= min(1000, pages * 16)
        ones = launch.num_decode_rows
        assert (counts[:ones] == 1).all()
        assert (counts[ones:] > 1).all()
    assert max(len(launch.row_ids) for launch in launches) == min(rows, budget)


def test_start_up_meets_short_long_deep_and_mixed_chunks_and_every_sampler():
    launches = list(warm_up_launches(PoolLayout(257, 16, 64, 256, 2048), 4096))
    met = [parts_of(launch) for launch in launches]
    for wanted in (
        [(0, 1)],
        [(0, 32)],
        [(0, 512)],
        [(512, 512)],
        [(1024, 32)],
        [(0, 1), (0, 32)],
        [(0, 2048)],
        [(512, 1536)],
        *([(0, 1)] * rows for rows in (2, 3, 17, 33, 64)),
    ):
        assert wanted in met
    totals = [int(launch.num_tokens.sum()) for launch in launches if launch.num_tokens.max() < 512]
    assert {128, 1024} <= set(totals)
    asked = [setup.params for launch in launches for setup in launch.setups]
    assert asked == list(SAMPLED)


def test_start_up_of_a_device_that_compiles_nothing_is_one_token():
    (launch,) = warm_up_launches(PoolLayout(65, 16, 8, 64, 2048), 1024, compiles=False)
    assert parts_of(launch) == [(0, 1)]


def test_row_counts_lie_on_both_sides_of_powers_of_two():
    assert row_counts(1) == [1]
    assert row_counts(6) == [1, 2, 3, 4, 5, 6]
    assert row_counts(40) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 40]


def test_watch_lists_what_is_compiled_until_it_is_closed(caplog, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    from plugins.executor.compile_watch import CompileWatch

    def compiles(name, cache_hit=False):
        facts = {"metadata": {}, "metadata_group": {}}
        times = SimpleNamespace(total=1_500_000)
        listener(src=SimpleNamespace(name=name), times=times, cache_hit=cache_hit, **facts)

    monkeypatch.setattr(knobs.compilation, "listener", None)
    outer, inner = CompileWatch(), CompileWatch()
    listener = knobs.compilation.listener
    assert listener is inner
    compiles("one")
    compiles("cached", cache_hit=True)
    outer.close()
    compiles("two")
    inner.close()
    compiles("three")
    assert [one.kernel for one in outer.compiled] == ["one"]
    assert [(one.kernel, one.seconds) for one in inner.compiled] == [("one", 1.5), ("two", 1.5)]
    assert "kernel two was compiled while requests waited (1.5 s)" in caplog.text
    assert knobs.compilation.listener is not inner
