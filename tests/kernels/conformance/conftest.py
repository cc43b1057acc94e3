"""Parameters of the kit: every kernel, and for each the values of its axes that it claims to
serve."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.kernels.conformance.kit import Kernel, load, measure
from tests.kernels.conformance.ours import KERNELS

AXES = (
    "head_dim",
    "page_size",
    "group",
    "odd_group",
    "dtype",
    "float8_query",
    "window",
    "softcap",
    "batch",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" not in metafunc.fixturenames:
        return
    config = metafunc.config
    named = config.option.kernel
    if named is not None:
        kernels = [load(named, config.option.kernel_kind)]
    else:
        kernels = [load(name, quick=True) for name in KERNELS]
    axes = [name for name in AXES if name in metafunc.fixturenames]
    metafunc.parametrize(
        ["kernel", *axes], [case for kernel in kernels for case in _cases(kernel, axes)]
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick form leaves out what is marked thorough. A kernel of the user's may make NaN on its
    way: NumPy's warnings about it in the interpreter do not count, results do."""
    left_out = []
    for item in items:
        kernel = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
        if not isinstance(kernel, Kernel):
            continue
        if not kernel.quick:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        elif item.get_closest_marker("thorough"):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


def _cases(kernel: Kernel, axes: list[str]) -> list[object]:
    label = kernel.name.rpartition(".")[2].replace(":", ".") if kernel.quick else kernel.kind
    unserved = [name for name in axes if not kernel.axis(name)]
    if unserved:
        reason = f"does not claim {' or '.join(unserved)}"
        marks = pytest.mark.skip(reason=reason)
        return [pytest.param(kernel, *axes, marks=marks, id=f"{label}-{'-'.join(unserved)}")]
    return [
        pytest.param(kernel, *values, id="-".join([label, *map(_label, values)]))
        for values in product(*map(kernel.axis, axes))
    ]


def _label(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the summary groups by; set before skips."""
    item.user_properties.append(("check", item.originalname.removeprefix("test_")))


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A line for the summary below this check."""
    return lambda text: request.node.user_properties.append(("note", text))


@pytest.fixture
def agrees(request: pytest.FixtureRequest) -> Callable[..., tuple[torch.Tensor, object]]:
    """Calls the kernel on a case, unless a result is given, holds it against dense attention and
    returns the result."""

    def check(kernel, case, window=None, softcap=None, result=None):
        result = kernel(case, window, softcap) if result is None else result
        deviations = measure(kernel, case, result, window, softcap)
        for name, found in zip(("output", "log-sum-exp"), deviations, strict=False):
            request.node.user_properties.append(("deviation", (found.error, found.limit)))
            text = f"{name} is off by {found.error:.2e}, allowed {found.limit:.2e}"
            assert found.within, f"{text}: contexts {case.contexts}, queries {case.queries}"
        return result

    return check
