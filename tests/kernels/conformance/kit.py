"""A kernel under test: how it is found, called and what it is asked to serve."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels import conformance
from kernels.conformance import Case, Deviation, fill_nan
from kernels.declare import Capabilities

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 6, 7, 8, 12, 16)
PAGE_SIZES = (1, 16, 64)
FLOAT8 = "float8_e4m3fn"

UNDECLARED = Capabilities(
    dtypes=("float32", "float16", "bfloat16"),
    devices=("cpu", "cuda"),
    head_dims=(64, 128),
    page_sizes=(1, 16),
    max_group=8,
)
"""The matrix of a callable that declares nothing; soft cap and log-sum-exp if it has keywords of
those names."""

NO_WINDOW = "takes no window"


class PoisonedEmpty(TorchFunctionMode):
    """torch.empty and its relatives return NaN, or the largest integer: a kernel that trusts fresh
    memory shows it."""

    MAKERS = (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    )

    def __torch_function__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function in self.MAKERS and result.numel():
            if result.is_floating_point():
                fill_nan(result)
            elif result.dtype != torch.bool:
                result.fill_(torch.iinfo(result.dtype).max)
        return result


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and its matrix. quick: the short form of the normal suite."""

    name: str
    kind: str
    function: Callable[..., Any]
    limits: Capabilities
    declared: bool
    parameters: frozenset[str]
    quick: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of checks that are not about dtypes: the sharpest in the interpreter, the one
        that is served on a GPU."""
        wanted = ("float32", "float16") if DEVICE == "cpu" else ("float16", "bfloat16")
        chosen = next((name for name in wanted if name in self.limits.dtypes), None)
        return getattr(torch, chosen or self.limits.dtypes[0])

    @property
    def head_dim(self) -> int:
        """The head_dim of checks that are not about it."""
        dims = self.limits.head_dims
        return 64 if dims is None or 64 in dims else dims[0]

    @property
    def page_size(self) -> int:
        """The page size of checks that are not about it."""
        sizes = self.axis("page_size")
        return 16 if 16 in sizes else sizes[0]

    def axis(self, name: str) -> tuple[Any, ...]:
        """Values of a parameter that this kernel is asked to serve; none: it does not claim to."""
        limits = self.limits
        few = self.quick
        group_limit = min(limits.max_group or GROUPS[-1], GROUPS[-1])
        values: dict[str, Sequence[Any]] = {
            "head_dim": _known(limits.head_dims, HEAD_DIMS, (80, 128) if few else HEAD_DIMS),
            "page_size": _known(limits.page_sizes, PAGE_SIZES, (1, 16) if few else PAGE_SIZES),
            "group": [g for g in ((3, 8) if few else GROUPS) if g <= group_limit],
            "odd_group": [g for g in ((3,) if few else (5, 6, 7, 12)) if g <= group_limit],
            "dtype": [getattr(torch, name) for name in limits.dtypes],
            "float8_query": [
                getattr(torch, name)
                for name in (limits.dtypes if FLOAT8 in (limits.kv_dtypes or ()) else ())
                if name != "float32" and not (few and name == "float16")
            ],
            "window": ((1, 40) if few else (1, 16, 40, 64, 129)) if self.takes("window") else (),
            "softcap": ((5.0,) if few else (5.0, 30.0)) if limits.softcap else (),
            "batch": (5,) if few else (4, 5, 12),
        }
        return tuple(values[name])

    def takes(self, parameter: str) -> bool:
        """Whether the call has a parameter of that name."""
        return parameter in self.parameters

    def case(self, contexts: Sequence[int], **changes: Any) -> Case:
        """A case of this kernel's kind. An extend kernel gets whole prompts, single tokens and
        chunks in turn, unless `queries` says otherwise."""
        options = {"dtype": self.dtype, "head_dim": self.head_dim, "page_size": self.page_size}
        options |= {"device": DEVICE}
        if self.kind == "extend":
            takes = (lambda c: c, lambda c: min(c, 1), lambda c: min(c, 1 + c // 3))
            options["queries"] = [takes[i % 3](c) for i, c in enumerate(contexts)]
        return conformance.paged_case(contexts, **(options | changes))

    def plan(self, case: Case, rows: Any | None = None) -> dict[str, Any]:
        """The keyword that its plan's result travels as."""
        planner = getattr(self.function, "plan", None)
        return {} if planner is None else {"plan": planner(rows or case.rows())}

    def __call__(
        self,
        case: Case,
        window: int | None = None,
        softcap: float | None = None,
        plan: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, where the kernel offers it, log-sum-exp. Fresh memory is poisoned. plan: what
        `plan` made, default a fresh one."""
        arguments = [case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens]
        if self.kind == "extend":
            arguments.append(case.query_starts)
        arguments.append(case.scale)
        if self.takes("window"):
            arguments.append(window)
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if (case.k_scale, case.v_scale) != (1.0, 1.0):
            options |= {"k_scale": case.k_scale, "v_scale": case.v_scale}
        if self.limits.returns_lse:
            options["return_lse"] = True
        with PoisonedEmpty():
            plan = self.plan(case) if plan is None else plan
            result = self.function(*arguments, **options, **plan)
        return result if self.limits.returns_lse else (result, None)


def load(spec: str, kind: str | None = None, quick: bool = False) -> Kernel:
    """`package.module:function`, `path/to/file.py:function`, or `module:Class(key=value)`. kind:
    "decode" or "extend", None = by the signature. Raises ValueError."""
    location, _, expression = spec.partition(":")
    if not expression:
        raise ValueError(f"--kernel must be module:function, got {spec!r}")
    function = _evaluate(_module(location), expression)
    parameters = frozenset(inspect.signature(function).parameters)
    kind = kind or ("extend" if "query_starts" in parameters else "decode")
    declared = getattr(function, "capabilities", None)
    if DEVICE == "cuda" and declared is not None and "cuda" not in declared.devices:
        raise ValueError(f"{spec} claims no device but {', '.join(declared.devices)}")
    limits = declared or Capabilities(
        dtypes=UNDECLARED.dtypes,
        devices=UNDECLARED.devices,
        head_dims=UNDECLARED.head_dims,
        page_sizes=UNDECLARED.page_sizes,
        max_group=UNDECLARED.max_group,
        returns_lse="return_lse" in parameters,
        softcap="softcap" in parameters,
    )
    return Kernel(spec, kind, function, limits, declared is not None, parameters, quick)


def measure(
    kernel: Kernel,
    case: Case,
    result: tuple[Tensor, Tensor | None],
    window: int | None = None,
    softcap: float | None = None,
) -> list[Deviation]:
    """Deviations of a result from dense attention: the output's, and the log-sum-exp's if there."""
    out, lse = result
    assert out.shape == case.q.shape, f"output is {tuple(out.shape)}, q {tuple(case.q.shape)}"
    assert out.dtype == case.q.dtype, f"output is {out.dtype}, q {case.q.dtype}"
    tokens = sum(case.queries)  # packed ones beyond belong to no row
    expected, expected_lse = conformance.dense_reference(case, window, softcap)
    same, _ = conformance.dense_reference(case, window, softcap, dtype=case.q.dtype)
    deviations = [conformance.deviation(out[:tokens], expected[:tokens], same[:tokens])]
    if lse is not None:
        assert lse.dtype == torch.float32, f"log-sum-exp is {lse.dtype}"
        assert lse.shape == out.shape[:2], f"log-sum-exp is {tuple(lse.shape)}"
        deviations.append(conformance.lse_deviation(lse[:tokens], expected_lse[:tokens]))
    return deviations


def _known(declared: tuple[int, ...] | None, usual: tuple[int, ...], few: tuple[int, ...]):
    """Declared values among the wanted ones; where none is, the declared ones themselves."""
    if declared is None:
        return few
    return (
        [value for value in few if value in declared]
        or [value for value in usual if value in declared]
        or list(declared)
    )


def _module(location: str) -> Any:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--kernel must name a Python file, got {location!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton and dataclasses look the module up by name
    spec.loader.exec_module(module)
    return module


def _evaluate(module: Any, expression: str) -> Callable[..., Any]:
    tree = ast.parse(expression, mode="eval").body
    options: dict[str, Any] = {}
    if isinstance(tree, ast.Call):
        options = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        tree = tree.func
    target = module
    for name in ast.unparse(tree).split("."):
        target = getattr(target, name)
    return target(**options) if inspect.isclass(target) else target
