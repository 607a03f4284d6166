"""Attention sinks: how much attention the first visible token receives, and whether its value is a constant.

For query t, with weights A_tj of a head, values V_j, the first visible token s and lambda = A_ts,

    sum_j A_tj V_j = (1 - lambda) V_ctx + lambda V_s,    V_ctx = sum_{j != s} A_tj V_j / (1 - lambda),

an identity; V_ctx is undefined at lambda = 1. Weights are those of the kernel itself, not of normalized rows: where a
model has a learned sink outside the tokens, rows sum to less than 1 and the rest is the missing mass.

Under a causal mask the first token sees only itself, so prompts that begin with the same token have the same V_s: it
is constant only by construction, and constancy must be tested on different first tokens. Values are coordinates inside
a head: an invertible matrix can be moved between values and output projection without changing the model, so that
norms and cosines of values, unlike weights, depend on the parametrization. Sources: [Additive transport], 9.2; the
threshold 0.3 is that of Gu et al., When Attention Sink Emerges in Language Models, arXiv 2410.10781.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recording import Recording
from helmscope.observe.kernel import check_kernel, visible_tokens
from helmscope.observe.labels import label_attributes
from helmscope.observe.track import AT_LEAST_0, SHARE, replayed, row_blocks, token_mean, token_weights, with_bounds
from helmscope.types import HelmscopeError, Instrument, Needs, as_measurement, check_integer, type_with_article
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

SINK_THRESHOLD = 0.3
NAMES = {
    "first_token_mass": "mean weight of the first token",
    "sink_share": f"share of queries that give the first token more than {SINK_THRESHOLD}",
    "sink": f"whether the mean weight of the first token exceeds {SINK_THRESHOLD}",
    "row_mass": "mean row sum of the attention weights",
    "missing_mass": "1 - row mass: the share of a learned sink outside the tokens",
    "sink_value_norm_ratio": "mean |V_sink| / |V_ctx|",
}
BOUNDS = dict.fromkeys(("sink_share", "sink"), SHARE)
BOUNDS |= dict.fromkeys(("first_token_mass", "row_mass", "sink_value_norm_ratio"), AT_LEAST_0)
CONSTANCY_NAMES = {
    "cosine": "mean cosine of V_sink - mean value, over pairs of prompts",
    "raw_cosine": "mean cosine of V_sink, over pairs of prompts",
    "explained_share": "share of |V_sink - mean value|^2 that one constant vector explains",
    "write_cosine": "mean cosine of W_O (V_sink - mean value), over pairs of prompts",
    "write_explained_share": "share of |W_O (V_sink - mean value)|^2 that one constant vector explains",
}


class AttentionSinks(Instrument):
    """Instrument: the attention to the first visible token in every layer (at every time of a simulation), by head.

    ``first_token_mass`` is the mean of lambda over queries, ``sink_share`` the share of queries with lambda > 0.3, and
    ``sink`` is 1 where the mean exceeds 0.3, else 0: its mean over layers and heads with ``first_position=0`` is the
    sink metric of Gu et al. ``row_mass`` is the mean row sum and ``missing_mass`` is 1 minus it.
    ``sink_value_norm_ratio`` is the mean of |V_sink| / |V_ctx| over the queries where V_ctx is defined and not 0.

    Queries are counted from the first visible token, those before ``first_position`` are left out, and the others count
    by the weights of the trajectory; a prompt without any is NaN. The first token itself is left out by default, as
    under a causal mask its weight on itself is 1. Where a sliding window hides the first token its weight is 0.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(4).expand(1, 4, 4), times=[0.0])
    >>> measured = run.replay(AttentionSinks())["attention_sinks"]
    >>> measured.first_token_mass.item(), measured.sink_share.item()
    (0.25, 0.0)
    >>> round(measured.sink_value_norm_ratio.item(), 4)  # V_ctx is the mean of three orthogonal unit vectors
    1.7321
    """

    name = "attention_sinks"
    needs = Needs.KERNEL | Needs.QKV

    def __init__(self, *, first_position: int = 1) -> None:
        self.first_position = check_integer("first_position", first_position, at_least=0)

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the sinks of a layer."""
        kernel, value, visible = _with_heads(context, tensors)
        weights = token_weights(tensors.state, context.weights).to(kernel)
        parts = [
            _statistics(kernel[block], value[block], visible[block], weights[block], self.first_position)
            for block in row_blocks(len(kernel), kernel[0].numel())
        ]
        values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if tensors.kernel is not None and tensors.kernel.ndim == 3:  # one simulated head
            values = {name: each.squeeze(1) for name, each in values.items()}
        self.keep(context, values, axes=("head",))

    def result(self) -> xr.Dataset:
        """The sinks of every head (if there are several), layer and replicate."""
        measured = with_bounds(super().result(), BOUNDS)
        for name in NAMES:
            measured[name].attrs |= label_attributes(NAMES[name])
        return measured.assign_attrs(first_position=self.first_position, threshold=SINK_THRESHOLD)


