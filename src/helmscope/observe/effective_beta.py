"""The effective beta of attention heads on the unit sphere.

The theory's attention has weights P_ij ~ exp(beta <x_i, x_j>). The logits of a trained head, a_ij = log P_ij up to a
constant per row (q_i . k_j / sqrt(r) with rotary phases, biases and caps as the model has them), are regressed on the
inner products of the tokens x that it reads:

    beta_eff = sum_i m_i sum_j (a_ij - mean_j a_ij) (g_ij - mean_j g_ij) / sum_i m_i sum_j (g_ij - mean_j g_ij)^2

with g_ij = <x_i, x_j>, over the keys j that query i can see, without the first key, the usual attention sink. R^2 is
the share of the variance of the logits within rows that this explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.recording import Recording
from helmscope.observe.kernel import check_kernel, visible_tokens
from helmscope.observe.labels import label_attributes
from helmscope.observe.track import AT_LEAST_0, SHARE, replayed, token_weights, with_bounds
from helmscope.types import HelmscopeError, Instrument, Needs, Trajectory, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, ReplayPlan, System
    from helmscope.types.progress import ProgressOption

BOUNDS = {"r_squared": SHARE, "r_squared_without_self": SHARE, "key_count": AT_LEAST_0, "logit_spread": AT_LEAST_0}
NAMES = {
    "beta": "effective beta of a head on the unit sphere",
    "r_squared": "R^2 of a head's logits on inner products",
    "beta_without_self": "effective beta of a head, the query's own token left out",
    "r_squared_without_self": "R^2 of a head's logits on inner products, the query's own token left out",
    "key_count": "number of keys per query",
    "logit_spread": "root mean square deviation of a head's logits within rows",
}


class EffectiveBeta(Instrument):
    """Instrument: the slope of each head's logits on inner products, in every layer (or at every time) and replicate.

    ``beta`` is the slope and ``r_squared`` its R^2, both with the query's own token among the keys, where the inner
    product is 1; ``beta_without_self`` and ``r_squared_without_self`` leave it out. ``key_count`` is the mean number of
    keys per query that enter ``beta``. Queries count by their weights. Keys of attention weight 0, which are masked or
    underflowed, and the first visible key do not enter. Values are NaN where no row has two keys of different inner
    products.

    ``logit_spread`` is the root mean square deviation of the logits within rows: how sharp the head is at all, of which
    R^2 is the share that beta explains. A head with Q = K = I reads beta = d / sqrt(d_head) [Helmholtz Transformer, no.
    1]; a trained one that hardly depends on inner products has a small beta and R^2 at any sharpness.

    x are the directions of the states that attention reads. In a post-norm model the unit sphere is that of the states
    without gain and bias, ``recording.on_sphere``, for which the model is run once more; ``on_sphere`` replaces it.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> from helmscope.theory.starts import Uniform
    >>> run = integrate(SA(beta=4.0), Uniform(n=8, dim=3).sample(batch=2, seed=0), times=[0.0, 0.5])
    >>> run.replay(EffectiveBeta())["effective_beta"].beta.values.round(9).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """

    name = "effective_beta"
    needs = Needs.KERNEL

    def __init__(self, *, on_sphere: Trajectory | None = None) -> None:
        if on_sphere is not None and not isinstance(on_sphere, Trajectory):
            raise HelmscopeError(f"on_sphere is {type_with_article(on_sphere)}, but it must be a Trajectory or None")
        self.on_sphere = on_sphere
        self._recording: Recording | None = None  # a post-norm one, whose sphere is not that of its states
        self._path = on_sphere

    def unsupported_reason(self, system: System) -> str | None:
        """Why the states of a post-norm recording without gain and bias are not known."""
        self._recording = None
        if isinstance(system, Recording) and system.anatomy.post_norm and self.on_sphere is None:
            try:
                system.certificate.require("on_sphere")
            except HelmscopeError as error:
                return str(error)
            self._recording = system
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay; the sphere of a post-norm model is computed first, by one more forward pass."""
        self._path = self.on_sphere if self._recording is None else self._recording.on_sphere
        super().start(plan)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the slopes of a layer."""
        x, kernel = self._tokens(context, tensors), check_kernel(tensors.kernel)
        m = token_weights(x, None if context.weights is None else context.weights.to(x))
        usable = _usable_keys(x, context.visible)
        if kernel.ndim == 3:
            self.keep(context, _slopes(kernel, x, m, usable))
            return
        heads = [_slopes(kernel[:, head], x, m, usable) for head in range(kernel.shape[1])]
        self.keep(context, {name: torch.stack([head[name] for head in heads], 1) for name in heads[0]})

    def _tokens(self, context: ReplayContext, tensors: AttentionTensors) -> Float[Tensor, "rows n d"]:
        path = self._path
        if path is None:
            return tensors.direction.double()
        at = (path.times == context.time).nonzero()
        if not len(at) or path.states.shape[2:] != tensors.direction.shape[1:]:
            raise HelmscopeError(
                f"on_sphere has no states {tuple(tensors.direction.shape[1:])} at {path.axis} {context.time:g}, "
                "but it must be that of the system"
            )
        return path.states[int(at[0]), context.rows].to(tensors.direction.device).double()

    def result(self) -> xr.Dataset:
        """The slopes of every head (if there are several), layer and replicate."""
        measured = with_bounds(super().result(), BOUNDS)
        for name, long_name in NAMES.items():
            measured[name].attrs |= label_attributes(long_name)
        return measured


def effective_beta(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """The effective beta of every head of a system, with replicates: ``EffectiveBeta`` by one replay, on the sphere of
    the theory.

    Raises HelmscopeError for a system without attention. ``progress`` is called with the share of the work done.

    >>> from helmscope import record
    >>> measured = effective_beta(record("A", ["Once upon a time there was a cat"]))
    >>> measured.beta.dims
    ('layer', 'prompt', 'head')
    """
    instrument = EffectiveBeta()
    return replayed(system, instrument, progress)


def _usable_keys(x: Tensor, visible: Tensor | None) -> Bool[Tensor, "rows n"]:
    """The visible tokens without the first one."""
    usable = visible_tokens(x.new_zeros(*x.shape[:2], x.shape[1]), visible).clone()
    first = usable.to(torch.int8).argmax(-1, keepdim=True)
    return usable.scatter(-1, first, False)


@full_precision
def _slopes(kernel: Tensor, x: Tensor, m: Tensor, usable: Tensor) -> dict[str, Tensor]:
    """The regressions of one head, (rows) each, in float64."""
    weights, inner = kernel.double(), x @ x.mT
    keys = (weights > 0) & usable.unsqueeze(-2)
    logits = torch.log(torch.where(keys, weights, 1.0))
    others = keys & ~torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)
    beta, r_squared = _slope_within_rows(logits, inner, keys, m)
    beta_without_self, r_squared_without_self = _slope_within_rows(logits, inner, others, m)
    count = (m * keys.sum(-1)).sum(-1) / m.sum(-1)
    return {
        "logit_spread": _spread_within_rows(logits, keys, m),
        "beta": beta,
        "r_squared": r_squared,
        "beta_without_self": beta_without_self,
        "r_squared_without_self": r_squared_without_self,
        "key_count": count,
    }


def _spread_within_rows(y: Tensor, keys: Tensor, m: Tensor) -> Tensor:
    """The root mean square deviation of y within rows, over the pairs ``keys`` with weights m of the rows."""
    count = keys.sum(-1, keepdim=True)
    centered = torch.where(keys, y - (y * keys).sum(-1, keepdim=True) / count.clamp(min=1), 0.0)
    pairs = (m * count.squeeze(-1)).sum(-1)
    return ((centered**2).sum(-1) * m).sum(-1).div(torch.where(pairs > 0, pairs, torch.nan)).sqrt()


def _slope_within_rows(y: Tensor, x: Tensor, keys: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R^2 of y on x, both centered within rows, over the pairs ``keys`` with weights m of the rows."""
    count = keys.sum(-1, keepdim=True).clamp(min=1)
    y, x = (torch.where(keys, v - (v * keys).sum(-1, keepdim=True) / count, 0.0) for v in (y, x))
    xx, xy, yy = (((a * b).sum(-1) * m).sum(-1) for a, b in ((x, x), (x, y), (y, y)))
    return xy / xx, (xy * xy / (xx * yy)).clamp(max=1)
