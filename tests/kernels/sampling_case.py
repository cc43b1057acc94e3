"""Rows for the sampling kernels, and the torch sampler's answers for them."""

import numpy as np
import torch

from core.launch import RowSetup
from core.request import SamplingParams
from kernels.sampling import SamplingConfig
from kernels.vocabulary import ScanConfig
from plugins.executor.filters import Filters, thresholds
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import plan_samples, sample
from plugins.executor.upload import upload

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = SamplingConfig(scan=ScanConfig(chunk=512), capacity=512, tile=16, num_warps=4)
NARROW = SamplingConfig(scan=ScanConfig(chunk=256), capacity=32, tile=16, pivots=8, num_warps=4)
"""So little room that most searches need passes over the row."""

MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(top_k=5),
    SamplingParams(top_k=40, top_p=0.8),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, temperature=1.5),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=300, top_p=0.95, min_p=0.01),
    SamplingParams(top_k=3, temperature=3.0),
)


def random_logits(rows, vocab_size, spread=3.0, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


class Case:
    """Row i draws by params[i % len(params)] at output position 3 i, with seeds of its own."""

    def __init__(self, logits, params, prompt=(0,), outputs=(), ends=()):
        count, self.vocab_size = logits.shape
        self.logits = logits
        self.rows = SamplingRows(count, self.vocab_size)
        self.ids = np.arange(count)
        self.setups = [
            RowSetup(
                row,
                params[row % len(params)],
                len(prompt),
                np.array([*prompt, *outputs], np.int32),
                row * 977 - 5 * 2**60,
                row % 3,
                tuple(ends),
            )
            for row in range(count)
        ]
        for setup in self.setups:
            self.rows.set(setup)

    def penalties(self, device):
        counts = PenaltyCounts(len(self.ids), self.vocab_size, device)
        counts.reset(self.setups)
        return counts

    def sample(self, kernels=None, device=CPU):
        """The sampler's tokens and entries, and the penalty counts afterwards."""
        plan = plan_samples(self.rows, self.ids, 3 * self.ids, for_kernels=kernels is not None)
        counts = self.penalties(device)
        logits = self.logits.to(device, copy=True)
        samples = sample(logits, plan, upload(plan.arrays, device), counts, kernels)
        return samples, counts.tables()[0]

    def columns(self):
        """The rows' parameters on the device."""
        plan = plan_samples(self.rows, self.ids, 3 * self.ids, for_kernels=True)
        inputs = upload(plan.arrays, DEVICE)
        names = ("temperature", "top_k", "top_p", "min_p_log", "seed", "position", "choice")
        return {name: inputs[name] for name in names}

    def kept(self, device_thresholds):
        """Tokens kept by given thresholds, and by the torch filters: bool [n, vocab_size]."""
        peak = self.logits.amax(-1, keepdim=True)
        temperature = torch.from_numpy(self.rows.temperature).float().unsqueeze(1)
        scores = (self.logits - peak) / temperature
        plan = plan_samples(self.rows, self.ids, 3 * self.ids)
        inputs = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        names = ("k_rows", "k_top_k", "k_top_p", "p_rows", "p_top_p", "min_p_log")
        filters = Filters(max_k=plan.max_top_k, **{name: inputs[name] for name in names})
        least = thresholds(scores, filters).unsqueeze(1)
        return scores >= device_thresholds.cpu().unsqueeze(1), scores >= least
