"""A variant is tried in another process, once, and no failure of it reaches this one."""

import logging

import pytest
import triton

from kernels import probe


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder with a module `tried`, and a cache of its own."""
    monkeypatch.setattr(probe, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(probe.Path(probe.__file__).parent.parent))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    (tmp_path / "tried.py").write_text(
        "import os, time\n"
        "def run(how):\n"
        "    if how == 'fails': raise RuntimeError('PassManager::run failed')\n"
        "    if how == 'crashes': os.abort()\n"
        "    if how == 'hangs': time.sleep(600)\n"
    )
    probe._compiles.cache_clear()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("works", None),
        ("fails", "PassManager::run failed"),
        ("crashes", "does not compile"),
        ("hangs", "no end after"),
    ],
)
@pytest.mark.usefixtures("module")
def test_compiles_answers_and_remembers(caplog, monkeypatch, how, message):
    limit = 0.5 if how == "hangs" else 60.0
    tries = []

    def counted(*arguments):
        tries.append(arguments)
        return attempt(*arguments)

    attempt = probe._try
    monkeypatch.setattr(probe, "_try", counted)
    with caplog.at_level(logging.WARNING):
        assert probe.compiles("tried:run", {"how": how}, limit) is (message is None)
    assert message is None or message in caplog.text
    probe._compiles.cache_clear()
    assert probe.compiles("tried:run", {"how": how}, limit) is (message is None)
    assert len(tries) == 1
