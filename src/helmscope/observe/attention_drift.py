"""The mean tangential drift of attention, head by head.

    drift_h(i) = |T_i W_O^h m_i^h| / |y_i|,    m_i^h = sum_j P^h_ij v^h_j

is the angle, in radians to first order, by which head h turns token i: T_i projects to the tangent space at the
direction x_i of the state y_i. It includes the head's share of the bias of the values, which can be moved to the bias
of the output projection without changing the model; only the drift of the whole write, ``total``, does not depend on
that choice. The drift ratio |T m| / sqrt(tr T Sigma_A T) compares the drift with the token-sampling covariance of the
same head (``observe/attention_diffusion.py``): small where the mean vanishes although the values scatter. Source:
[Helmholtz Transformer, no. 11].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.observe.head_moments import HEADS_NEED, HeadMoments
from helmscope.observe.labels import label_attributes
from helmscope.observe.track import AT_LEAST_0, replayed, token_mean, token_weights, with_bounds
from helmscope.types import Instrument

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "drift": "mean tangential drift of a head (radians per layer)",
    "drift_ratio": "drift of a head over the square root of tr Sigma_A",
    "total_drift": "mean tangential drift of attention (radians per layer)",
    "total_drift_ratio": "drift of attention over the square root of tr Sigma_A, summed over heads",
    "norm_of_mean_drift": "norm of the mean over tokens of the tangential drift of attention",
}
BOUNDS = dict.fromkeys(NAMES, AT_LEAST_0)
COORDINATES = "direction of the state that attention reads; writes are divided by its length |y|"


class AttentionDrift(Instrument):
    """Instrument: the mean tangential drift of each head in every layer (at every time of a simulation), averaged over
    the tokens of a prompt by their weights.

    ``drift`` and ``drift_ratio`` are per head; ``total_drift`` is the length of the whole write of attention, biases
    included, and ``total_drift_ratio`` compares it with Sigma_A summed over heads, as if they drew independently.
    ``norm_of_mean_drift`` is the norm of the average over tokens of the drift vectors, which is small where tokens are
    pushed in different directions. Ratios are averaged over the tokens with Sigma_A > 0, NaN where there are none
    (identical tokens, rows of entropy 0, blocks that write nothing). In a flow, a drift is a velocity.

    The cost is that of the attention weights once more. Raises HelmscopeError for a system whose heads write through a
    norm, or are hidden.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64).expand(1, 2, 2), times=[0.0])
    >>> measured = run.replay(AttentionDrift())["attention_drift"]
    >>> measured.drift.item(), round(measured.drift_ratio.item(), 4)  # m = (1/2, 1/2), tr T Sigma_A T = 1/8
    (0.5, 1.4142)
    """

    name = "attention_drift"
    needs = HEADS_NEED

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the drifts of a layer."""
        moments = HeadMoments.of(context, tensors)
        weights = token_weights(tensors.state, context.weights)
        per_head = weights.unsqueeze(1).expand(moments.drift.shape)
        trace = moments.sampling / 2
        heads = {
            "drift": token_mean(moments.drift, per_head * torch.isfinite(moments.drift)),
            "drift_ratio": mean_ratio(moments.drift, trace, per_head),
        }
        values = {
            "total_drift": token_mean(moments.total_drift, weights),
            "total_drift_ratio": mean_ratio(moments.total_drift, trace.sum(1), weights),
            "norm_of_mean_drift": torch.linalg.vector_norm(token_mean(moments.moved.mT, weights.unsqueeze(1)), dim=-1),
        }
        axes = ("head",) if moments.has_heads else ()
        self.keep(context, {name: moments.dropped_heads(value) for name, value in heads.items()}, axes=axes)
        self.keep(context, values)

    def result(self) -> xr.Dataset:
        """The drifts of every head (if there are several), layer and replicate."""
        return described(with_bounds(super().result(), BOUNDS), NAMES)


def attention_drift(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """The mean tangential drift of attention, with replicates: ``AttentionDrift`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> attention_drift(record("A", ["Once upon a time there was a cat"])).drift.dims
    ('layer', 'prompt', 'head')
    """
    instrument = AttentionDrift()
    return replayed(system, instrument, progress)


def mean_ratio(
    length: Float[Tensor, "*batch n"], trace: Float[Tensor, "*batch n"], weights: Float[Tensor, "*batch n"]
) -> Float[Tensor, "*batch"]:
    """The mean over tokens of length / sqrt(trace), over those with a trace above 0; NaN if there are none.

    >>> mean_ratio(torch.tensor([2.0, 1.0]), torch.tensor([4.0, 0.0]), torch.ones(2))
    tensor(1.)
    """
    defined = trace > 0
    ratio = length / torch.where(defined, trace, 1.0).sqrt()
    return token_mean(ratio, weights * defined)


def described(measured: xr.Dataset, names: dict[str, str]) -> xr.Dataset:
    """A Measurement with the long names of its quantities, and the coordinates as an attribute.

    >>> import xarray as xr
    >>> described(xr.Dataset({"drift": ("prompt", [0.1])}), NAMES).drift.attrs["long_name"]
    'mean tangential drift of a head'
    """
    for name in names.keys() & measured.keys():
        measured[name].attrs |= label_attributes(names[name])
    return measured.assign_attrs(frame=COORDINATES)
