"""A tokenizer from its file."""

import os
from typing import Any

from core.errors import ConfigError


def read_tokenizer(field: str, name: str) -> Any:
    """The tokenizer of a folder or a name, without torch. Raises ConfigError naming the field of
    the config."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(os.path.expanduser(name))
    except (OSError, ValueError) as error:
        rule = f"a folder or a name with a tokenizer.json ({error})"
        raise ConfigError(f"{field} must be {rule}, got {name!r}") from error
