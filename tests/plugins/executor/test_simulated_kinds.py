"""plugins/executor/simulated*.py: a step's time depends on how its launch is started."""

from typing import Any

import numpy as np
import pytest

from core.request import Request, SamplingParams
from plugins.executor.simulated import Simulated
from plugins.shared.launch_sizes import LaunchSizes
from plugins.step_time.fixed import Fixed
from tests.engine_harness import VOCAB, make_engine

SECONDS = {"decode": 1.0, "graphed": 10.0, "chunk": 100.0, "mixed": 1000.0, "eager": 1e4}


class OfKinds(Fixed):
    """Steps whose time is that of their kind."""

    sizes = LaunchSizes([1, 2, 4, 8], [8, 64, 256], [8, 64, 256], [8, 64], mixed_pairs=640)

    def seconds_of(self, kind: str, *facts: Any) -> Any:
        """By the kind alone; an array for arrays."""
        return SECONDS[kind] + np.zeros(np.broadcast(*facts).shape)


def ended(prompts: list[int], until_s: float, **engine: Any) -> tuple[float, int]:
    """When the last of such prompts with 6 tokens each ended, and how many steps went in one."""
    executor = Simulated(OfKinds(), vocab_size=VOCAB, max_model_len=1024)
    run = make_engine(pages=64, executor=executor, **engine)
    for number, length in enumerate(prompts):
        prompt = np.arange(length, dtype=np.int32) % VOCAB
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        run.submit(Request(str(number), prompt, params, forced_output=6))
    records = []
    while run.has_work:
        event = run.step(until_s)
        records += [event.record] if event else []
    return records[-1].end_s, max(record.steps for record in records)


@pytest.mark.parametrize("overlap", [False, True])
def test_slices_are_graphs_until_their_context_is_too_long(overlap: bool):
    """Ten slices of 20 tokens: 20 * 20 pairs are few enough for a graph, 20 * 40 are not."""
    seconds = 10 + 9 * 100 + 5 * 1
    assert ended([200], 0.0, budget=20, overlap=overlap) == (seconds, 1)
    end_s, joined = ended([200], np.inf, budget=20, overlap=overlap)
    assert end_s == seconds
    assert joined > 5


def test_longer_rows_beside_one_token_rows_are_counted_alone():
    """The prompt of 5 in a graph; 4 and 4 tokens of the other beside the first row's, 16 and 32
    pairs, in a graph each; then both rows decode, three times and the longer one twice more."""
    assert ended([5, 8], 0.0, budget=5)[0] == 3 * 10 + 5 * 1


def test_records_tell_which_launches_were_whole_graphs():
    """As of a device: 20 tokens padded to 64 while their pairs are few, then in pieces; decodes."""
    run = make_engine(
        pages=64, executor=Simulated(OfKinds(), vocab_size=VOCAB, max_model_len=1024), budget=20
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = np.arange(60, dtype=np.int32) % VOCAB
    run.submit(Request("0", prompt, params, forced_output=6))
    records = []
    while run.has_work:
        event = run.step(0.0)
        records += [event.record] if event else []
    assert [record.graph_tokens for record in records] == [64, 0, 0, *[1] * 5]
