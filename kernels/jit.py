"""What every Triton kernel here shares: the interpreter's rules and small device functions.

Under TRITON_INTERPRET=1 kernels run on a CPU, one program after another. bfloat16 arithmetic is
silently wrong there (it works on the raw 16 bits; only casts are right), so kernels take a constant
UPCAST, set by `upcast(dtype)`, and cast operands to float32 when it is true.
"""

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels were defined for the interpreter: fixed when Triton is imported."""

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
"""Where Triton kernels run, in torch's words."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands of `dot` must be cast to float32 first: in the interpreter, half types."""
    return INTERPRETED and dtype != torch.float32


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Where a program begins. EARLY: it was launched before the kernel ahead of it ended (see
    kernels/launch.py), and waits here for what that wrote. Only then may the kernel behind start:
    what was written two launches ago is there for it without waiting."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b, accumulated in float32; float32 operands are not rounded to TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap) in float32."""
    x = scores / cap
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): saturates to +-1 without a NaN at either end, and cancels
    # near 0, where the first terms of its series are exact to a part in 3 million.
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return cap * tl.where(tl.abs(x) < 0.25, near, far)
