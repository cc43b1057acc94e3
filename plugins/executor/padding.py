"""Sizes to which launches are padded on a GPU, but those that a graph of one-token rows stands for.

For a matrix product with a number of rows that it has not met, the library picks a kernel and loads
it, which takes the host up to tens of milliseconds. So numbers of tokens and of logits are rounded
up to few sizes, each of which is multiplied once before the first request."""

from bisect import bisect_left
from typing import Any

import torch

from plugins.executor.graphs import graph_sizes

FINE = 1024
"""Tokens up to which sizes are those of graphs; above, a tile of the library's kernels apart."""
STEP = 128


class Padding:
    """Numbers of tokens and logits of a launch of at most `largest` tokens."""

    def __init__(self, largest: int) -> None:
        self.sizes = graph_sizes(min(largest, FINE))
        self.sizes += [*range(FINE + STEP, largest, STEP), largest] if largest > FINE else []

    def __call__(self, count: int) -> int:
        """The least size that holds `count`; `count` itself if it is 0 or beyond all sizes."""
        if not count:
            return 0  # a launch that samples nothing would else read the output head for one row
        at = bisect_left(self.sizes, count)
        return count if at == len(self.sizes) else self.sizes[at]

    @torch.inference_mode()
    def meet(self, model: Any, num_rows: int) -> None:
        """Multiply by every size once, where the model has `multiply_once`
        (plugins/model/decoder.py). num_rows: the most that sample."""
        if hasattr(model, "multiply_once"):
            rows = self.sizes[: bisect_left(self.sizes, num_rows) + 1]
            model.multiply_once(self.sizes, rows)
