"""What a job hands on to the next one of the same process."""

import weakref

from conf.reuse import Reuse

HERE = __name__


class Keeper:
    """An executor's plugin that can keep what it built."""

    def __init__(self, size: int = 1):
        self.size, self.kept = size, False

    def keep_built(self):
        self.kept = True


class Plain:
    """A plugin that cannot."""


class Attends:
    """A plugin that answers a hook of the unit."""

    def build_attention(self, query):
        """Never called here."""


def nodes(executor="Keeper", size=1, model="Plain", policy="Plain"):
    kept = {"size": size} if executor == "Keeper" else {}
    return {
        "torch": ("executor", {"_target_": f"{HERE}.{executor}", **kept}),
        "tiny": ("model", {"_target_": f"{HERE}.{model}"}),
        "mine": ("plugins.mine", {"_target_": f"{HERE}.{policy}"}),
    }


def active():
    reuse = Reuse()
    reuse.active = True
    return reuse


def test_the_unit_is_handed_on_and_policies_are_new():
    reuse = active()
    first, second = reuse.built(nodes(), "cpu"), reuse.built(nodes(), "cpu")
    assert first["torch"].kept
    assert second["torch"] is first["torch"]
    assert second["tiny"] is first["tiny"]
    assert second["mine"] is not first["mine"]


def test_nothing_is_handed_on_outside_a_sweep():
    reuse = Reuse()
    first, second = reuse.built(nodes(), "cpu"), reuse.built(nodes(), "cpu")
    assert not first["torch"].kept
    assert second["torch"] is not first["torch"]


def test_a_difference_in_any_part_or_the_device_lets_all_of_it_go():
    for other, device in (
        (nodes(size=2), "cpu"),
        (nodes(model="Keeper"), "cpu"),
        (nodes(), "cuda"),
    ):
        reuse = active()
        first = reuse.built(nodes(), "cpu")
        second = reuse.built(other, device)
        assert second["torch"] is not first["torch"]
        assert second["tiny"] is not first["tiny"]


def test_what_is_let_go_is_gone_before_the_next_is_built():
    reuse = active()
    alive = weakref.ref(reuse.built(nodes(), "cpu")["torch"])
    seen = []

    class Watching(Keeper):
        def __init__(self):
            seen.append(alive())
            super().__init__()

    globals()["Watching"] = Watching
    node = {"torch": ("executor", {"_target_": f"{HERE}.Watching"})}
    reuse.built(node, "cpu")
    assert seen == [None]


def test_what_a_failed_job_left_is_gone_before_the_next_is_built():
    reuse = active()

    def failed():
        try:
            found = reuse.built(nodes(), "cpu")
            found["torch"].itself = found["torch"]  # as an engine and its parts know each other
            alive = weakref.ref(found["torch"])
            raise ValueError
        except ValueError:
            reuse.forget()
            return alive

    alive = failed()
    assert reuse.built(nodes(), "cpu")["torch"] is not None
    assert alive() is None


def test_an_executor_that_keeps_nothing_and_its_model_are_new_each_time():
    reuse = active()
    plain = nodes(executor="Plain")
    first, second = reuse.built(plain, "cpu"), reuse.built(plain, "cpu")
    assert second["torch"] is not first["torch"]
    assert second["tiny"] is not first["tiny"]


def test_forgotten_is_built_anew():
    reuse = active()
    first = reuse.built(nodes(), "cpu")
    reuse.forget()
    assert reuse.built(nodes(), "cpu")["torch"] is not first["torch"]


def test_a_plugin_that_answers_for_the_unit_lets_all_of_it_go():
    for policy, beside in (("Attends", ()), ("Plain", (Attends(),))):
        reuse = active()
        first = reuse.built(nodes(), "cpu")
        second = reuse.built(nodes(policy=policy), "cpu", beside)
        third = reuse.built(nodes(policy=policy), "cpu", beside)
        assert len({id(found["torch"]) for found in (first, second, third)}) == 3
        assert not second["torch"].kept


def test_plugins_keep_the_order_of_the_config():
    assert list(active().built(nodes(), "cpu")) == list(nodes())
