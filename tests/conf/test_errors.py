"""Every mistake on the command line gives one message, exit code 1 and no traceback."""

from pathlib import Path

import pytest

from conf.device import resolve_device
from conf.instantiate import build
from core.errors import ConfigError

# Told before Hydra starts.
NAMES = [
    (["+egine.pool_tokens=4"], ["egine is no key", "did you mean engine?"]),
    (["+policy=foo"], ["policy", "'foo'", "evict_shortest", "last_admitted"]),
    (["+policy=evict_shortes"], ["did you mean evict_shortest"]),
    (["+policy=FCFS"], ["'FCFS'", "did you mean fcfs?"]),
    (["+policy=[fcfs,foo]"], ["'foo'"]),
    (["policy=fcfs"], ["use +policy=fcfs"]),
    (["+polcy=fcfs"], ["polcy is no key", "did you mean policy?"]),
    (["allocator=pagd"], ["did you mean paged?"]),
    (["+allocator=paged"], ["use allocator=paged without +"]),
    (["+experiment=victms"], ["did you mean victims?"]),
    (["+kernel=[torch_reference,torch_reference]"], ["kernel must be one name"]),
    (["+router=[round_robin,lmetric]"], ["router must be one name, got [round_robin,lmetric]"]),
    (["+router=round_robbin"], ["'round_robbin'", "did you mean round_robin?"]),
    (["hydra.searchpath=[file:///tmp]"], ["plugin_path=DIR"]),
    (["plugin_path=nowhere"], ["plugin_path must be an existing folder, got 'nowhere'"]),
    (["plugin_path=a,b"], ["plugin_path must be one folder"]),
]
# Told while the config is composed, or by the checks that follow.
MISTAKES = [
    (["engine.max_runing=4"], ["engine.max_runing is no key", "engine.max_num_seqs"]),
    (["+engine.pool_token=4"], ["did you mean engine.pool_tokens?"]),
    (["allocator.page_sise=4"], ["did you mean allocator.page_size?"]),
    (["+allocator.page_sise=4"], ["did you mean allocator.page_size?"]),
    (["polcy=fcfs"], ["polcy is no key", "did you mean policy?"]),
    (["seed=abc"], ["seed must be an integer", "'abc'"]),
    (["seed=null"], ["seed must not be null"]),
    (["engine.pool_tokens=1.5"], ["engine.pool_tokens must be an integer or text", "'1.5'"]),
    (["engine.pool_tokens=all"], ["engine.pool_tokens must be >= 1 or auto, got 'all'"]),
    (["engine.strict=perhaps"], ["engine.strict must be true or false", "'perhaps'"]),
    (["records=ful"], ["records must be one of full, requests, summary", "'ful'"]),
    (["device=gpu"], ["device must be auto, cpu, cuda or cuda:N", "'gpu'"]),
    (["allocator.page_size=big"], ["allocator.page_size must be int", "'big'"]),
    (["workload=file"], ["workload.path must be given", "workload.path=..."]),
    (["mode=explain"], ["run, request must be given", "run=... request=..."]),
    (["+plugins.mine._target_=outside.Min"], ["plugins.mine._target_ must name a class", "Min"]),
    (["replicas=0"], ["replicas must be >= 1, got 0"]),
    (["replicas=2"], ["replicas must be 1 in this mode, got 2"]),
    (["router.snapshot_interval_s=0"], ["router.snapshot_interval_s must be > 0, got 0"]),
    (["router.snapshot_intervals=1"], ["did you mean router.snapshot_interval_s"]),
    (["+policy=mine", "+plugins.mine.weigh=3"], ["did you mean plugins.mine.weight?"]),
    (["+policy=[mine,evict_shortest]"], ["decide_preemption", "mine", "evict_shortest"]),
]
PAGED = "plugins.allocator.paged.Paged"
PROMPTS = "plugins.workload.prompts.Prompts"
NODES = [
    ({"page_size": 16}, "x must have a _target_"),
    ("paged", "x must have a _target_"),
    ({"_target_": "nowhere.Mine"}, "x._target_ must name a class, got 'nowhere.Mine'"),
    ({"_target_": "json.dumps"}, "x._target_ must name a class, got 'json.dumps', a function"),
    ({"_target_": PAGED, "page_size": 3}, "allocator.page_size must be a power of two, got 3"),
    ({"_target_": PAGED, "page_size": 1.5}, "x.page_size must be int, got 1.5"),
    ({"_target_": PAGED, "page_size": None}, "x.page_size must be int, got None"),
    ({"_target_": PAGED, "page": 1}, "x.page is no key of the config; did you mean x.page_size?"),
    ({"_target_": PROMPTS, "num_requests": 0}, "workload.num_requests must be >= 1, got 0"),
    ({"_target_": "plugins.workload.file.File"}, "x.path must be given"),
]


@pytest.mark.parametrize(("arguments", "fragments"), NAMES, ids=lambda value: str(value)[:60])
def test_wrong_name_is_refused_before_anything_runs(command, tmp_path, arguments, fragments):
    outcome = command(*arguments)
    assert (outcome.code, outcome.out) == (1, "")
    for fragment in fragments:
        assert fragment in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "fragments"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistake_gives_one_message(probe, arguments, fragments):
    outcome = probe(*arguments)
    assert (outcome.code, outcome.out) == (1, "")
    message = outcome.err.splitlines()[-1]
    for fragment in fragments:
        assert fragment in message
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(("node", "message"), NODES, ids=lambda value: str(value)[:60])
def test_node_that_builds_nothing_is_refused(node, message):
    with pytest.raises(ConfigError) as caught:
        build("x", node)
    assert str(caught.value).startswith(message)


def test_user_file_that_ours_would_hide_is_refused(probe, plugin_folder: Path):
    (plugin_folder / "conf" / "policy" / "fcfs.yaml").write_text("{}")
    outcome = probe()
    assert outcome.code == 1
    assert "must have a name that Tritium's conf/ does not use already" in outcome.err


def test_bad_name_in_a_sweep_starts_nothing(probe, tmp_path: Path):
    outcome = probe("-m", "+policy=evict_shortest,foo")
    assert outcome.code == 1
    assert "'foo'" in outcome.err
    assert not (tmp_path / "outputs").exists()


def test_plugin_fault_keeps_its_traceback_and_exits_with_it(probe):
    with pytest.raises(ZeroDivisionError, match="told to fail"):
        probe("mode.fails_on_seed=0")


def test_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"device must be cpu or one of \d+ CUDA devices"):
        resolve_device("cuda:99")
