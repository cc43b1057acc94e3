"""How far a length predictor is off: its predictions beside the lengths that came.

measured = MeasuredPredictor(predictor)   # in the place of the predictor; policies see no change
...                                       # the run
measured.error()                          # {"count": ..., "mean_absolute_tokens": ..., ...}
"""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from core.protocols import LengthPredictor
from core.records import RequestRecord
from core.request import Request
from plugins.shared.metrics import COMPLETED

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Over outputs that ended with stop or length, one sample a choice; None where undefined.

    count: samples. mean_absolute_tokens: mean of |predicted - came|. bias_tokens: mean of
    (predicted - came); positive = too long. rank_correlation: Spearman's, ties given their mean
    rank: what counts for an order; None if either side is constant. mean_tokens: of what came."""

    count: int
    mean_absolute_tokens: float | None
    bias_tokens: float | None
    rank_correlation: float | None
    mean_tokens: float | None


class MeasuredPredictor:
    """A length predictor that passes on to another and keeps what it said until the end comes."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self._open: dict[str, float] = {}
        self._predicted = array("d")
        self._came = array("d")

    def predict(self, request: Request) -> float:
        """The other's prediction; its error is taken within max_tokens, as policies use it."""
        predicted = self.predictor.predict(request)
        self._open[request.request_id] = min(predicted, float(request.params.max_tokens))
        return predicted

    def observe(self, record: RequestRecord) -> None:
        """Compare, then let the other learn. A request that was refused at once had none."""
        predicted = self._open.pop(record.request_id, None)
        if predicted is not None:
            lengths = [len(c.token_ids) for c in record.choices if c.finish_reason in COMPLETED]
            self._predicted.extend([predicted] * len(lengths))
            self._came.extend(lengths)
        self.predictor.observe(record)

    def error(self) -> dict[str, float | int | None]:
        """The fields of PredictionError, for a summary."""
        return error_of_all([self])

    @property
    def samples(self) -> tuple[Floats, Floats]:
        """Predicted and came, so far."""
        return np.array(self._predicted), np.array(self._came)


def error_of_all(predictors: Sequence[MeasuredPredictor]) -> dict[str, float | int | None]:
    """The fields of PredictionError over all that these said."""
    samples = [predictor.samples for predictor in predictors]
    predicted, came = (np.concatenate(side) for side in zip(*samples, strict=True))
    return asdict(prediction_error(predicted, came))


def prediction_error(predicted: Floats, came: Floats) -> PredictionError:
    """Errors of predictions float64 [n] of lengths float64 [n]."""
    if not len(predicted):
        return PredictionError(0, None, None, None, None)
    off = predicted - came
    return PredictionError(
        count=len(off),
        mean_absolute_tokens=float(np.abs(off).mean()),
        bias_tokens=float(off.mean()),
        rank_correlation=rank_correlation(predicted, came),
        mean_tokens=float(came.mean()),
    )


def rank_correlation(left: Floats, right: Floats) -> float | None:
    """Spearman's: Pearson's of the ranks; None if one side has a single value."""
    ranks = [_mean_ranks(side) for side in (left, right)]
    first, second = (side - side.mean() for side in ranks)
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None


def _mean_ranks(values: Floats) -> Floats:
    """1 .. n, equal values sharing the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks
