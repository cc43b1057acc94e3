"""What the README shows works: its policy runs from outside the clone, its options exist."""

import json
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_policy_of_the_readme_runs_from_outside_the_clone(command, tmp_path):
    (block,) = re.findall(r"```python\n# mine/spare.py\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "spare.py").write_text(block)
    target = re.search(r"'(\+plugins\.spare\._target_=[\w.]+)'", README)
    assert target is not None
    outcome = command(
        "executor=fake",
        "mode.lock=off",
        "workload.num_requests=12",
        "workload.output={kind: fixed, value: 100}",
        "engine.pool_tokens=512",
        "defaults_behind.prompt_fits.growth_share=0",
        f"plugin_path={folder}",
        target.group(1),
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    asked = {row["plugin"]: row["answered"] for row in summary["plugins"]}
    assert asked["spare"] > 0
    assert summary["preemptions"] > 0
