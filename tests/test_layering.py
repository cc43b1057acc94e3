"""Imports point one way, the core stays small, and what a run does not need is not imported."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"core", "plugins", "kernels", "conf", "experiments", "hydra_plugins", "tests", "run"}
CORE_LINES = 3000
SHARED = "plugins.shared."
STANDARD = sys.stdlib_module_names


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no sources in {folder}"
    return files


def test_core_imports_only_standard_library_numpy_and_pluggy():
    allowed = STANDARD | {"numpy", "pluggy", "core"}
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources("core")
        for name in imported(file)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_plugins_import_of_ours_only_core_their_own_family_and_what_families_share():
    wrong = []
    for file in sources("plugins"):
        family = ".".join(file.relative_to(ROOT).with_suffix("").parts[:2])
        for name in imported(file):
            ours = name.split(".")[0] in OURS - {"core"}
            if ours and not f"{name}.".startswith((f"{family}.", SHARED)):
                wrong.append(f"{file.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_kernels_stand_alone():
    allowed = STANDARD | {"torch", "triton", "kernels"}
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources("kernels")
        for name in imported(file)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_kernels_package_is_empty():
    """transformers may import a top-level module of this name to read a version."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_nothing_imports_experiments():
    folders = ("core", "plugins", "kernels", "conf")
    wrong = [
        str(file)
        for folder in folders
        for file in sources(folder)
        if any(name.split(".")[0] in ("experiments", "tests") for name in imported(file))
    ]
    assert wrong == []


def test_hydra_finds_its_plugin_and_nothing_else_needs_it():
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("core", "plugins", "kernels", "conf", "experiments")
        for file in sources(folder)
        for name in imported(file)
        if name.split(".")[0] == "hydra_plugins"
    ]
    allowed = OURS - {"conf", "core"}
    wrong += [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources("hydra_plugins")
        for name in imported(file)
        if name.split(".")[0] in allowed
    ]
    assert wrong == []


def test_core_stays_under_its_line_budget():
    lines = sum(
        1
        for file in sources("core")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    )
    assert lines < CORE_LINES


def test_run_stays_under_80_lines():
    assert len((ROOT / "run.py").read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        # a real model on the CPU: no Triton
        (["+experiment=smoke", "workload.num_requests=2"], ["triton"]),
        # scripted tokens: no torch, and none of what imports it
        (
            ["executor=fake", "workload.num_requests=4"],
            ["torch", "triton", "transformers", "wandb"],
        ),
    ],
    ids=["torch", "fake"],
)
def test_run_leaves_modules_unimported(tmp_path: Path, arguments: list[str], absent: list[str]):
    script = (
        "import sys; import run; code = run.command_line(run.job);"
        f"print('CODE', code, [name for name in {absent} if name in sys.modules])"
    )
    quiet = ["progress=false", "~sinks.figures", "device=cpu"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, *quiet],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CODE 0 []" in done.stdout, done.stdout + done.stderr
