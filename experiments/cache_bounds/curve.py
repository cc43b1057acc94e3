"""Hit rate against cache size: LRU, its admission by an oracle, MIN, and what no cache can pass.

python -m experiments.cache_bounds.curve    # writes hit_rate.png beside this file
"""

from pathlib import Path

from experiments.cache_bounds.replay import mooncake, uses_of
from experiments.cache_bounds.table import TRACES
from experiments.paper.style import DPI, FULL_IN, Palette, drawing, legend, log_ticks, tidy
from plugins.shared.cache_bounds import prefix_trace, trace_bounds
from plugins.workload.mooncake import BLOCK_TOKENS

CAPACITIES = (500, 1_000, 2_000, 3_000, 4_500, 6_000, 8_000, 10_000, 15_000, 20_000, 30_000)
MILLION = 1_000_000
HEIGHT_IN = 2.6


def main() -> None:
    """One panel a trace."""
    palette = Palette()
    with drawing(FULL_IN, HEIGHT_IN) as figure:
        for axes, name in zip(figure.subplots(1, len(TRACES)), TRACES, strict=True):
            trace = prefix_trace(uses_of(mooncake(name)))
            bounds = [trace_bounds(trace, capacity) for capacity in CAPACITIES]
            curves = {
                "infinite": [one.infinite for one in bounds],
                "MIN": [one.belady_min for one in bounds],
                "oracle admission + LRU": [one.oracle_admission_lru for one in bounds],
                "LRU": [one.lru for one in bounds],
            }
            sizes = [capacity * BLOCK_TOKENS / MILLION for capacity in CAPACITIES]
            for label, hits in curves.items():
                rates = [one.rate(found) for one, found in zip(bounds, hits, strict=True)]
                axes.plot(sizes, rates, label=label, **palette.line(label))
            axes.set_xscale("log")
            log_ticks(axes.xaxis)
            axes.set_ylim(0)
            axes.set_xlabel(f"cache, million tokens (Mooncake {name})")
            axes.set_ylabel("hit rate")
            tidy(axes)
        legend(figure)
        figure.savefig(Path(__file__).with_name("hit_rate.png"), dpi=DPI)


if __name__ == "__main__":
    main()
