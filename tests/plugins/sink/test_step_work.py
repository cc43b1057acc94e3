"""plugins/sink/step_work.py: bytes and operations of steps, by hand."""

import pytest

from core.errors import ConfigError
from core.records import Choice, StepRecord
from plugins.sink.step_work import (
    CHUNKS,
    DECODE,
    EXTEND,
    GEMM,
    ONE_TOKEN,
    Ceilings,
    ModelShape,
    StepWork,
    WorkCounter,
)
from tests.plugins.sink.kernel_run import EXECUTOR, SHAPE, admitted, record


def test_shape_is_read_from_the_executors_description() -> None:
    assert ModelShape.of(EXECUTOR) == SHAPE
    assert ModelShape.of({"shape": None}) is None


def test_work_of_a_step_by_hand() -> None:
    work = SHAPE.work(StepWork(3, 9, 2, contexts=50, pairs=40, graph=False))
    assert work[DECODE] == (50 * 32, 0)
    assert work[EXTEND] == (0, 4 * 64 * 40)
    assert work[GEMM] == (2 * 1300, 2 * (1000 * 9 + 300 * 2))
    assert SHAPE.work(StepWork(1, 9, 0, 0, 45, False))[GEMM] == (2000, 18000)
    assert Ceilings(10.0, 5.0).least_s((100, 20)) == 10
    assert Ceilings(10.0, 5.0).least_s((10, 20)) == 4


def test_contexts_follow_cache_hits_preemption_and_forks() -> None:
    counter = WorkCounter()
    first = counter.of(
        record(0, ("a", 0, 6), ("b", 0, 3), choices=[admitted("a", 8), admitted("b", 0)])
    )
    assert (first.tokens, first.contexts) == (9, 0)
    assert first.pairs == (9 + 10 + 11 + 12 + 13 + 14) + (1 + 2 + 3)
    assert first.kind == CHUNKS
    second = counter.of(record(1, ("a", 0, 1), ("b", 0, 1), graph_tokens=2))
    assert (second.kind, second.contexts, second.pairs, second.graph) == (
        ONE_TOKEN,
        15 + 4,
        0,
        True,
    )
    again = [admitted("a", 12, "resumed"), Choice("b", 0, "preempted", "p", "r")]
    third = counter.of(record(2, ("a", 0, 4), ("b", 1, 1), choices=again))
    assert third.pairs == 13 + 14 + 15 + 16
    assert third.contexts == 4  # b's second choice: the last token of a context of 4


def test_record_without_its_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rows of a record must be 2, got 0"):
        WorkCounter().of(StepRecord(0, 0.0, num_rows=2))
