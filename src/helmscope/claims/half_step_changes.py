"""The changes of a quantity over the half-steps of attention and of the MLP, for the trials about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from helmscope.claims.evidence import ReplicatesInEveryCase
from helmscope.types import Half

if TYPE_CHECKING:
    import xarray as xr

HALVES = (Half.ATTENTION, Half.MLP)
NO_HALVES = "its blocks have no separate half-steps of attention and MLP"


@dataclass(frozen=True, eq=False)
class HalfStepChanges:
    """The changes over the half-steps of attention and of the MLP, each (block, prompt).

    >>> HalfStepChanges(np.ones((2, 3)), np.ones((2, 3))).in_halves
    True
    """

    attention: np.ndarray
    mlp: np.ndarray

    @classmethod
    def of(cls, values: xr.DataArray) -> Self:
        """Those of values over (depth, prompt), whose coordinate ``half`` names the half-step before each depth.

        >>> import xarray as xr
        >>> half = {"half": ("depth", ["", "attention", "mlp"])}
        >>> changes = HalfStepChanges.of(xr.DataArray([[1.0], [4.0], [2.0]], half, ("depth", "prompt")))
        >>> changes.attention.tolist(), changes.mlp.tolist()
        ([[3.0]], [[-2.0]])
        """
        change = values.diff("depth").transpose("depth", "prompt")
        attention, mlp = (change.values[(change.half == half.value).values] for half in HALVES)
        return cls(attention, mlp)

    @property
    def in_halves(self) -> bool:
        """Whether every block has both half-steps."""
        return bool(len(self.attention)) and self.attention.shape == self.mlp.shape

    def evidence(self, half: Half) -> ReplicatesInEveryCase:
        """The changes over one half-step at every block.

        >>> HalfStepChanges(np.ones((2, 3)), np.ones((2, 3))).evidence(Half.MLP).names
        ['block 0', 'block 1']
        """
        values = self.attention if half is Half.ATTENTION else self.mlp
        return ReplicatesInEveryCase(list(values), "prompts", [f"block {k}" for k in range(len(values))])
