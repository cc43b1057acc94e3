"""Where runs write: a new folder each; the jobs of a sweep in folders named by their config."""

import hashlib
import json
import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

LABEL_CHARS = 40
UNHASHED = ("hydra", "progress")


def register_resolvers() -> None:
    """`${new_folder:PARENT}` and `${job_folder:}` for config.yaml, `${jobs_at_once:THREADS}` for
    launchers. Repeating it changes nothing."""
    OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
    OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)


def new_folder(parent: str) -> str:
    """Create PARENT/<time>-<random id> and return its path. Never one that exists already."""
    while True:
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
        folder = Path(parent).absolute() / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)


def jobs_at_once(threads: int | str) -> int:
    """Jobs that this machine's cores hold where each takes so many threads, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(cores // int(threads), 1)


def job_folder(*, _root_: DictConfig) -> str:
    """`<policy>-s<seed>-<hash>`: the same resolved config finds the same folder again."""
    task = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key not in UNHASHED])
    plain = OmegaConf.to_container(task, resolve=False, enum_to_str=True)
    text = json.dumps(plain, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{policy_label(plain)[:LABEL_CHARS]}-s{_root_.seed}-{digest}"


def policy_label(config: Any) -> str:
    """The flat label that tables group by: the names under `plugins`, sorted, or `default`."""
    return "+".join(sorted(str(name) for name in config.get("plugins") or {})) or "default"
