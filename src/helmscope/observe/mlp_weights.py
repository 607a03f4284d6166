"""The weights of MLPs: coherence of what neurons read, alignment with what they write, and how many are switched off.

With v_j the rows of W_in (of the gate, if gated) and w_j the columns of W_out [Helmholtz Transformer, open questions]:

    coherence_max, coherence_mean   largest and mean |cos(v_i, v_j)| over i != j
    alignment                       cos(w_j, v_j), the mean over neurons; alignment_absolute: of its absolute value
    gate sparsity                   share of neurons whose pre-activation is below a threshold at a token

How to read it. References of the coherence: ``welch_bound``, which no h rows in R^d can go below, and
``coherence_gaussian``, that of Gaussian rows of the same shape. ``neuron_alignment_absolute_null`` pairs w and v at
random. For an ungated MLP |cos| = 1 for every neuron makes it a gradient, whatever the coherence; low coherence only
makes the cross terms of the split small.
How it fails. cos depends on the coordinates: by default the weights are those of the model, which read the norm's
output; ``fold_norm=True`` takes those that read unit vectors. Constant neurons (v = 0) have no cos and are left out;
``constant_neuron_count`` counts them. A neuron below the threshold is not off for every activation: GELU and SiLU are
not 0 there.
Cost. O(h^2 d) per layer, no forward pass; gate sparsity takes one replay.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP, Force, affine
from helmscope.geometry.arithmetic import full_precision
from helmscope.models.experts import MixtureOfExperts
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_force import MlpForce, unit_points
from helmscope.observe.track import SHARE, check_system, replayed, token_mean, token_weights, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    Instrument,
    Needs,
    as_measurement,
    check_integer,
    check_progress,
    check_real,
    type_with_article,
)

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import MlpTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

LABELS = {
    "coherence_max": "largest |cos| of two rows of W_in",
    "coherence_mean": "mean |cos| of two rows of W_in",
    "coherence_gaussian": "largest |cos| of two Gaussian rows of the same shape",
    "welch_bound": "lower bound on the largest |cos| of so many rows",
    "neuron_alignment_mean": "mean cosine of a neuron's input and output weights",
    "neuron_alignment_absolute": "mean |cosine| of a neuron's input and output weights",
    "neuron_alignment_absolute_null": "mean |cos| of input and output weights of different neurons",
    "constant_neuron_count": "constant neurons: v = 0",
    "neuron_alignment": "cosine of a neuron's input and output weights",
    "neuron_coherence": "largest |cos| of what a neuron and another one read",
}
BY_NEURON = ("neuron_alignment", "neuron_coherence")
GAUSSIAN_DRAWS = 4
SPARSITY = ("gate_sparsity", "closed_gate_share", "silent_share")


def row_coherence(rows: Float[Tensor, "h d"]) -> tuple[float, float]:
    """The largest and the mean |cos(v_i, v_j)| over i != j of rows v; rows that are 0 are left out. NaN with fewer than
    two.

    >>> row_coherence(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [-3.0, 0.0]]))
    (1.0, 0.3333333333333333)
    """
    largest, mean = _coherences(_check_rows(rows).double())
    return _maximum(largest), mean


def neuron_coherence(force: Force) -> Float[Tensor, " h"]:
    """The largest |cos(v_i, v_j)| of each neuron i with another neuron j, v the rows of W_in (of the gate, if gated);
    NaN for constant neurons, v = 0, and where there is no other.

    >>> neuron_coherence(MLP(w_in=torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 4.0]]), w_out=torch.ones(2, 3)))
    tensor([0.6000,    nan, 0.6000], dtype=torch.float64)
    """
    return _coherences(force.input_rows[0].detach().double())[0]


def welch_bound(count: int, dim: int) -> float:
    """Welch's bound sqrt((h - d) / (d (h - 1))), the smallest possible maximum of |cos| over h rows in R^d (Welch
    1974); 0 for h <= d.

    >>> round(welch_bound(3, 2), 12)  # attained by three lines at 60 degrees
    0.5
    """
    count, dim = check_integer("count", count, at_least=1), check_integer("dim", dim, at_least=1)
    return math.sqrt((count - dim) / (dim * (count - 1))) if count > dim else 0.0


def gaussian_coherence(count: int, dim: int, *, seed: int = 0) -> float:
    """The largest |cos| of two of h Gaussian rows in R^d, the mean of four draws.

    >>> 0.9 < gaussian_coherence(100, 2) <= 1
    True
    """
    return _gaussian_coherence(check_integer("count", count, at_least=2), check_integer("dim", dim, at_least=1), seed)


@functools.cache
def _gaussian_coherence(count: int, dim: int, seed: int) -> float:
    draw = torch.Generator(device="cpu").manual_seed(seed)
    rows = [torch.randn(count, dim, generator=draw, device="cpu") for _ in range(GAUSSIAN_DRAWS)]
    return sum(row_coherence(each)[0] for each in rows) / GAUSSIAN_DRAWS


def neuron_alignment(force: Force) -> Float[Tensor, " h"]:
    """Cosine cos(w_j, v_j) of each neuron's output weights w_j with its input weights: v_j is its row of W_in (of the
    gate, if gated); NaN where one of them is 0.

    >>> neuron_alignment(MLP(w_in=torch.eye(2), w_out=torch.tensor([[-2.0, 0.0], [0.0, 0.0]])))
    tensor([-1., nan], dtype=torch.float64)
    """
    read, written = _pairs(force)
    return (read * written).sum(-1).clamp(-1, 1)


@full_precision
def permuted_alignment(force: Force, *, permutations: int = 1000, seed: int = 0) -> Float[Tensor, " permutations"]:
    """The mean |cos(w_p(j), v_j)| under random permutations p of the neurons: the null of ``neuron_alignment``.

    >>> permuted_alignment(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), permutations=4).unique().tolist()
    [0.0, 1.0]
    """
    permutations = check_integer("permutations", permutations, at_least=1)
    read, written = _pairs(force)
    exists = ~(read.isnan().any(-1) | written.isnan().any(-1))
    table = (read[exists] @ written[exists].mT).abs().clamp(max=1.0)
    if not len(table):
        return torch.full((permutations,), torch.nan, dtype=torch.float64, device=read.device)
    draw = np.random.default_rng(seed)
    orders = torch.from_numpy(np.stack([draw.permutation(len(table)) for _ in range(permutations)])).to(table.device)
    return table.gather(1, orders.mT).mean(0)


@shows_progress("weights of the MLPs")
def mlp_weights(
    system: System,
    *,
    fold_norm: bool = False,
    permutations: int = 100,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Coherence of W_in and alignment of W_out with it, of every layer: the replicates are layers, and for a mixture of
    experts there is one entry per expert along the axis ``expert``. No forward pass is run.

    Quantities and references are those above; ``neuron_alignment`` and ``neuron_coherence`` have an axis ``neuron``.
    Raises HelmscopeError for a system without MLPs. ``progress`` is called with the share of the layers done.

    >>> from helmscope.solve.integrate import integrate
    >>> seen = mlp_weights(integrate(MLP(w_in=torch.eye(2), w_out=-torch.eye(2)), torch.eye(2), times=[0.0]))
    >>> seen.neuron_alignment_mean.item(), seen.coherence_max.item()
    (-1.0, 0.0)
    """
    import xarray as xr

    check_system(system)
    layers = [unfolded_force(system, layer, fold_norm=fold_norm) for layer in system.layers]
    stacks = [list(force.experts) if isinstance(force, MixtureOfExperts) else [force] for force in layers]
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    report, rows = check_progress(progress), list[list[dict[str, Any]]]()
    for stack in stacks:
        rows.append([_of_force(force, known, permutations, seed) for force in stack])
        report(len(rows) / len(stacks))
    experts, neurons = max(map(len, rows)), max(len(row["neuron_alignment"]) for stack in rows for row in stack)
    data = {name: np.full((len(rows), experts), np.nan) for name in LABELS if name not in BY_NEURON}
    cosines = {name: np.full((len(rows), experts, neurons), np.nan) for name in BY_NEURON}
    for i, stack in enumerate(rows):
        for k, row in enumerate(stack):
            for name, values in cosines.items():
                values[i, k, : len(row[name])] = row[name]
            for name, table in data.items():
                table[i, k] = row[name]
    variables: dict[str, Any] = {name: (("layer", "expert"), table) for name, table in data.items()}
    variables |= {name: (("layer", "expert", "neuron"), values) for name, values in cosines.items()}
    coords = {"layer": list(system.layers), "expert": np.arange(experts), "neuron": np.arange(neurons)}
    measured = xr.Dataset(variables, coords)
    for label, value in measured.data_vars.items():
        value.attrs |= label_attributes(LABELS[str(label)])
    measured.attrs["frame"] = "unit sphere: norm folded in" if fold_norm else "output of the norm: weights of the model"
    mixed = any(isinstance(force, MixtureOfExperts) for force in layers)
    return as_measurement(measured if mixed else measured.squeeze("expert", drop=True))


