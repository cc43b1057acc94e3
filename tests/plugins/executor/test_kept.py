"""An executor that serves one engine after another."""

import gc
from dataclasses import replace

import torch

from plugins.executor.torch_runner import TorchRunner
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query

MODEL = ToyModel()
PROMPT = list(range(3, 40))
TOKENS = MODEL.greedy(PROMPT, 8)


def runner():
    plugin = TorchRunner()
    plugin.keep_built()
    return plugin


def served(executor, **options):
    """Tokens of the prompt from the executor, as an engine of its own sees it."""
    core = Driver(executor, **options)
    core.start(2, PROMPT)
    found = core.run(2, 8, None)
    executor.close()
    return found


def test_the_same_settings_are_served_from_what_is_there():
    plugin, query = runner(), executor_query(MODEL)
    first = plugin.build_executor(query)
    assert served(first) == TOKENS
    state = first._state
    again = plugin.build_executor(query)
    assert again is first
    assert served(again, seed=3) == TOKENS
    assert again._state is state
    assert again.describe()["engines_before"] == 1


def test_launches_in_flight_at_the_end_do_not_reach_the_next_engine():
    plugin, query = runner(), executor_query(MODEL)
    first = plugin.build_executor(query)
    core = Driver(first)
    core.start(0, PROMPT)
    core.launch((0, len(PROMPT)))
    core.launch((0, 1))
    first.close()
    assert served(plugin.build_executor(query)) == TOKENS


def test_another_layout_gets_a_pool_of_its_own():
    plugin, query = runner(), executor_query(MODEL)
    assert served(plugin.build_executor(query), page_size=16) == TOKENS
    again = plugin.build_executor(query)
    assert served(again, page_size=1) == TOKENS
    assert again._state.pool.page_size == 1


def test_other_settings_or_another_seed_get_an_executor_of_their_own():
    plugin, query = runner(), executor_query(MODEL)
    first = plugin.build_executor(query)
    second = plugin.build_executor(replace(query, seed=query.seed + 1))
    assert second is not first
    engine = replace(query.engine, max_num_seqs=query.engine.max_num_seqs + 1)
    third = plugin.build_executor(replace(query, seed=query.seed + 1, engine=engine))
    assert third is not second
    assert served(third) == TOKENS


def test_another_seed_is_served_where_the_model_draws_its_weights_anew():
    class Seeded(ToyModel):
        def reseed(self, seed):
            for mine, other in zip(self.qkv, ToyModel(seed).qkv, strict=True):
                mine.copy_(other)

    plugin, query = runner(), executor_query(Seeded())
    first = plugin.build_executor(query)
    assert served(first) == TOKENS
    state = first._state
    other = plugin.build_executor(replace(query, seed=query.seed + 1))
    assert other is first
    assert served(other) != TOKENS
    assert other._state is state
    assert served(plugin.build_executor(query)) == TOKENS


def test_without_being_told_nothing_is_kept():
    plugin, query = TorchRunner(), executor_query(MODEL)
    first = plugin.build_executor(query)
    assert served(first) == TOKENS
    assert first._state is None
    assert plugin.build_executor(query) is not first


def test_threads_are_as_before_when_an_executor_is_closed_or_let_go():
    query, before = executor_query(MODEL), torch.get_num_threads()
    plain = TorchRunner(num_threads=before + 1).build_executor(query)
    assert torch.get_num_threads() == before + 1
    plain.close()
    assert torch.get_num_threads() == before
    plugin = TorchRunner(num_threads=before + 2)
    plugin.keep_built()
    plugin.build_executor(query).close()
    assert torch.get_num_threads() == before + 2
    plugin.build_executor(replace(query, seed=query.seed + 1)).close()
    assert torch.get_num_threads() == before + 2
    del plugin
    gc.collect()
    assert torch.get_num_threads() == before
