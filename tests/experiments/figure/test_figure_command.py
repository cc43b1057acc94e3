"""`python -m experiments.figure`: files, sizes, colours, messages."""

import csv
import json

import pytest
from PIL import Image

from experiments.figure.__main__ import KINDS, main
from experiments.paper import style
from experiments.paper.style import COLOURS, Palette
from plugins.workload.synthetic import Synthetic
from tests.experiments.paper.run_folders import request, step, write_run

PAGES = {"pages_free": 2, "pages_tree": 4, "pages_evictable": 2, "pages_request": 4}
DISTRIBUTION = dict.fromkeys(("mean", "p50", "p90", "p99"), 1.0)
EXTRA = {
    "ablation": ["--baseline", "b"],
    "prediction": ["--baseline", "b"],
    "attainment": ["--ttft", "2", "--tpot", "1.5"],
    "goodput": ["--ttft", "3"],
    "simulation": ["--metric", "ttft_p50", "--metric", "output_tokens_per_s"],
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two policies, two seeds, one rate: enough for every kind."""
    folder = tmp_path_factory.mktemp("sweep")
    node = {"_target_": f"{Synthetic.__module__}.Synthetic", "num_requests": 2, "rate": 4.0}
    for policy in ("a", "b"):
        for seed in (0, 1):
            rows = [
                request("r0", 0.0, 1.0 + seed, client="x", predicted_output=3),
                request("r1", 0.5, 2.0, client="y", predicted_output=2),
            ]
            write_run(
                folder,
                policy,
                seed,
                rows,
                summary={
                    "latency": {
                        f"{k}_s": DISTRIBUTION for k in ("ttft", "itl", "e2e", "normalised")
                    },
                    "throughput": {"output_tokens_per_s": 5.0 + seed},
                    "hit_rate": 0.25,
                    "kv": {"page_size": 16},
                },
                config={"workload": node, "engine": {"pool_tokens": 64}},
                steps=[step(1, [("admitted", "r0", "p", "")], num_rows=1, waiting=0, **PAGES)],
            )
    return folder


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    """A print's resolution takes most of a figure's time."""
    monkeypatch.setattr(style, "DPI", 40)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_writes_pdf_png_and_the_numbers_drawn(kind, sweep, tmp_path):
    extra = EXTRA.get(kind, []) + ["--measured", str(sweep)] * (kind == "simulation")
    assert main([kind, str(sweep), "--out", str(tmp_path), *extra]) == 0
    assert (tmp_path / f"{kind}.pdf").read_bytes().startswith(b"%PDF")
    width = {"column": 3.3, "full": 7.0}[KINDS[kind].width]
    with Image.open(tmp_path / f"{kind}.png") as image:
        assert image.width == pytest.approx(width * 40, abs=1)
    with open(tmp_path / f"{kind}.csv", newline="") as file:
        header, *rows = list(csv.reader(file))
    assert rows
    assert all(len(row) == len(header) for row in rows)
    coloured = set() if kind == "steps" else {"a"} if "--baseline" in extra else {"a", "b"}
    assert set(json.loads((tmp_path / "colours.json").read_text())) == coloured


def test_the_same_runs_give_the_same_bytes(sweep, tmp_path):
    for name in ("one", "two"):
        assert (
            main(["attainment", str(sweep), "--ttft", "2", "--out", str(tmp_path), "--name", name])
            == 0
        )
    for kind in ("pdf", "png", "csv"):
        first, second = (tmp_path / f"{name}.{kind}" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()


def test_a_policy_keeps_its_colour_in_later_figures(tmp_path):
    first = Palette.of(tmp_path)
    first.add(["fcfs", "sjf"])
    first.save(tmp_path)
    later = Palette.of(tmp_path)
    later.add(["aged", "sjf"])
    assert [later.colour(name) for name in ("fcfs", "sjf", "aged")] == list(COLOURS[:3])
    assert later.line("sjf")["marker"] == first.line("sjf")["marker"]


def test_more_policies_than_colours_differ_in_their_line():
    palette = Palette(str(number) for number in range(20))
    styles = [tuple(palette.line(str(number)).values()) for number in range(20)]
    assert len(set(styles)) == 20


def test_what_is_wrong_is_said(tmp_path, sweep, capsys):
    assert main(["cdf", str(tmp_path / "nowhere")]) == 1
    assert "FOLDER must be a folder of runs" in capsys.readouterr().err
    assert main(["ablation", str(sweep)]) == 1
    assert "--baseline must be given" in capsys.readouterr().err
