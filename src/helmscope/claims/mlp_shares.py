"""The antisymmetric shares of a model's MLPs and what its MLPs write, from one replay, for the trials about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.claims.evidence import PremiseImpossible, ReplicatesInEveryCase
from helmscope.observe.mlp_jacobian import MlpJacobian
from helmscope.types import Instrument, Needs

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from helmscope.models.recording import Recording
    from helmscope.types import MlpTensors, ReplayContext

NOTHING_WRITTEN = "the MLPs write nothing, so that the Jacobian of what they write is 0 and has no share"


class WrittenByMlp(Instrument):
    """Instrument: the largest entry of what each MLP writes, under the edits of the recording.

    >>> WrittenByMlp().name
    'written_by_mlp'
    """

    name = "written_by_mlp"
    needs = Needs.MLP_WRITE

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the largest entry."""
        assert tensors.write is not None
        self.keep(context, {"largest": tensors.write.abs().amax((1, 2))})


@dataclass(frozen=True, eq=False)
class MlpShares:
    """The Measurement of ``MlpJacobian`` and whether the MLPs ``write`` anything.

    >>> from helmscope.models.record import record
    >>> MlpShares.of(record("A", ["Once upon a time", "The cat sat"])).writes
    True
    """

    measured: xr.Dataset
    writes: bool

    @classmethod
    def of(cls, recording: Recording) -> MlpShares:
        """One replay of a recording.

        >>> from helmscope.models.record import record
        >>> MlpShares.of(record("A", ["Once upon a time", "The cat sat"])).shares("antisymmetric_share").shape
        (12, 2)
        """
        seen = recording.replay(MlpJacobian(), WrittenByMlp())
        return cls(seen["mlp_jacobian"], bool((seen["written_by_mlp"].largest > 0).any()))

    def shares(self, name: str) -> np.ndarray:
        """A quantity over (layer, prompt).

        >>> from helmscope.models.record import record
        >>> float(MlpShares.of(record("A", ["Once upon a time"])).shares("antisymmetric_share").max()) < 1
        True
        """
        values: np.ndarray = self.measured[name].transpose("layer", "prompt").values
        return values

    def at_every_half_step(self, name: str = "antisymmetric_share") -> ReplicatesInEveryCase | PremiseImpossible:
        """The values at every MLP half-step, or why there are none.

        >>> from helmscope.models.record import record
        >>> MlpShares.of(record("A", ["Once upon a time", "The cat sat"])).at_every_half_step().names[0]
        'MLP of layer 0'
        """
        if not self.writes:
            return PremiseImpossible(NOTHING_WRITTEN)
        return ReplicatesInEveryCase(
            list(self.shares(name)), "prompts", half_steps(self.measured.layer.values.tolist())
        )


def half_steps(layers: list[int]) -> list[str]:
    """The names of the MLP half-steps.

    >>> half_steps([0, 1])
    ['MLP of layer 0', 'MLP of layer 1']
    """
    return [f"MLP of layer {layer}" for layer in layers]
