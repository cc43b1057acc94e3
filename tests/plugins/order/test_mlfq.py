"""mlfq: levels from what was served, skip-join, displacement, promotion."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.queries import Cause, Hold
from plugins.order.mlfq import Mlfq
from tests.core.policy_tables import preemption_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run
from tests.plugins.order.order_tables import order_query


def policy(**settings):
    return Mlfq(**{"quantum": 4, "prompt_tokens_per_iteration": 100, **settings})


def rows(prompt, emitted, **columns):
    known = [tokens + out for tokens, out in zip(prompt, emitted, strict=True)]
    return table_of(prompt=prompt, known=known, computed=[one - 1 for one in known], **columns)


def level(prompt, emitted, **settings):
    return int(policy(**settings).level(rows([prompt], [emitted]))[0])


def test_a_request_joins_the_first_level_whose_quantum_holds_its_prompt():
    # Quanta of 4, 8, 16, 32 iterations; prompts of 1, 4, 5, 8, 9 and 32 iterations.
    prompts = [100, 400, 401, 800, 801, 3200]
    assert [level(prompt, 0) for prompt in prompts] == [0, 0, 1, 1, 2, 3]


def test_a_request_sinks_a_level_with_each_quantum_it_used_up():
    # One iteration of prompt with the first token, then one a token: 4, 4 + 8, 4 + 8 + 16.
    emitted = [1, 3, 4, 11, 12, 27, 28]
    assert [level(100, num) for num in emitted] == [0, 0, 1, 1, 2, 2, 3]


def test_what_a_request_skipped_is_not_counted_against_it():
    # 8 iterations of prompt fill level 1 (8); level 2 then holds 16 more tokens.
    assert [level(800, num) for num in (0, 1, 16, 17)] == [1, 2, 2, 3]


def test_the_last_level_has_no_end():
    assert level(100, 10**6, levels=3) == 2
    assert level(10**6, 0, levels=3) == 2


def test_tokens_in_flight_count():
    flying = table_of(prompt=[100], known=[103], in_flight=[1])
    assert policy().level(flying).tolist() == [1]


def test_keys_are_level_then_arrival():
    decision = policy().decide_order(
        order_query(rows([100, 500, 100], [0, 0, 5], arrival_s=[3.0, 1.0, 2.0]))
    )
    assert np.asarray(decision.keys).tolist() == [[0, 3.0], [1, 1.0], [1, 2.0]]
    assert decision.hold is Hold.STEP


def displaced(view, beneficiary, cause=Cause.DISPLACE):
    query = preemption_query(view, cause=cause, beneficiary=beneficiary)
    return rows_of(view, policy().decide_preemption(query).victims)


@pytest.mark.parametrize("cause", [Cause.SLOTS, Cause.DISPLACE])
def test_lower_levels_give_way_lowest_and_latest_first(cause):
    view = rows([100] * 4, [1, 5, 13, 6])  # levels 0, 1, 2, 1
    assert displaced(view, rows([100], [0]), cause) == [2, 3, 1]
    assert displaced(view, rows([500], [0]), cause) == [2]
    assert displaced(view, rows([900], [0]), cause) == []


def test_who_computes_its_prompt_is_not_displaced():
    view = table_of(prompt=[900, 900], known=[900, 901], computed=[500, 900])
    assert displaced(view, rows([100], [0])) == [1]


def test_for_pages_everyone_is_ranked_by_level():
    view = rows([100] * 4, [1, 5, 13, 6])
    assert displaced(view, None, Cause.PAGES) == [2, 3, 1, 0]


def test_a_request_that_waited_too_long_goes_to_the_first_level():
    one, view = policy(promote_after=10), rows([800], [30])
    assert one.decide_order(order_query(view, step=5)).keys[0, 0] == 3
    assert one.decide_order(order_query(view, step=14)).keys[0, 0] == 3
    assert one.decide_order(order_query(view, step=15)).keys[0, 0] == 0
    view._table.known[view._slots] += 4  # it ran, and used up the first quantum again
    assert one.level(view._table.view(view._slots)).tolist() == [1]


def test_the_wait_counts_anew_after_running():
    one, view = policy(promote_after=10), rows([800, 800], [30, 0])
    first, other = (view._table.view(view._slots[[row]]) for row in (0, 1))
    one.decide_order(order_query(first, step=0))
    one.decide_order(order_query(other, step=5))  # the first runs
    assert one.decide_order(order_query(first, step=10)).keys[0, 0] == 3


def test_a_short_prompt_displaces_a_request_that_sank():
    engine = make_engine(seqs=1, plugins={"mine": Mlfq(quantum=4)})
    out = run(engine, [Arrival(0, "long", 8, 40), Arrival(8, "short", 8, 3)])
    assert [c.request_id for c in out.choices("preempted")] == ["long"]
    assert out.last_token_step("short") < out.last_token_step("long")


def test_a_request_is_promoted_out_of_a_stream_that_would_starve_it():
    stream = [Arrival(3 * i, f"s{i}", 8, 4) for i in range(60)]
    long = Arrival(0, "long", 40, 30)

    def ended(promote_after):
        plugin = Mlfq(quantum=4, prompt_tokens_per_iteration=8, promote_after=promote_after)
        out = run(make_engine(seqs=1, plugins={"mine": plugin}), [long, *stream])
        assert not plugin._promoted
        return sorted(out.records, key=out.last_token_step).index("long")

    assert ended(promote_after=10**6) == 60
    assert ended(promote_after=20) < 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantum", 0),
        ("levels", 0),
        ("levels", 33),
        ("prompt_tokens_per_iteration", 0),
        ("promote_after", 0),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be .*, got {value}"):
        Mlfq(**{field: value})
