"""The config is composed twice only where it may say hydra.mode."""

import pytest
from omegaconf import OmegaConf

from conf.overrides import ROOT, may_set_mode


@pytest.mark.parametrize(
    ("arguments", "may"),
    [
        (["mode=simulate", "+policy=sjf", "~sinks.figures", "hydra.run.dir=a"], False),
        (["+experiment=victims"], True),
        (["hydra.mode=MULTIRUN"], True),
        (["+hydra/launcher=joblib"], True),
        (["plugin_path=mine"], True),
        (["-m", "seed=1,2"], True),
    ],
)
def test_who_may_set_it(arguments, may):
    assert may_set_mode(arguments) is may


def test_no_file_but_experiments_and_hydras_own_sets_it():
    for file in sorted(ROOT.rglob("*.yaml")):
        if file.relative_to(ROOT).parts[0] not in ("experiment", "hydra"):
            assert OmegaConf.select(OmegaConf.load(file), "hydra.mode") is None, file
