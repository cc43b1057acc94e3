"""A user's own copy of a published trace: is it the one that the results name?"""

import gzip
import hashlib
from pathlib import Path

from core.config import require
from core.errors import ConfigError


def checked(path: str | None, digest: str | None, known: dict[str, str]) -> Path:
    """The path, if the file's checksum is right; gzipped, that of its content.

    digest: what it must be, or None: one of `known` (file name -> digest). 64 hex digits are a
    sha256, fewer the beginning of a git blob id. Raises ConfigError for a missing file, and for
    another one with the digests expected and found.
    """
    if path is None:
        raise ConfigError(f"workload.path must be given: your copy of {' or '.join(known)}")
    file = Path(path).expanduser()
    require(file.is_file(), "workload.path", "an existing file", path)
    wanted = {"workload.checksum": digest} if digest else known
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    found = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "git blob": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    for one in wanted.values():
        kind = "sha256" if len(one) == 64 else "git blob"
        if found[kind].startswith(one.lower()):
            return file
    expected = " or ".join(f"{one} ({name})" for name, one in wanted.items())
    actual = ", ".join(f"{kind} {one}" for kind, one in found.items())
    raise ConfigError(f"the checksum of {file} must be {expected}, got {actual}")
