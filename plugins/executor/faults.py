"""What a failed launch means for others: out of memory and refused arguments concern it alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.errors import ConfigError, LaunchError, RequestError
from core.launch import Launch

ADVICE = " If reserved but unallocated memory is large"  # what torch adds for programmers
NO_MEMORY = "can't allocate memory"  # of torch's CPU allocator, in a RuntimeError


def fails_alone(error: Exception) -> bool:
    """Whether an error of a launch concerns no other: memory ran out, or arguments were refused.
    Errors of CUDA are RuntimeErrors, and after one nothing on the device can be trusted."""
    refused = isinstance(error, (torch.OutOfMemoryError, MemoryError, ValueError, RequestError))
    return refused or NO_MEMORY in str(error)


def launch_error(error: Exception, launch: Launch, device: torch.device) -> LaunchError:
    """What the launch's requests are told of an error that fails alone. Waits for what was started
    of the launch; raises RuntimeError if the device is lost after all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rows, tokens = len(launch.row_ids), int(launch.num_tokens.sum())
    reason = str(error).partition(ADVICE)[0]
    return LaunchError(
        f"a launch of {rows} rows and {tokens} tokens failed: {type(error).__name__}: {reason}"
    )


def out_of_memory(error: BaseException | None) -> str:
    """What torch said if memory ran out, here or in an error that this one followed; else empty."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return str(error).partition(ADVICE)[0] if error is not None else ""


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError naming `what` and `remedy` if memory runs out in the block."""
    try:
        yield
    except Exception as error:
        said = out_of_memory(error)
        if not said:
            raise
        raise ConfigError(f"{what} must fit the device's memory: {remedy}; {said}") from error
