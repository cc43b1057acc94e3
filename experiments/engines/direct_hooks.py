"""What an engine would be without a hook manager: to measure what that costs."""

from typing import Any

from core.hooks import Hooks


class DirectHooks:
    """Hooks as the engine asks them in a step, each a plain call of the plugin in charge."""

    def __init__(self, hooks: Hooks) -> None:
        self.who, self.displaces = hooks.who, hooks.displaces
        self.oracle, self.steady = hooks.oracle, hooks.steady
        self._answers = {
            hook: (getattr(hooks.registered[name].plugin, hook), name)
            for hook, name in hooks.in_charge().items()
            if hook.startswith("decide_")
        }

    def decide(self, hook: str, query: object) -> tuple[Any, str]:
        """The answer and whose it is."""
        answer, name = self._answers[hook]
        return answer(query=query), name

    def notify(self, hook: str, query: object) -> None:
        """Nobody observes."""
