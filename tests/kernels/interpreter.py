"""Triton's interpreter, faster: it patches `triton.language` anew for every call of a device
function, though the kernel that makes it has done so. That takes a quarter of the interpreter's
time."""

from typing import Any


class Nothing:
    """The scope of a call that patched nothing."""

    def restore(self) -> None:
        """Nothing is to be undone."""


class Patcher:
    """`patch`, once for each module of a kernel's run. It goes on where a function sees a module
    that is not patched yet, as those of Triton's own library do."""

    def __init__(self, patch: Any, modules: tuple[Any, ...]) -> None:
        self.patch = patch
        self.modules = modules
        self.patched: set[str] = set()

    def __call__(self, fn: Any) -> Any:
        seen = {
            one.__name__ for one in fn.__globals__.values() if any(one is m for m in self.modules)
        }
        if seen and seen <= self.patched:
            return Nothing()
        scope, outermost = self.patch(fn), not self.patched
        self.patched |= seen
        return Outermost(scope, self) if outermost else scope


class Outermost:
    """The scope of a kernel's run."""

    def __init__(self, scope: Any, patcher: Patcher) -> None:
        self.scope = scope
        self.patcher = patcher

    def restore(self) -> None:
        """Undo it; the next kernel begins anew."""
        self.patcher.patched.clear()
        self.scope.restore()


def patch_once() -> None:
    """Let the interpreter of this process do so, if it is a version that patches by this name."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None and not isinstance(patch, Patcher):
        interpreter._patch_lang = Patcher(patch, (tl, tl.core))  # type: ignore[attr-defined]
