"""Ranks in processes of their own: started, told why they end, and never left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from core.build import build_engine
from core.errors import ConfigError, EngineStoppedError, LaunchError
from core.hooks import Hooks
from core.request import Request, SamplingParams
from kernels.torch_reference import paged_extend
from plugins.attention.paged import PagedAttention
from plugins.executor.parallel_pickle import packed
from plugins.executor.parallel_rank import RankSetup, serve
from plugins.executor.parallel_ranks import RankError, Ranks
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.shared.clocks import RealClock
from tests.patience import SOON_S
from tests.plugins.executor.rank_threads import executor_query, hooks, load, settings
from tests.tiny_models import save_tiny

ROOT = Path(__file__).resolve().parents[3]
DIES = """
import os, signal, sys
from plugins.executor.torch_runner import TorchRunner
from tests.plugins.executor.rank_threads import executor_query, load
model = load(sys.argv[1], 2)
executor = TorchRunner(tensor_parallel=2).build_executor(executor_query(model))
print(executor._ranks._processes[0].pid, executor._ranks.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def submit(engine, name, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=3, ignore_eos=True)
    engine.submit(Request(name, np.arange(3, 40, dtype=np.int32), params))


def finished(engine):
    while engine.has_work:
        engine.step()
    return list(engine.records["a"].choices[0].token_ids)


def ended(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_a_killed_rank_ends_the_engine_with_a_word(tmp_path):
    save_tiny("qwen3", tmp_path)
    one = build_engine(
        hooks(HuggingFaceModel(path=str(tmp_path)), TorchRunner()), settings(), 0, RealClock()
    )
    model = HuggingFaceModel(path=str(tmp_path), tensor_parallel=2)
    runner = TorchRunner(tensor_parallel=2)
    engine = build_engine(hooks(model, runner), settings(), 0, RealClock())
    for each in (one, engine):
        submit(each, "a", 8)
    assert finished(engine) == finished(one)
    facts = engine.executor.describe()
    assert facts["tensor_parallel"] == 2
    assert facts["shape"]["num_q_heads"] == 2
    process = engine.executor._ranks._processes[0]
    submit(engine, "b", 200)
    for _ in range(5):
        engine.step()
    os.kill(process.pid, signal.SIGKILL)
    said = rf"tensor-parallel rank 1 \(process {process.pid}\) was killed by SIGKILL"
    with pytest.raises(RankError, match=said):
        finished(engine)
    assert "RankError" in engine.records["b"].error
    with pytest.raises(EngineStoppedError, match=said):
        engine.step()
    with pytest.raises(RankError, match=said):
        engine.executor.check()
    folder = Path(engine.executor._ranks.folder)
    engine.close()
    assert not process.is_alive()
    assert not folder.exists()


def test_ranks_end_with_a_first_rank_that_is_killed(tmp_path):
    save_tiny("llama", tmp_path)
    arguments = [sys.executable, "-c", DIES, str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=SOON_S)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, folder = done.stdout.split()
    until_s = time.monotonic() + SOON_S
    while not ended(pid):
        assert time.monotonic() < until_s, "the rank was left behind"
        time.sleep(0.05)
    assert not Path(folder).exists(), "the rank removes it"


class Shards:
    """Two parts, of which the other rank's cannot be loaded."""

    num_ranks = 2

    def __init__(self, error):
        self.error = error

    def build(self, rank, device):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"), [(ConfigError("x must be 1, got 2"), ConfigError), (OSError("x"), RankError)]
)
def test_what_ends_a_rank_is_told(error, kind, capfd):
    ours, theirs = Pipe()
    query = executor_query(None)
    setup = RankSetup(
        Shards(error), TorchRunner(), query.engine, 0, query.clock, query.attention, "cpu", "", 1
    )
    Thread(target=serve, args=(1, theirs, []), daemon=True).start()
    ranks = Ranks([ours])
    ranks.send_bytes(packed(setup, "executor.tensor_parallel"))
    with pytest.raises(kind, match=f"tensor-parallel rank 1: {type(error).__name__}: x"):
        ranks.replies()
    ranks.close()
    assert ("Traceback" in capfd.readouterr().err) == (kind is RankError)


def test_a_launch_that_only_the_first_rank_cannot_make_ends_the_engine():
    ranks = Ranks([])
    said = "rank 0 fell behind the others: no memory"
    with pytest.raises(RankError, match=said), ranks.explained():
        raise LaunchError("no memory")
    with pytest.raises(ZeroDivisionError), ranks.explained():
        raise ZeroDivisionError
    ranks.close()


def test_a_closed_pipe_is_an_error(tmp_path):
    ours, theirs = Pipe()
    theirs.close()
    ranks = Ranks([ours])
    with pytest.raises(OSError, match="pipe"):
        ranks.tell(None)
    ranks.close()


def test_parts_that_do_not_pickle_are_refused(tmp_path):
    save_tiny("llama", tmp_path)
    query = executor_query(load(tmp_path, 2))
    query = replace(query, attention=lambda asked: query.attention(asked))
    with pytest.raises(ConfigError, match="must be 1 for parts that do not pickle"):
        packed(query.attention, "executor.tensor_parallel")


def test_kernels_travel_by_name_and_hooks_as_what_answers_attention():
    """A kernel that a decorator left in its function's place is no function."""
    pytest.importorskip("triton")
    from kernels.split_kernel import decode_kernel
    from kernels.split_kv import SplitKV

    assert pickle.loads(packed(decode_kernel, "field")) is decode_kernel
    plugins = {"attention": PagedAttention(SplitKV(), paged_extend, name="split")}
    plugins["model"] = HuggingFaceModel(load="dummy", config={"model_type": "llama"})
    sent = packed(partial(Hooks(plugins, {}).build, "build_attention"), "field")
    build = pickle.loads(sent)
    assert list(build.func.__self__.registered) == ["attention"]
    plugin = build.func.__self__.registered["attention"].plugin
    assert isinstance(plugin._decode, SplitKV)
    assert plugin._extend is paged_extend
