"""Numbers keep their type however they are written."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conf.instantiate import build

PROMPTS = "plugins.workload.prompts.Prompts"


def resolved(tmp_path: Path) -> dict:
    (folder,) = (tmp_path / "outputs").iterdir()
    return yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.parametrize("value", ["1e-4", 1e-4, "0.0001"])
def test_float_argument_is_a_number_however_it_is_written(value):
    built = build("workload", {"_target_": PROMPTS, "rate": value})
    assert built.rate == pytest.approx(1e-4)
    assert isinstance(built.rate, float)


def test_command_line_numbers_are_numbers(probe, tmp_path):
    arguments = ["plugins.mine.weight=.5", "engine.max_num_seqs=1_000", "engine.pool_tokens=6_4"]
    arguments.append('engine.max_num_batched_tokens="64"')
    assert probe("+policy=mine", *arguments).code == 0
    config = resolved(tmp_path)
    assert config["engine"]["max_num_seqs"] == 1000
    assert config["engine"]["pool_tokens"] == 64
    assert config["engine"]["max_num_batched_tokens"] == 64
    assert config["plugins"]["mine"]["weight"] == 0.5


class Holder:
    def __init__(self, ids: tuple[int, ...] = (), text: str = "", one: float | None = None):
        self.values = ids, text, one


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"ids": [3, 4]}, ((3, 4), "", None)),
        ({"text": "${not} {an: interpolation}"}, ((), "${not} {an: interpolation}", None)),
        ({"text": 42, "one": 2}, ((), "42", 2.0)),
    ],
)
def test_arguments_take_the_annotated_type(monkeypatch, arguments, values):
    monkeypatch.setitem(sys.modules, "holder", SimpleNamespace(Holder=Holder))
    assert build("x", {"_target_": "holder.Holder", **arguments}).values == values


def test_scientific_number_in_yaml_is_a_number(probe, plugin_folder, tmp_path):
    (plugin_folder / "conf" / "policy" / "light.yaml").write_text(
        "# @package plugins.mine\n_target_: outside.Mine\nweight: 1e-4\n"
    )
    assert probe("+policy=light").code == 0
    assert resolved(tmp_path)["plugins"]["mine"]["weight"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "text",
    [
        'Say "hi", {you} [a,b] = 1',
        r"C:\dir \alpha",
        '"Hi" she said',
        "cost ${y}",
        "it's" + chr(92),
    ],
)
def test_prompt_may_hold_any_character(command, text):
    outcome = command("mode=generate", f"prompt={text}", "--cfg", "job", "-p", "prompt")
    assert (outcome.code, outcome.out) == (0, text + "\n")
