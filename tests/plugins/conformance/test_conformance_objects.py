"""The objects that a policy builds, against their protocols in core/protocols.py."""

from tests.plugins.conformance import caches, objects

PROMISES = {
    "build_allocator": objects.allocator_keeps_its_promises,
    "build_length_predictor": objects.predictor_keeps_its_promises,
    "build_step_time_model": objects.step_time_keeps_its_promises,
}


def test_protocol_is_kept(subject, built, holds):
    if built in PROMISES:
        holds(PROMISES[built], subject)
    else:
        holds(caches.keeps_its_promises, subject, built)


def test_evicted_nodes_are_let_go(subject, evictor, holds):
    holds(caches.forgets_what_went, subject)


def test_operations_of_an_evictor_stay_few(subject, evictor, holds):
    holds(caches.operations, subject)