def attention_sinks(system: System, *, first_position: int = 1, progress: ProgressOption = None) -> xr.Dataset:
    """The attention to the first visible token, with replicates: ``AttentionSinks`` by one replay.

    Raises HelmscopeError for a system without attention, or whose attention is hidden. ``progress`` is called with the
    share of the work done.

    >>> from helmscope import record
    >>> attention_sinks(record("A", ["Once upon a time there was a cat"])).first_token_mass.dims
    ('layer', 'prompt', 'head')
    """
    instrument = AttentionSinks(first_position=first_position)
    return replayed(system, instrument, progress)


def sink_constancy(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """Whether the value of the first visible token is the same in all prompts, for every layer and head.

    ``raw_cosine`` is the mean cosine of V_sink over pairs of prompts. A bias of the values, or a mean that all tokens
    share, makes it large without any sink; therefore ``cosine`` and ``explained_share`` are taken of
    u_p = V_sink,p - m, with m the mean value over all visible tokens of all prompts, from which a bias cancels.
    ``explained_share`` is the centered R^2 of one constant vector, 1 - sum_p |u_p - mean u|^2 / sum_p |u_p|^2, which is
    about 1 / prompts for independent u_p. ``write_cosine`` and ``write_explained_share`` are the same for what the head
    writes to the state from the sink, W_O u_p, which unlike values does not depend on the basis inside the head; models
    whose output matrix cannot be read, and simulations, have neither. The dataset has no axis of prompts: all values
    are about their set, and its replicates are the layers.

    Prompts that begin with the same token have the same V_sink under a causal mask, see the head of this module; the
    attribute ``distinct_first_tokens`` of a recording of token ids says how many differ. Query heads that share their
    values have equal results. Raises HelmscopeError for fewer than two prompts. ``progress`` is called with the share
    of the work done.

    >>> from helmscope import record
    >>> same = sink_constancy(record("A", ["Once upon a time", "Once there was a cat"]))
    >>> same.raw_cosine.dims, same.attrs["distinct_first_tokens"], bool((same.raw_cosine > 1 - 1e-6).all())
    (('layer', 'head'), 1, True)
    """
    instrument = TokenValues()
    measured = replayed(system, instrument, progress)
    replicate = str(measured.visible.dims[1])
    prompts = measured.sizes[replicate]
    if prompts < 2:
        raise HelmscopeError(f"system has {prompts} {replicate}, but constancy over them needs at least 2")
    mean = measured.total.sum(replicate) / measured.visible.sum(replicate)
    raw = measured.value.isel(position=0)
    about = raw - mean
    values = {
        "cosine": _mean_cosine(about, replicate),
        "raw_cosine": _mean_cosine(raw, replicate),
        "explained_share": _explained_share(about, replicate),
    }
    written = _written(system, about) if isinstance(system, Recording) else None
    if written is not None:
        values["write_cosine"] = _mean_cosine(written, replicate)
        values["write_explained_share"] = _explained_share(written, replicate)
    for name, each in values.items():
        each.attrs = label_attributes(CONSTANCY_NAMES[name])
    attributes: dict[str, Any] = {"prompts": prompts}
    if isinstance(system, Recording) and system.batch.ids_name in system.batch.inputs:
        attributes["distinct_first_tokens"] = len({ids[0] for ids in system.batch.visible_ids})
    return as_measurement(xr.Dataset(values, attrs=attributes))


def _explained_share(vectors: xr.DataArray, replicate: str) -> xr.DataArray:
    """1 - sum_p |u_p - mean u|^2 / sum_p |u_p|^2 = prompts |mean u|^2 / sum_p |u_p|^2."""
    lengths = (vectors**2).sum("component").sum(replicate)
    square = (vectors.mean(replicate) ** 2).sum("component")
    return vectors.sizes[replicate] * square / lengths.where(lengths > 0)


def _written(recording: Recording, vectors: xr.DataArray) -> xr.DataArray | None:
    """Vectors with the inner products of W_O u, in s coordinates instead of d: R u for W_O = Q R. None where the output
    matrix of a layer cannot be read.
    """
    layers = [recording.anatomy.layers[layer] for layer in recording.layers]
    if any(output_unsupported(layer) is not None for layer in layers):
        return None
    triangles = np.stack([torch.linalg.qr(output_matrices(each).double().cpu()).R.numpy() for each in layers])
    factors = xr.DataArray(triangles, dims=("layer", "head", "row", "component"))
    written: xr.DataArray = xr.dot(factors, vectors, dim="component")
    return written.rename(row="component")


def _mean_cosine(vectors: xr.DataArray, replicate: str) -> xr.DataArray:
    """The mean cosine over pairs, (|sum of unit vectors|^2 - p) / (p (p - 1)); NaN where a vector is 0."""
    lengths = (vectors**2).sum("component") ** 0.5
    units = vectors / lengths.where(lengths > 0)
    count = vectors.sizes[replicate]
    square = (units.sum(replicate, skipna=False) ** 2).sum("component", skipna=False)
    return (square - count) / (count * (count - 1))


@dataclass(frozen=True, eq=False)
class SinkDecomposition(ConciseRepr):
    """What queries retrieve, split at the sink: Y = sink_weight * sink_value + (1 - sink_weight) *
    context_value.

    >>> split = sink_decomposition(torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[4.0], [8.0]]))
    >>> split.sink_weight.tolist(), split.sink_value.tolist(), split.context_value.tolist()
    ([0.5, 0.75], [4.0], [[8.0], [8.0]])
    """

    sink_weight: Float[Tensor, "*batch n"]
    sink_value: Float[Tensor, "*batch s"]
    context_value: Float[Tensor, "*batch n s"]


@full_precision
def sink_decomposition(
    kernel: Float[Tensor, "*batch n n"], values: Float[Tensor, "*batch n s"], *, sink_position: int = 0
) -> SinkDecomposition:
    """lambda = A_ts, V_s and V_ctx = sum_{j != s} A_tj V_j / (1 - lambda) of attention weights and values, with
    sum_j A_tj V_j = lambda V_s + (1 - lambda) V_ctx; ``sink_position`` is s. [Additive transport], section 9.2.

    V_ctx is undefined, NaN, at lambda = 1. The identity holds for any rows; where a row sums to less than 1, as with a
    learned sink outside the tokens, V_ctx is shorter than a mean of values. Raises HelmscopeError for tensors that do
    not fit and a position out of range.

    >>> split = sink_decomposition(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[2.0], [6.0]]))
    >>> split.sink_weight.tolist(), split.context_value.flatten().tolist()
    ([1.0, 0.5], [nan, 6.0])
    """
    count = check_kernel(kernel).shape[-1]
    if not isinstance(values, torch.Tensor) or values.ndim < 2 or values.shape[:-1] != kernel.shape[:-1]:
        shown = f"a tensor {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type_with_article(values)
        raise HelmscopeError(f"values is {shown}, but it must be a tensor of shape {tuple(kernel.shape[:-1])} + (s,)")
    place = check_integer("sink_position", sink_position, at_least=0)
    if place >= count:
        raise HelmscopeError(f"sink_position is {place}, but the kernel has positions 0 to {count - 1}")
    weight, is_sink = kernel[..., place], torch.arange(count, device=kernel.device) == place
    # without the sink's column, rather than the difference to the whole sum, which cancels where the sink is strong
    others = torch.where(is_sink, 0.0, kernel) @ values
    rest = (1 - weight).unsqueeze(-1)
    context = torch.where(rest == 0, torch.nan, others / torch.where(rest == 0, 1.0, rest))
    return SinkDecomposition(weight, values[..., place, :], context)


class TokenValues(Instrument):
    """Instrument: the values of the tokens at some positions, counted from the first visible token, in every layer, by
    head: ``value`` along (head, position, component). ``total`` is the sum of the values of all ``visible`` tokens.

    >>> from helmscope import record
    >>> measured = record("A", ["Once upon a time"]).replay(TokenValues((0, 2)))["token_values"]
    >>> measured.value.dims, measured.sizes["position"]
    (('layer', 'prompt', 'head', 'position', 'component'), 2)
    """

    name = "token_values"
    needs = Needs.KERNEL | Needs.QKV  # kernel and queries tell the number of heads

    def __init__(self, positions: Sequence[int] = (0,)) -> None:
        self.positions = positions

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the values of a layer."""
        _, value, visible = _with_heads(context, tensors)
        mask = visible.to(value)
        total = torch.where(visible[:, None, :, None], value, 0.0).sum(-2)
        chosen = torch.stack([_value_at(value, visible, position) for position in self.positions], -2)
        self.keep(context, {"value": chosen}, axes=("head", "position", "component"))
        self.keep(context, {"total": total}, axes=("head", "component"))
        self.keep(context, {"visible": mask.sum(-1)})


def _with_heads(context: ReplayContext, tensors: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (rows, heads, n, n), values (rows, heads, n, s) and visible tokens (rows, n)."""
    kernel, value = check_kernel(tensors.kernel), tensors.head_values
    assert value is not None
    if kernel.ndim == 3:
        kernel, value = kernel.unsqueeze(1), value.unsqueeze(1)
    return kernel, value.to(kernel), visible_tokens(kernel[:, 0], context.visible)


def _value_at(value: Float[Tensor, "rows heads n s"], visible: Bool[Tensor, "rows n"], position: int = 0) -> Tensor:
    """The value of the token at a position, counted from the first visible one, (rows, heads, s)."""
    place = visible.to(torch.int8).argmax(-1) + position
    return value[torch.arange(len(value), device=value.device), :, place]


@full_precision
def _statistics(
    kernel: Float[Tensor, "rows heads n n"],
    value: Float[Tensor, "rows heads n s"],
    visible: Bool[Tensor, "rows n"],
    weights: Float[Tensor, "rows n"],
    first_position: int,
) -> dict[str, Tensor]:
    """One value per system and head."""
    first = visible.to(torch.int8).argmax(-1)
    place = torch.arange(kernel.shape[-1], device=kernel.device)
    counted = (weights * (place >= first.unsqueeze(-1) + first_position)).unsqueeze(1).expand(kernel.shape[:-1])
    is_sink = (place == first.unsqueeze(-1))[:, None, None, :]
    weight, mass = torch.where(is_sink, kernel, 0.0).sum(-1), kernel.sum(-1)
    # without the sink's column, rather than the difference to the whole sum, which cancels where the sink is strong
    others = torch.where(is_sink, 0.0, kernel) @ torch.where(visible[:, None, :, None], value, 0.0)
    context_length = torch.linalg.vector_norm(others, dim=-1) / (1 - weight).abs()
    defined = (weight != 1) & (context_length > 0)
    sink_length = torch.linalg.vector_norm(_value_at(value, visible), dim=-1, keepdim=True)
    ratio = sink_length / torch.where(defined, context_length, 1.0)
    mean_weight, mean_mass = token_mean(weight, counted), token_mean(mass, counted)
    above = torch.where(mean_weight.isnan(), torch.nan, (mean_weight > SINK_THRESHOLD).to(kernel))
    return {
        "first_token_mass": mean_weight,
        "sink_share": token_mean((weight > SINK_THRESHOLD).to(kernel), counted),
        "sink": above,
        "row_mass": mean_mass,
        "missing_mass": 1 - mean_mass,
        "sink_value_norm_ratio": token_mean(ratio, counted * defined),
    }
