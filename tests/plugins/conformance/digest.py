"""python -m tests.plugins.conformance.digest SPEC [ARGUMENTS] prints a digest of a policy's run,
to be compared between processes that hash strings differently."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.plugins.conformance.play import played
from tests.plugins.conformance.rules import BrokenRuleError, NotCheckedError
from tests.plugins.conformance.subject import Subject, load
from tests.plugins.conformance.traffic import labels

ROOT = Path(__file__).resolve().parents[3]


def same_in_every_process(subject: Subject) -> None:
    """Runs do not depend on the order in which sets of strings are walked."""
    digests = {_in_a_process(subject, hash_seed) for hash_seed in ("1", "2", "3")}
    if len(digests) > 1:
        text = (
            "runs of one seed differ between processes: is a set of strings walked, or hash used?"
        )
        raise BrokenRuleError("determinism", subject, subject.hooks[0], text)


def _in_a_process(subject: Subject, hash_seed: str) -> str:
    command = [sys.executable, "-m", __spec__.name, subject.name]
    if subject.arguments:
        command.append(subject.arguments)
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise NotCheckedError(f"a process of its own failed: {done.stderr.strip()[-200:]}")
    return done.stdout


def main() -> None:
    """The digest of one run."""
    subject = load(*sys.argv[1:])
    run = played(subject, labels(0), checks=False)
    digest = hashlib.sha256(repr(run.facts).encode()).hexdigest()
    sys.stdout.write(f"{digest}\n")


if __name__ == "__main__":
    main()
