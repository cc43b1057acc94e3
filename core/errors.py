"""Errors the core raises. Each message names the field, the rule and the value."""


class TritiumError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(TritiumError):
    """A config value or a combination of choices that cannot run."""


class RequestError(TritiumError):
    """A request that is malformed or can never be served; the engine goes on."""


class PluginError(TritiumError):
    """A plugin that does not follow the hook contract (core/hookspecs.py)."""


class PolicyError(PluginError):
    """A decision that the core refused: the message names plugin, hook, rule and value."""


class LaunchError(TritiumError):
    """An executor could not make a launch, but can make others: the launch's requests fail."""


class EngineStoppedError(TritiumError):
    """The executor failed for good; the message says why. Nothing more is served."""


def described(error: BaseException) -> str:
    """An exception in one line: type, message, and the notes that name plugin and hook."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


class InvariantError(TritiumError):
    """Strict mode found the engine's own books out of balance: a fault of the core."""
