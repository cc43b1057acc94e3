"""What a card could do at best with a case: the longer of moving its bytes at the bandwidth of a
copy and computing its products at the rate of a large matrix product, both measured in the run."""

from dataclasses import dataclass
from typing import Any

from experiments.kernels.cases import Case


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates: bytes read and written by a copy, TB/s; bfloat16 products, TFLOP/s."""

    copy_tb_s: float
    matmul_tflops: float

    def floor_us(self, case: Case) -> float:
        """Microseconds that no implementation can beat without caches."""
        return max(case.bytes / self.copy_tb_s, case.flops / self.matmul_tflops) / 1e6

    def facts(self, case: Case, us: float) -> dict[str, Any]:
        """Rates of a case done in `us`, and its share of the roofline."""
        floor = self.floor_us(case)
        return {
            "bytes": case.bytes,
            "tb_s": round(case.bytes / us / 1e6, 4),
            "tflops": round(case.flops / us / 1e6, 2),
            "floor_us": round(floor, 2),
            "roofline": round(floor / us, 4),
        }


def ratios(mine: list[float], *rivals: list[float]) -> list[float]:
    """Of each round: mine to the best of the rivals."""
    return [one / min(others) for one, *others in zip(mine, *rivals, strict=True)]
