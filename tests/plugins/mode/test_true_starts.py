"""When a request would truly start, by hand: 10 ms a step and 0.1 ms a token."""

import numpy as np
import pytest

from plugins.executor.simulated import Simulated
from plugins.mode.true_starts import PromptKeys, Starts
from plugins.step_time.fixed import Fixed
from tests.engine_harness import Arrival, make_engine

TIMES = Fixed(step_s=0.01, token_s=1e-4)


def starts(pages=40, seqs=8, slice_tokens=64):
    engine = make_engine(
        pages=pages,
        seqs=seqs,
        executor=Simulated(TIMES, vocab_size=1000, max_model_len=1024),
        step_time=TIMES,
    )
    return Starts(engine, PromptKeys(), slice_tokens)


def run(one, name, prompt, output, steps):
    one.engine.submit(Arrival(0, name, prompt, output).request())
    for _ in range(steps):
        one.engine.step()
    return one.engine.clock.now()


def test_an_idle_engine_takes_the_slices_of_the_prompt():
    """100 tokens in two slices of 64: two steps, 50 tokens each on average."""
    asked = Arrival(0, "R", 100, 4).request(5.0)
    assert starts().start_s(asked, 5.0) == pytest.approx(2 * 0.01 + 100e-4)


def test_decodes_run_along_and_what_is_cached_is_not_computed():
    """A has 40 tokens and decodes; R shares 32 of them, 2 pages, and computes 8 + 60."""
    one = starts()
    now_s = run(one, "A", 40, 20, 2)
    asked = Arrival(0, "R", 100, 4, shares=("A", 40)).request(now_s)
    assert one.cached(asked) == 32
    assert one.start_s(asked, now_s) == pytest.approx(2 * (0.01 + 1e-4) + 68e-4)
    late = one.start_s(asked, now_s - 0.5)
    assert late == pytest.approx(0.5 + 2 * (0.01 + 1e-4) + 68e-4), "the step ends half a second on"


def test_others_prompts_and_those_on_their_way_share_the_steps():
    """One slice of R's 60 tokens; of B's 100, sent and not yet seen, one slice of 64 goes along, so
    that two steps of 64 tokens hold the 124."""
    one = starts()
    one.sent(Arrival(0, "B", 100, 4).request())
    asked = Arrival(0, "R", 60, 4).request()
    assert one.start_s(asked, 0.0) == pytest.approx(2 * 0.01 + 124e-4)
    one.engine.submit(Arrival(0, "B", 100, 4).request())
    one.engine.step()
    one.stepped(0.0164)
    assert one.coming == []
    now_s = one.engine.clock.now()
    # 36 of B are left: with R's 60 they take two steps, too
    assert one.start_s(asked, now_s) == pytest.approx(2 * 0.01 + 96e-4)


def test_a_request_waits_for_a_slot_until_the_first_running_one_ends():
    """A has its first token of 9 and 8 to come, one a step of 10.1 ms."""
    one = starts(seqs=1)
    now_s = run(one, "A", 40, 9, 1)
    asked = Arrival(0, "R", 16, 4).request(now_s)
    assert one.start_s(asked, now_s) == pytest.approx(8 * 0.0101 + 0.0101 + 16e-4)


def test_a_request_waits_for_pages_until_enough_have_ended():
    """A and B hold 3 and 5 of 9 pages and end after 4 and 9 more tokens; R needs 4: 1 is free, A's
    3 make it enough, B need not end."""
    one = starts(pages=9)
    one.engine.submit(Arrival(0, "A", 40, 5).request())
    one.engine.step()
    one.engine.submit(Arrival(0, "B", 63, 12).request())
    one.engine.step()
    table, memory = one.engine.state.table, one.engine.state.memory
    held = dict(zip(table.prompt[:2].tolist(), table.pages_held[:2].tolist(), strict=True))
    now_s = one.engine.clock.now()
    asked = Arrival(0, "R", 60, 4).request(now_s)
    wait_s = one.start_s(asked, now_s) - one._prefill_s(60, 0, *np.empty((2, 0)), _decoding(one))
    left = {int(table.prompt[at]): int(table.length_limit[at] - table.known[at]) for at in (0, 1)}
    step_s = TIMES.seconds(2, 2, 0, 0)
    assert memory.supply < 4 <= memory.supply + held[40]
    assert left[40] < left[63]
    assert wait_s == pytest.approx(left[40] * step_s)


def _decoding(one):
    table, running = one.engine.state.table, one.engine.state.running
    return table.computed[running]
