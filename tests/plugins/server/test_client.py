"""Requests from a front end's client through the channel and the engine's loop, and back."""

import asyncio
from pathlib import Path

import pytest

from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, Verdict
from plugins.executor.fake import Fake
from plugins.server.client import Busy, Ended, Unavailable
from plugins.server.settings import Settings
from tests.patience import SOON_S
from tests.plugins.server.rig import (
    SLOW_S,
    VOCAB,
    Gate,
    Rig,
    all_of,
    ask,
    real_engine,
    served,
    until,
)


def scripted(request, choice=0, count=None):
    fake = Fake(vocab_size=VOCAB)
    return fake.stream(0, request, choice, count or request.params.max_tokens)


def test_stream_brings_every_token_once_in_order_then_the_end(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        request = ask("a", max_tokens=50)
        tokens, ended = await all_of(client.submit(request))
        assert [token.token_id for token in tokens] == scripted(request)
        assert [token.finish_reason for token in tokens] == [""] * 49 + ["length"]
        assert ended == Ended(("length",))

    served(test, tmp_path)


def test_choices_are_told_apart_and_each_ends(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        request = ask("a", max_tokens=20, prompt=40, n=3)
        tokens, ended = await all_of(client.submit(request))
        for choice in range(3):
            own = [token for token in tokens if token.choice == choice]
            assert [token.token_id for token in own] == scripted(request, choice)
            assert [token.finish_reason for token in own] == [""] * 19 + ["length"]
        assert ended.finish_reasons == ("length",) * 3

    served(test, tmp_path)


def test_many_requests_of_two_front_ends_are_not_mixed_up(tmp_path: Path):
    async def test(rig: Rig):
        clients = [await rig.client(), await rig.client()]
        requests = [ask(f"{number:04}", max_tokens=30, prompt=8) for number in range(60)]
        streams = [clients[i % 2].submit(request) for i, request in enumerate(requests)]
        for request, (tokens, _) in zip(
            requests, await asyncio.gather(*map(all_of, streams)), strict=True
        ):
            assert [token.token_id for token in tokens] == scripted(request)
        await until(lambda: not rig.engine.records)
        assert (rig.hub._routes, rig.hub._ids) == ({}, {})
        assert all((client._choices, client._streams) == ({}, {}) for client in clients)
        for client in clients:
            await until(lambda client=client: client.state().requests == 0)
            assert client.state().totals["finished_length"] == 60

    served(test, tmp_path)


def test_logprobs_come_with_their_tokens_and_those_of_the_prompt_at_the_end(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        request = ask("a", max_tokens=5, prompt=6, logprobs=2, prompt_logprobs=1)
        tokens, ended = await all_of(client.submit(request))
        for token in tokens:
            assert token.logprobs is not None
            assert token.logprobs.top_ids.tolist()[0] == token.token_id
        assert len(ended.prompt_logprobs) == 5

        only_prompt = ask("b", max_tokens=0, prompt=6, prompt_logprobs=0)
        tokens, ended = await all_of(client.submit(only_prompt))
        assert (tokens, len(ended.prompt_logprobs)) == ([], 5)

    served(test, tmp_path)


def test_slow_reader_gets_all_in_one_update_that_counts_its_steps(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=20))
        other = client.submit(ask("b", max_tokens=40))
        await all_of(other)
        update = await anext(stream)
        assert (len(update.tokens), update.steps) == (20, 20)
        assert update.ended is not None
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    served(test, tmp_path)


def test_abort_ends_within_a_step_and_frees_pages(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=4000, ignore_eos=True))
        await anext(stream)
        client.abort("a")
        client.abort("nobody")
        tokens, ended = await all_of(stream)
        assert ended.finish_reasons == ("abort",)
        assert len(tokens) < 4000
        client.abort("a")  # ended already
        ledger = rig.engine.state.memory.ledger
        await until(lambda: client.state().requests == 0)
        assert ledger.num_request == 0
        assert (await all_of(client.submit(ask("b"))))[1].finish_reasons == ("length",)

    served(test, tmp_path, real_engine(SLOW_S))


def test_abort_reaches_requests_in_the_channel_in_the_queue_and_in_their_prompt(tmp_path: Path):
    gate = Gate()

    async def test(rig: Rig):
        client = await rig.client()
        running = client.submit(ask("running", max_tokens=4000))
        await anext(running)
        queued = client.submit(ask("queued", max_tokens=4000))
        await until(lambda: client.state().waiting == 1)
        client.abort("queued")
        assert await all_of(queued) == ([], Ended(("abort",)))
        at_once = client.submit(ask("at once"))
        client.abort("at once")
        assert await all_of(at_once) == ([], Ended(("abort",)))
        client.abort("running")
        await all_of(running)

        gate.close()
        long = client.submit(ask("long", prompt=3000))  # twelve steps of it
        await until(gate.held.is_set)
        client.abort("long")
        gate.open()
        assert await all_of(long) == ([], Ended(("abort",)))
        assert rig.engine.state.memory.ledger.num_request == 0

    served(test, tmp_path, real_engine(SLOW_S, seqs=1, gate=gate))


def test_request_that_the_engine_refuses_ends_with_its_error(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        tokens, ended = await all_of(client.submit(ask("a", stop_token_ids=(VOCAB,))))
        assert (tokens, ended.finish_reasons) == ([], ("error",))
        assert "stop_token_ids" in ended.error

        _, ended = await all_of(client.submit(ask("b", prompt=4200)))
        assert ended.finish_reasons == ("capacity",)
        assert "max_model_len" in ended.error

    served(test, tmp_path)


def test_id_in_use_elsewhere_is_refused_and_the_first_goes_on(tmp_path: Path):
    async def test(rig: Rig):
        one, two = await rig.client(), await rig.client()
        first = one.submit(ask("a", max_tokens=4000))
        await anext(first)
        _, ended = await all_of(two.submit(ask("a")))
        assert "in use" in ended.error
        assert (await anext(first)).ended is None
        one.abort("a")
        assert (await all_of(first))[1].finish_reasons == ("abort",)

    served(test, tmp_path, real_engine(SLOW_S))


def test_full_queue_is_busy_and_recovers(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        # as many as run, and as may wait
        streams = [client.submit(ask(f"r{number}", max_tokens=40)) for number in range(2 + 3)]
        with pytest.raises(Busy, match="max_queue is 3"):
            client.submit(ask("late"))
        await all_of(streams[0])
        await asyncio.gather(*map(all_of, streams[1:]))
        await until(lambda: client.state().requests == 0)
        await all_of(client.submit(ask("again")))

    served(test, tmp_path, real_engine(seqs=2), Settings(max_queue=3))


def test_arrival_is_when_the_front_end_submitted_and_the_deadline_counts_from_then(tmp_path: Path):
    seen = []

    class Watcher:
        @hookimpl
        def on_request_arrived(self, query):
            seen.append((query.request, rig_engine.clock.now()))

    rig_engine = real_engine(step_s=0.05, watcher=Watcher())

    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=20))
        await anext(stream)
        before_s = rig.engine.clock.now()
        late = client.submit(ask("b", deadline_s=2.0))
        after_s = rig.engine.clock.now()
        await asyncio.gather(all_of(stream), all_of(late))
        (_, _), (request, taken_in_s) = seen
        assert before_s <= request.arrival_s <= after_s
        assert request.arrival_s < taken_in_s
        assert request.deadline_s == pytest.approx(request.arrival_s + 2.0)

    served(test, tmp_path, rig_engine)


def test_request_wakes_an_idle_engine_whose_next_report_is_an_hour_away(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        for number in range(5):
            tokens, _ = await all_of(client.submit(ask(f"r{number}", max_tokens=3)))
            assert len(tokens) == 3
            await until(lambda: not rig.engine.has_work)  # it goes to sleep

    served(test, tmp_path, settings=Settings(stuck_s=3600.0), report_s=3600.0)


def test_feed_has_every_step_of_a_watched_request_and_ends_with_the_server(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        records = []

        async def follow():
            async for record in client.steps():
                records.append(record)

        task = asyncio.ensure_future(follow())
        await asyncio.sleep(0)  # the engine hears of the reader before the request
        await all_of(client.submit(ask("a", max_tokens=10)))
        await until(lambda: sum(record["sampled_tokens"] for record in records) == 10)
        assert records[0]["choices"][0]["kind"] == "admitted"
        assert not any("lost" in record for record in records)
        rig.signals.stop()
        await task

    served(test, tmp_path)


def test_slow_reader_of_the_feed_is_told_how_many_it_lost(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        feed = client.steps()
        first = asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        await all_of(client.submit(ask("a", max_tokens=600)))
        records, lost = [await first], 0
        while records[-1]["step"] < 599:
            records.append(await anext(feed))
            gap = records[-1].get("lost", 0)
            assert records[-1]["step"] == records[-2]["step"] + 1 + gap
            lost += gap
        assert lost > 0
        assert len(records) + lost == 600
        await feed.aclose()

    served(test, tmp_path, real_engine(step_s=0.0))


def test_state_describes_pool_counters_and_last_steps(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        await all_of(client.submit(ask("a", max_tokens=10)))
        await until(lambda: client.state().totals["sampled_tokens"] == 10)
        state = client.state()
        assert state.ready
        assert state.pool["total"] == 256
        assert state.pool["free"] + state.pool["tree"] == 256
        assert (state.waiting, state.running, state.requests) == (0, 0, 0)
        assert 1 <= len(state.last_steps) <= 8
        assert 0 <= state.age_s < SOON_S

    served(test, tmp_path)


def test_drain_ends_what_runs_and_refuses_what_is_new(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=200))
        await anext(stream)
        rig.signals.stop()
        await until(lambda: client.state().draining)
        with pytest.raises(Unavailable, match="shutting down"):
            client.submit(ask("b"))
        _, ended = await all_of(stream)
        assert ended.finish_reasons == ("length",)
        await asyncio.wait_for(client.closed.wait(), SOON_S)
        assert rig.loop.finished == {"length": 1}

    served(test, tmp_path)


def test_drain_aborts_what_is_open_after_its_time(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=4000))
        await anext(stream)
        clock = asyncio.get_running_loop().time
        start_s = clock()
        rig.signals.stop()
        _, ended = await all_of(stream)
        assert ended.finish_reasons == ("abort",)
        assert ended.error == "the server is shutting down"
        assert clock() - start_s >= 0.2

    served(test, tmp_path, real_engine(SLOW_S), Settings(drain_s=0.2))


class Breaks:
    """A policy that raises from the step on at which `armed` is set."""

    def __init__(self):
        self.armed = False

    @hookimpl
    def decide_batch(self, query):
        if self.armed:
            raise ZeroDivisionError("told to fail")


def test_fault_in_a_hook_ends_all_with_its_name_and_turns_ready_red(tmp_path: Path):
    breaks = Breaks()

    async def test(rig: Rig):
        client = await rig.client()
        streams = [client.submit(ask(f"r{number}", max_tokens=4000)) for number in range(20)]
        await anext(streams[0])
        breaks.armed = True
        for _, ended in await asyncio.gather(*map(all_of, streams)):
            assert ended.finish_reasons == ("error",)
            assert "raised by plugin breaks at decide_batch" in ended.error
        await until(lambda: not client.state().ready)
        assert "ZeroDivisionError: told to fail" in client.state().reason
        with pytest.raises(Unavailable, match="told to fail"):
            client.submit(ask("b"))
        await asyncio.sleep(0.1)
        assert rig.thread.is_alive(), "clients are told until the server is stopped"
        assert isinstance(rig.loop.fault, ZeroDivisionError)

    served(test, tmp_path, real_engine(SLOW_S, pages=8192, breaks=breaks))


def test_executor_that_fails_for_good_ends_all(tmp_path: Path):
    class Failing(Fake):
        @hookimpl
        def build_executor(self, query):
            executor = super().build_executor(query)
            launch = executor.launch

            def fails(one):
                if executor.num_launches >= 5:
                    raise RuntimeError("the device is lost")
                launch(one)

            executor.launch = fails
            return executor

    async def test(rig: Rig):
        client = await rig.client()
        _, ended = await all_of(client.submit(ask("a", max_tokens=50)))
        assert "the device is lost" in ended.error
        assert ended.finish_reasons == ("error",)
        await until(lambda: "the device is lost" in client.state().reason)

    served(test, tmp_path, real_engine(executor=Failing(vocab_size=VOCAB, step_s=0.001)))


def test_engine_that_blocks_turns_ready_red_and_recovers(tmp_path: Path):
    gate = Gate()

    async def test(rig: Rig):
        client = await rig.client()
        gate.close()
        stream = client.submit(ask("a"))
        await until(lambda: "nothing was heard" in client.state().reason)
        assert not client.state().ready
        with pytest.raises(Unavailable, match="stuck"):
            client.submit(ask("b"))
        gate.open()
        await all_of(stream)
        await until(lambda: client.state().ready)

    served(test, tmp_path, real_engine(gate=gate), Settings(stuck_s=0.2))


def test_policy_that_admits_nobody_turns_ready_red_then_is_named(tmp_path: Path):
    class Refuses:
        @hookimpl
        def decide_admission(self, query):
            return AdmissionDecision(Verdict.WAIT, "not today")

    async def test(rig: Rig):
        client = await rig.client()
        reasons = after_each_message(client)
        _, ended = await all_of(client.submit(ask("a")))
        assert "not today" in ended.error
        assert any("1 requests are pending" in reason for reason in reasons)

    served(test, tmp_path, real_engine(refuses=Refuses()), Settings(stuck_s=0.1))


def after_each_message(client):
    """Grows by what the client says of the engine after each message that it takes in."""
    reasons, end = [], client._end
    take = end._receive

    def noted(message):
        take(message)
        reasons.append(client.state().reason)

    end._receive = noted
    return reasons


def test_client_that_closes_ends_its_streams(tmp_path: Path):
    async def test(rig: Rig):
        client = await rig.client()
        stream = client.submit(ask("a", max_tokens=2000))
        await anext(stream)
        client.close()
        _, ended = await all_of(stream)
        assert (ended.finish_reasons, ended.error) == (("error",), "the front end was closed")
        with pytest.raises(Unavailable, match="closed"):
            client.submit(ask("b"))
        client.abort("a")
        assert client.closed.is_set()

    served(test, tmp_path, real_engine(), Settings(drain_s=0))
