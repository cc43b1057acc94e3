"""Deaths, silences, aborts and drains at random: what must hold whatever comes."""

import numpy as np
import pytest

from plugins.shared.server_protocol import Steer
from tests.plugins.mode.replicas.step_fleet import Rig, ask

TICKS = 200


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_once_with_tokens_of_its_own_stream(seed):
    rng = np.random.default_rng(seed)
    rig = Rig(replicas=3, pages=40, seqs=6)
    requests, aborted = [], set()
    for tick in range(TICKS):
        if rng.random() < 0.2:
            n, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 60))
            prompt_tokens = int(rng.integers(1, 100))
            requests.append(ask(f"r{tick}", tokens, prompt_tokens, n=n))
            rig.client.items.append(requests[-1])
        disturb(rig, rng, aborted)
        rig.tick()
    for name, one in rig.fleet.alive.items():
        one.silent = False
        rig.client.items.append(Steer(name, False))
    rig.tick()
    for name in set(rig.fleet.names) - set(rig.fleet.alive):
        rig.fleet.start(name)
    rig.finish()
    assert rig.traffic.failovers > 0, "something happened"
    assert sum(rig.traffic.finished.values()) == len(requests)
    served = 0
    for request in requests:
        name = request.request_id
        assert (name in rig.client.ended) != (name in rig.client.refused)
        if name in rig.client.refused:
            told = rig.client.refused[name]
            assert name in aborted or "ran alone" in told, told
        for choice in range(request.params.n):
            got = rig.client.tokens.get((name, choice), [])
            assert got == rig.whole(request, choice)[: len(got)]
            if name in rig.client.ended and name not in aborted:
                assert len(got) == request.params.max_tokens
                served += 1
    assert served > len(requests) / 2


def disturb(rig, rng, aborted):
    """One of the things that happen, now and then."""
    alive = sorted(rig.fleet.alive)
    for name in set(rig.fleet.names) - set(alive):
        if rng.random() < 0.15:
            rig.fleet.start(name)
    if not alive:
        return
    name, dice = alive[int(rng.integers(len(alive)))], rng.random()
    if dice < 0.03:
        rig.fleet.kill(name)
    elif dice < 0.04:
        rig.fleet.alive[name].silent = True
    elif dice < 0.07:
        rig.fleet.alive[name].silent = False
    elif dice < 0.10:
        rig.client.items.append(Steer(name, bool(rng.random() < 0.5)))
    elif dice < 0.13 and rig.traffic.streams:
        chosen = sorted(rig.traffic.streams)[0]
        aborted.add(chosen)
        rig.client.items.append(chosen)
