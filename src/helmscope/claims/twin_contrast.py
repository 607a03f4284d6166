"""A trained model against its untrained twins, where theory predicts the effect for random weights too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.evidence import PairedDifferences, Replicates
from helmscope.stats.intervals import mean_interval
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence


@dataclass(frozen=True, eq=False)
class TwinContrast(ConciseRepr):
    """A statistic of a trained model minus that of its untrained twins on the same prompts, D_kp = trained_p - twin_kp.

    It has two intervals, since both prompts and random weights vary: over prompts, of the mean of D_kp over these
    twins, and over twins, of its mean over these prompts. ``trained`` is (prompt,) and ``twins`` (twin, prompt), on the
    first prompts of the model or on all of them; the trained value on the prompts of the twins is described beside
    theirs, so that the two differ by the difference.

    >>> TwinContrast(np.array([0.50, 0.51, 0.52]), np.array([[0.1, 0.2, 0.1], [0.2, 0.1, 0.1]])).sign
    1
    """

    trained: np.ndarray
    twins: np.ndarray

    @property
    def trained_on_same(self) -> np.ndarray:
        """The values of the trained model on the prompts of the twins.

        >>> TwinContrast(np.array([0.5, 0.6]), np.array([[0.1]])).trained_on_same.tolist()
        [0.5]
        """
        return np.asarray(self.trained[: self.twins.shape[1]])

    @property
    def differences(self) -> np.ndarray:
        """D_kp over (twin, prompt).

        >>> TwinContrast(np.array([0.5, 0.6]), np.array([[0.1]])).differences.tolist()
        [[0.4]]
        """
        return np.asarray(self.trained_on_same - self.twins)

    @property
    def sign(self) -> int:
        """1 or -1 if both 95 % intervals of the difference are above 0, or below 0; otherwise 0.

        >>> TwinContrast(np.array([0.1, 0.1]), np.array([[0.1, 0.1], [0.1, 0.1]])).sign
        0
        """
        intervals = [mean_interval(self.differences.mean(axis)) for axis in (0, 1)]
        if all(interval.low > 0 for interval in intervals):
            return 1
        return -1 if all(interval.high < 0 for interval in intervals) else 0

    def described(self, name: str) -> dict[str, Evidence]:
        """The statistic of the trained model on the prompts of the twins, that of the twins, and their difference with
        its two intervals.

        >>> contrast = TwinContrast(np.array([0.5, 0.6]), np.array([[0.1, 0.2], [0.2, 0.1]]))
        >>> list(contrast.described("growth"))[2]
        'growth minus that of untrained twins, over prompts'
        """
        difference = f"{name} minus that of untrained twins"
        return {
            f"{name}, trained, on the prompts of the twins": Replicates(self.trained_on_same, "prompts"),
            f"{name}, untrained twins": Replicates(self.twins.mean(1), "twins"),
            f"{difference}, over prompts": PairedDifferences(self.differences.mean(0), "prompts"),
            f"{difference}, over twins": Replicates(self.differences.mean(1), "twins"),
        }
