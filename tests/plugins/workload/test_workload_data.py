"""Vendored traces are what their attribution says."""

import gzip
import hashlib
import re

from plugins.workload.common import TRACES

LISTED = re.findall(
    r"^([0-9a-f]{64})  (\S+?)(  \(content\))?$", (TRACES / "README.md").read_text(), re.M
)


def test_every_file_has_its_checksum_and_every_checksum_its_file():
    files = {
        str(path.relative_to(TRACES))
        for path in TRACES.rglob("*")
        if path.is_file() and path.name != "README.md" and path.parent.name != "LICENSES"
    }
    assert files == {name for _, name, content in LISTED if not content}
    assert len(LISTED) == len(files) + sum(name.endswith(".gz") for name in files)
    for digest, name, content in LISTED:
        stored = (TRACES / (f"{name}.gz" if content else name)).read_bytes()
        data = gzip.decompress(stored) if content else stored
        assert hashlib.sha256(data).hexdigest() == digest, name


def test_every_file_has_a_licence_whose_text_is_there():
    texts = {path.name: path.read_text() for path in (TRACES / "LICENSES").iterdir()}
    assert "Apache License" in texts["Apache-2.0.txt"]
    assert "Attribution 4.0 International" in texts["CC-BY-4.0.txt"]
    assert "MIT License" in texts["MIT-vidur.txt"]
    table = (TRACES / "README.md").read_text()
    for _, name, content in LISTED:
        if not content:
            assert re.search(
                rf"^\| `{re.escape(name)}` .*\| (Apache-2.0|CC-BY-4.0|MIT) \|", table, re.M
            )
