"""What attention planned, in the step records."""

import pytest

from core.errors import ConfigError
from kernels.extend_dense import extend as dense_extend
from kernels.jit import INTERPRETED
from kernels.split_kv import SplitKV
from kernels.torch_reference import paged_extend
from plugins.executor.torch_runner import TorchRunner
from tests.plugins.executor.graph_run import device_decode, make
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.test_graphs import WideModel


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on a CPU")
@pytest.mark.parametrize("extend", [paged_extend, dense_extend])
def test_results_tell_what_was_planned(extend):
    executor = make(
        WideModel(), decode=SplitKV(splits=2), extend=extend, graphs="auto", record_plan=True
    )
    core = Driver(executor, 16, num_rows=3, num_tokens=2048)
    for row, length in enumerate((100, 40)):
        core.start(row, [3] * length)
    core.step((0, 100), (1, 40))
    core.step((0, 1), (1, 1))
    chunks, ones = (result.attention for result in core.results)
    name = f"{extend.__module__}.{extend.__qualname__}"
    assert chunks["extend"]["kernel"] == name
    assert "decode" not in chunks
    plan = ones["decode"]["plan"]["None"]
    assert (plan["num_items"], plan["splits"]) == (4, [2, 2])
    assert plan["split_tokens"][0] > plan["split_tokens"][1] > 0
    if extend is dense_extend:
        assert chunks["extend"]["plan"] == {"long_rows": 0, "forms": [], "gathered": 0}
    facts = executor.describe()["graphs"]
    assert facts == {"sizes": [], "why_not": "executor.record_plan reads every launch's plan"}


def test_graphs_and_plans_exclude_each_other():
    with pytest.raises(ConfigError, match=r"executor.graphs must be auto or off where executor"):
        Driver(make(WideModel(), decode=device_decode, graphs="on", record_plan=True))


def test_without_it_nothing_is_read():
    core = Driver(make(WideModel(), decode=device_decode))
    core.start(0, [1, 2])
    core.step((0, 2))
    assert core.results[0].attention == {}
    assert TorchRunner()._record_plan is False