def weights_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``mlp_weights``; None if it does.

    >>> from helmscope.solve.integrate import integrate
    >>> weights_unsupported(integrate(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2), times=[0.0]))
    """
    reason = system.unsupported_reason(GateSparsity())
    return reason and reason.replace("gate_sparsity", "mlp_weights")


class GateSparsity(Instrument):
    """Instrument: how many neurons are switched off at the tokens of each system, the mean over tokens.

    ``gate_sparsity``: share of pre-activations v.x + c (of the gate, if gated) below ``threshold``.
    ``closed_gate_share``: share of neurons whose activation has a slope below ``slope``. ``silent_share``: share of
    neurons that are below the threshold at every token. In a mixture of experts, the means over the selected ones by
    their routing weights (``silent_share`` is then left out), and by expert, along the axis ``expert``:
    ``expert_gate_sparsity``, ``expert_closed_gate_share`` and ``expert_silent_share`` at the tokens that select it, the
    first two by its routing weights (NaN if there are none), and ``expert_weight``, its mean routing weight.
    With ``per_neuron`` also ``neuron_gate_sparsity``, the share of tokens at which each neuron is below the threshold;
    not for mixtures of experts.

    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), -torch.eye(2), times=[0.0])
    >>> run.replay(GateSparsity())["gate_sparsity"].gate_sparsity.item()
    0.5
    """

    name = "gate_sparsity"
    needs = Needs.FORCE

    def __init__(self, *, threshold: float = 0.0, slope: float = 0.1, per_neuron: bool = False) -> None:
        self.threshold, self.slope = check_real("threshold", threshold), check_real("slope", slope)
        if not isinstance(per_neuron, bool):
            raise HelmscopeError(f"per_neuron is {per_neuron!r}, but it must be True or False")
        self.per_neuron = per_neuron

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be measured, as for ``MlpForce``."""
        reason = MlpForce().unsupported_reason(system)
        return reason and reason.replace("mlp_force", self.name)

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the shares at the inputs of the MLP."""
        weights = token_weights(tensors.state, context.weights)
        x, force = unit_points(self, context, tensors.point, weights), tensors.force
        if not isinstance(force, MixtureOfExperts):
            z = _pre_activations(force, x)
            below = z < self.threshold
            silent = (below | (weights <= 0).unsqueeze(-1)).all(1).to(x).mean(-1)
            values = {"gate_sparsity": below, "closed_gate_share": force.activation.slope(z) < self.slope}
            self.keep(context, {name: context.token_mean(v.to(x).mean(-1)) for name, v in values.items()})
            self.keep(context, {"silent_share": silent})
            if self.per_neuron:
                each = token_mean(below.to(x).mT, weights.unsqueeze(1).expand(len(x), z.shape[-1], -1))
                self.keep(context, {"neuron_gate_sparsity": each}, axes=("neuron",))
            return
        below, closed, total = (torch.zeros_like(x[..., 0]) for _ in range(3))
        columns = {f"expert_{name}": x.new_full((len(x), len(force.experts)), torch.nan) for name in SPARSITY}
        columns["expert_weight"] = x.new_zeros(len(x), len(force.experts))
        for index, routed in force.routing_weights(x).items():
            expert: Any = force.experts[index]
            z = _pre_activations(expert, x)
            off, flat = z < self.threshold, expert.activation.slope(z) < self.slope
            below = below + routed * off.to(x).mean(-1)
            closed = closed + routed * flat.to(x).mean(-1)
            total = total + routed
            both = weights * routed
            reads = (both > 0).any(-1)
            silent = (off | (both <= 0).unsqueeze(-1)).all(1).to(x).mean(-1)
            columns["expert_gate_sparsity"][:, index] = token_mean(off.to(x).mean(-1), both)
            columns["expert_closed_gate_share"][:, index] = token_mean(flat.to(x).mean(-1), both)
            columns["expert_silent_share"][:, index] = torch.where(reads, silent, torch.nan)
            columns["expert_weight"][:, index] = token_mean(routed, weights)
        self.keep(
            context,
            {
                "gate_sparsity": context.token_mean(below / total),
                "closed_gate_share": context.token_mean(closed / total),
            },
        )
        self.keep(context, columns, axes=("expert",))

    def result(self) -> xr.Dataset:
        """The shares of every layer and replicate."""
        measured = super().result()
        labels = {
            "gate_sparsity": f"share of pre-activations below {self.threshold:g}",
            "closed_gate_share": f"share of neurons whose slope is below {self.slope:g}",
            "silent_share": f"share of neurons below {self.threshold:g} at every token",
        }
        labels |= {f"expert_{name}": f"{text}, by expert" for name, text in labels.items()}
        labels["neuron_gate_sparsity"] = f"share of tokens at which a neuron is below {self.threshold:g}"
        labels["expert_weight"] = "mean routing weight of an expert"
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(labels[str(name)])
        return with_bounds(measured, dict.fromkeys([name for name in labels if name != "expert_weight"], SHARE))


def gate_sparsity(
    system: System,
    *,
    threshold: float = 0.0,
    slope: float = 0.1,
    per_neuron: bool = False,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """How many neurons of a system's MLPs are switched off, with replicates: ``GateSparsity`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), -torch.eye(2), times=[0.0])
    >>> gate_sparsity(run).silent_share.item()
    0.0
    """
    instrument = GateSparsity(threshold=threshold, slope=slope, per_neuron=per_neuron)
    return replayed(system, instrument, progress)


def unfolded_force(system: System, layer: int, *, fold_norm: bool = False) -> Any:
    """The MLP of a layer as a function of its norm's output, or of unit vectors if ``fold_norm``.

    >>> from helmscope.solve.integrate import integrate
    >>> mlp = MLP(w_in=torch.eye(2), w_out=torch.eye(2))
    >>> unfolded_force(integrate(mlp, torch.eye(2), times=[0.0]), 0) is mlp
    True
    """
    force = system.force(layer=layer)
    if force is None:
        raise HelmscopeError(f"system has no MLP: force(layer={layer}) is None, but the weights of one are needed")
    if fold_norm:
        return force
    kept = getattr(system, "forces", None)  # of a recording
    field = getattr(system, "field", None)  # of a simulation
    if kept is not None:
        return kept[layer].unfolded()
    return field.mlp if isinstance(field, Block) else force


def _of_force(
    force: Force, known: dict[tuple[int, ...], dict[str, Any]], permutations: int, seed: int
) -> dict[str, Any]:
    """The numbers of one MLP; weights that layers share are measured once."""
    rows = force.input_rows[0]
    key = (rows.data_ptr(), force.w_out.data_ptr(), *rows.shape)
    if key not in known:
        coherence, mean = _coherences(rows.detach().double())
        cosine, null = neuron_alignment(force), permuted_alignment(force, permutations=permutations, seed=seed)
        exists = ~cosine.isnan()
        known[key] = {
            "coherence_max": _maximum(coherence),
            "coherence_mean": mean,
            "coherence_gaussian": gaussian_coherence(*rows.shape, seed=seed) if len(rows) > 1 else math.nan,
            "welch_bound": welch_bound(*rows.shape),
            "neuron_alignment_mean": float(cosine[exists].mean()),
            "neuron_alignment_absolute": float(cosine[exists].abs().mean()),
            "neuron_alignment_absolute_null": float(null.mean()),
            "constant_neuron_count": float((~torch.stack([r.any(-1) for r in force.input_rows]).any(0)).sum()),
            "neuron_alignment": cosine.cpu().numpy(),
            "neuron_coherence": coherence.cpu().numpy(),
        }
    return known[key]


def _pre_activations(force: Any, x: Tensor) -> Tensor:
    bias = force.b_in if isinstance(force, MLP) else force.b_gate
    return affine(x, force.input_rows[0], bias)


def _check_rows(rows: object) -> Tensor:
    if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or not rows.is_floating_point():
        raise HelmscopeError(f"rows is {type_with_article(rows)}, but it must be a float tensor (h, d)")
    return rows.detach()


@full_precision
def _coherences(rows: Tensor) -> tuple[Tensor, float]:
    """The largest |cos| of each row with another one, NaN for rows that are 0, and the mean over all pairs of others;
    NaN with fewer than two.
    """
    live = rows.any(-1)
    largest, count = torch.full_like(rows[:, 0], torch.nan), int(live.sum())
    if count < 2:
        return largest, math.nan
    unit = _directions(rows)
    table = (unit @ unit.mT).abs().fill_diagonal_(0.0).clamp(max=1.0)
    largest[live] = table.amax(-1)
    return largest, float(table.sum()) / (count * (count - 1))


def _maximum(values: Tensor) -> float:
    """The largest number that is defined; NaN if none is."""
    defined = values[~values.isnan()]
    return float(defined.max()) if len(defined) else math.nan


def _directions(rows: Tensor) -> Tensor:
    """The unit vectors of the rows that are not 0."""
    rows = rows[rows.any(-1)]
    unit: Tensor = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return unit


def _pairs(force: Force) -> tuple[Tensor, Tensor]:
    """Unit vectors of what each neuron reads and writes, NaN where that is 0."""
    pair = force.input_rows[0].detach().double(), force.w_out.detach().double().mT
    lengths = [torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in pair]
    unit = [each / torch.where(size > 0, size, torch.nan) for each, size in zip(pair, lengths, strict=True)]
    return unit[0], unit[1]
