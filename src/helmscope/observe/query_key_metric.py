"""Is W_Q^T W_K a metric, and attention a connection? [Additive transport], section 8.

With y = G P x the state that a head reads, without the bias of the norm (G its gain, P the projector along 1 where the
norm is a LayerNorm, else 1), the logits of a head are quadratic in x,

    <W_Q y_i, W_K y_j> = x_i^T M x_j,    M = P G W_Q^T W_K G P,    S = (M + M^T) / 2,

and what it writes from j to i is A_ij O x_j with O = P W_O W_V G P. A metric is symmetric and positive:

- symmetric share |S|^2 / |M|^2: 1 if M is symmetric, 0 if it is antisymmetric, (d + 1) / (2 d) on average for random
  factors of any rank, with d the dimension on which P projects;
- signature: the numbers of eigenvalues of S above and below 0. If the rows of W_Q and W_K are linearly independent
  (2 r <= d) it is (r, r), whatever the weights: no such head is a metric, even on a subspace.
  ``negative_eigenvalue_share`` is the share of the negative eigenvalues in |S|^2;
- alignment cos(M, O): 1 if what a head writes is the gradient of its logits in x_i; 0 on average for random factors.

Biases are left out, and for rotary models the phases too: M is that at relative position 0.

A connection carries vectors from token to token. Between j and i attention does so by T_ij = sum_h A^h_ij O_h, whose
orthogonal part is U_ij in T = U |T| (a partial isometry if T has no full rank). Around a triangle of tokens i > j > k,

    holonomy defect = 1 - tr(U_ij U_jk U_ik^T) / rank,

where the way back from i to k is the inverse of the direct way, since in a causal model attention has only one
direction. It is 0 if the two ways agree, 1 on average for unrelated directions, 2 for opposite ones; 1 - cos(a) if all
transports rotate every plane by the angle a; and 0 whenever all O_h are symmetric and positive definite, as then U = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.fields.norms import LayerNorm
from helmscope.geometry.arithmetic import full_precision
from helmscope.models.input_matrices import input_matrices
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Observer, Site
from helmscope.observe.labels import label_attributes
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_replicates,
    check_seed,
    identity_coordinates,
)
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.tap import Attended, Call
    from helmscope.types.progress import ProgressOption

ZERO = 1e-5  # eigenvalues below this share of the largest one count as 0, in single precision
NAMES = {
    "symmetric_share": "symmetric share |S|^2 / |M|^2 of M = W_Q^T W_K",
    "positive_eigenvalue_count": "number of positive eigenvalues of the symmetric part",
    "negative_eigenvalue_count": "number of negative eigenvalues of the symmetric part",
    "negative_eigenvalue_share": "share of the negative eigenvalues in |S|^2",
    "qk_ov_alignment": "cosine of W_Q^T W_K and W_O W_V",
}


@dataclass(frozen=True, eq=False)
class HeadMatrices(ConciseRepr):
    """The factors of M and O for the heads of a layer, with gain and projector of the norm folded in, in float64:
    M_h = queries_h^T keys_h and O_h = outputs_h values_h, on a space of dimension ``dim``.

    >>> from helmscope import record
    >>> matrices = head_matrices(record("A", ["Once upon a time"]))
    >>> len(matrices), matrices[0].queries.shape, matrices[0].outputs.shape, matrices[0].dim
    (12, torch.Size([6, 32, 192]), torch.Size([6, 192, 32]), 191)
    """

    queries: Float[Tensor, "heads r d"]
    keys: Float[Tensor, "heads r d"]
    values: Float[Tensor, "heads s d"]
    outputs: Float[Tensor, "heads d s"]
    dim: int


def head_matrices(recording: Recording) -> list[HeadMatrices]:
    """The matrices of all layers; raises HelmscopeError where ``input_matrices`` does, and where the outputs of heads
    are not written by a matrix that can be read.

    >>> from helmscope import record
    >>> matrices = head_matrices(record("A", ["Once upon a time"]))[3]
    >>> bool(matrices.queries.sum(-1).abs().max() < 1e-6)  # LayerNorm: the mean of a state is not read
    True
    """
    check_recording(recording)
    anatomy, found = recording.anatomy, []
    for number, layer in enumerate(anatomy.layers):
        why = output_unsupported(layer)
        if why is not None:
            raise HelmscopeError(f"recording has a layer {number} of which {why}, so that W_O cannot be read")
    for number, matrices in enumerate(input_matrices(recording)):
        layer = anatomy.layers[number]
        gain, centered = _read_through(anatomy, number)
        read = {site: _centered(each.weight.double() * gain, centered) for site, each in matrices.items()}
        outputs = output_matrices(layer).double().to(gain.device)
        outputs = outputs - outputs.mean(1, keepdim=True) if centered else outputs
        repeats = len(outputs) // len(read[Site.KEY])
        keys, values = (read[site].repeat_interleave(repeats, 0) for site in (Site.KEY, Site.VALUE))
        found.append(HeadMatrices(read[Site.QUERY], keys, values, outputs, anatomy.dim - int(centered)))
    return found


def _read_through(anatomy: Anatomy, number: int) -> tuple[Float[Tensor, " d"], bool]:
    """The gain of the norm through which attention of a layer reads the state, and whether it subtracts the mean."""
    layer = anatomy.layers[number]
    norm = layer.attention_norm
    if norm is None and anatomy.post_norm:  # the state itself is the output of a norm
        before = anatomy.embedding_norm if number == 0 else None
        norm = anatomy.layers[number - 1].close_norm if number else (None if before is None else before[1])
    weight = next(layer.block.parameters())
    gain = getattr(norm, "gain", None)
    ones = torch.ones(anatomy.dim, dtype=torch.float64, device=weight.device)
    return ones if gain is None else gain.detach().double().to(weight.device), isinstance(norm, LayerNorm)


def _centered(matrix: Float[Tensor, "heads r d"], centered: bool) -> Float[Tensor, "heads r d"]:
    return matrix - matrix.mean(-1, keepdim=True) if centered else matrix


@full_precision
def symmetric_share(left: Float[Tensor, "*batch r d"], right: Float[Tensor, "*batch r d"]) -> Float[Tensor, "*batch"]:
    """|S|^2 / |M|^2 = (1 + tr(M^2) / |M|^2) / 2 of M = left^T right with S = (M + M^T) / 2; NaN where M = 0.

    >>> a = torch.tensor([[1.0, 0.0]])
    >>> symmetric_share(a, a).item(), symmetric_share(a, a.flip(-1)).item()
    (1.0, 0.5)
    """
    inner = right @ left.mT  # r x r: tr(M^2) = tr(inner^2)
    square = ((left @ left.mT) * (right @ right.mT)).sum((-2, -1))
    twice = (inner * inner.mT).sum((-2, -1))
    return (1 + twice / torch.where(square > 0, square, torch.nan)) / 2


@full_precision
def symmetric_eigenvalues(
    left: Float[Tensor, "*batch r d"], right: Float[Tensor, "*batch r d"]
) -> Float[Tensor, "*batch k"]:
    """The min(2 r, d) eigenvalues of S = (M + M^T) / 2, M = left^T right, that need not be 0, in ascending order.

    >>> symmetric_eigenvalues(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.0]])).round(decimals=4)
    tensor([-1.,  1.])
    """
    both = torch.cat([left, right], -2)
    triangle = torch.linalg.qr(both.mT, mode="r").R  # both^T = Q R
    first, second = triangle.split(left.shape[-2], -1)
    form = first @ second.mT
    values: Tensor = torch.linalg.eigvalsh((form + form.mT) / 2)
    return values


@full_precision
def qk_ov_alignment(matrices: HeadMatrices) -> Float[Tensor, " heads"]:
    """cos(M, O) = tr(M^T O) / (|M| |O|) of every head; NaN where one of them is 0.

    >>> eye = torch.eye(2)[None]
    >>> qk_ov_alignment(HeadMatrices(eye, eye, eye, eye, dim=2)).round(decimals=6).tolist()
    [1.0]
    """
    product = ((matrices.queries @ matrices.outputs) * (matrices.keys @ matrices.values.mT)).sum((-2, -1))
    of_m = ((matrices.queries @ matrices.queries.mT) * (matrices.keys @ matrices.keys.mT)).sum((-2, -1))
    of_o = ((matrices.outputs.mT @ matrices.outputs) * (matrices.values @ matrices.values.mT)).sum((-2, -1))
    size = (of_m * of_o).sqrt()
    return product / torch.where(size > 0, size, torch.nan)


@shows_progress("query-key metric")
def query_key_metric(recording: Recording, *, seed: int = 0, progress: ProgressOption = None) -> xr.Dataset:
    """Symmetric share, signature and alignment of the heads, along (layer, head): ``symmetric_share`` with its null
    (d + 1) / (2 d), ``positive_eigenvalue_count`` and ``negative_eigenvalue_count``, ``negative_eigenvalue_share``, and
    ``qk_ov_alignment`` with null 0.

    They are computed from the weights; a few short forward passes read them. ``seed`` is not used.
    ``progress`` is called with the share of the layers done. Raises HelmscopeError where ``head_matrices`` does.

    >>> from helmscope import record
    >>> metric = query_key_metric(record("A", ["Once upon a time"]))
    >>> null, positive = metric.symmetric_share_null[0], metric.positive_eigenvalue_count
    >>> metric.symmetric_share.dims, round(float(null), 4), int(positive.max())
    (('layer', 'head'), 0.5026, 32)
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    matrices, report = head_matrices(recording), check_progress(progress)
    for done, each in enumerate(matrices, 1):
        values = symmetric_eigenvalues(each.queries, each.keys)
        largest = values.abs().amax(-1, keepdim=True)
        columns["symmetric_share"].append(symmetric_share(each.queries, each.keys))
        columns["positive_eigenvalue_count"].append((values > ZERO * largest).double().sum(-1))
        columns["negative_eigenvalue_count"].append((values < -ZERO * largest).double().sum(-1))
        columns["negative_eigenvalue_share"].append(values.clamp(max=0).square().sum(-1) / values.square().sum(-1))
        columns["qk_ov_alignment"].append(qk_ov_alignment(each))
        report(done / len(matrices))
    limits = {"symmetric_share": (0.0, 1.0), "negative_eigenvalue_share": (0.0, 1.0), "qk_ov_alignment": (-1.0, 1.0)}
    data = {
        name: (
            ("layer", "head"),
            torch.stack(columns[name]).cpu().numpy(),
            label_attributes(text) | dict(zip(("valid_min", "valid_max"), limits.get(name, ()), strict=False)),
        )
        for name, text in NAMES.items()
    }
    null = ("layer", [(each.dim + 1) / (2 * each.dim) for each in matrices])
    nulls: dict[str, Any] = {"symmetric_share_null": null, "qk_ov_alignment_null": 0.0}
    coords = {"layer": list(range(len(matrices))), "head": list(range(len(matrices[0].queries)))}
    attributes = {"model": recording.origin.title, "title": "query-key metric"}
    return check_replicates(xr.Dataset(data | nulls, coords, attributes), "layer")


@shows_progress("holonomy defect")
def holonomy_defect(
    recording: Recording,
    *,
    triangles: int = 4,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The defect of transport around random triangles of tokens, ``holonomy_defect`` along (layer, prompt): the mean
    over ``triangles`` of 1 - tr(U_ij U_jk U_ik^T) / rank, in [0, 2]; the null value 1 is that of unrelated directions.

    Takes one forward pass, and three singular value decompositions per triangle, layer and prompt. NaN where attention
    writes nothing and for texts of fewer than 3 visible tokens. Raises HelmscopeError where ``head_matrices`` does, for
    a layer out of range, and if no text has 3 visible tokens.

    >>> from helmscope import record
    >>> holonomy_defect(record("A", ["Once upon a time"]), triangles=1, layers=[0, 5]).holonomy_defect.dims
    ('layer', 'prompt')
    """
    report, count = check_progress(progress), check_integer("triangles", triangles, at_least=1)
    matrices = head_matrices(recording)
    chosen = chosen_layers(recording, layers)
    corners = _corners(recording, count, check_seed(seed))
    observer = _EdgeWeights(chosen, corners)
    recording.runner.forward(observer)
    found = np.full((len(chosen), len(recording.batch)), np.nan)
    for row, layer in enumerate(chosen):
        edges = torch.cat(observer.found[layer])  # (prompt, triangle, edge, head)
        for prompt in range(found.shape[1]):
            if corners[prompt, 0, 0] >= 0:
                found[row, prompt] = np.mean(
                    [triangle_holonomy_defect(matrices[layer], each) for each in edges[prompt]]
                )
        report((row + 1) / len(chosen))
    bounds = {"long_name": "defect of transport around triangles", "valid_min": 0.0, "valid_max": 2.0}
    coords = {"layer": chosen, "prompt": np.arange(found.shape[1])}
    coords |= identity_coordinates("prompt", recording.batch.identities)
    data = {"holonomy_defect": (("layer", "prompt"), found, bounds), "holonomy_defect_null": 1.0}
    return check_replicates(xr.Dataset(data, coords, {"model": recording.origin.title, "title": "holonomy defect"}))


@full_precision
def triangle_holonomy_defect(matrices: HeadMatrices, weights: Float[Tensor, "3 heads"]) -> float:
    """1 - tr(U_ij U_jk U_ik^T) / rank for the weights A_ij, A_jk and A_ik of the heads; NaN if a transport is 0.

    >>> eye = torch.eye(3).double()[None]
    >>> heads = HeadMatrices(eye, eye, eye, 2 * eye, dim=3)
    >>> triangle_holonomy_defect(heads, torch.tensor([[0.5], [0.2], [0.1]])) < 1e-12
    True
    """
    units, ranks = [], []
    for edge in weights.to(matrices.outputs):
        transport = ((edge[:, None, None] * matrices.outputs).transpose(0, 1).flatten(1)) @ matrices.values.flatten(
            0, 1
        )
        left, sizes, right = torch.linalg.svd(transport)
        rank = int((sizes > ZERO * sizes[0]).sum()) if sizes[0] > 0 else 0
        units.append(left[:, :rank] @ right[:rank])
        ranks.append(rank)
    if min(ranks) == 0:
        return float("nan")
    return 1 - float(((units[0] @ units[1]) * units[2]).sum()) / min(ranks)


def _corners(recording: Recording, triangles: int, seed: int) -> Int[np.ndarray, "prompt triangle 3"]:
    """Three different visible tokens of each prompt for each triangle, the latest first; -1 where there are none."""
    visible, n = recording.visible, recording.trajectory.states.shape[2]
    prompts = range(len(recording.batch))
    places = [np.arange(n) if visible is None else np.flatnonzero(visible[k].cpu()) for k in prompts]
    if all(len(each) < 3 for each in places):
        raise HelmscopeError("recording holds no text with 3 visible tokens, but a triangle needs as many")
    corners = np.full((len(places), triangles, 3), -1)
    for prompt, each in enumerate(places):
        draw = np.random.default_rng([seed, prompt])
        for k in range(triangles if len(each) >= 3 else 0):
            corners[prompt, k] = np.sort(draw.choice(each, 3, replace=False))[::-1]
    return corners


class _EdgeWeights(Observer):
    """Keeps the weights of all heads on the edges ij, jk and ik of triangles, over (rows, triangle, 3, head)."""

    sees_attention = True

    def __init__(self, layers: list[int], corners: np.ndarray) -> None:
        self.corners = torch.from_numpy(corners)
        self.found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep those of a layer."""
        if layer in self.found:
            i, j, k = self.corners[self.rows].to(result.weights.device).clamp(min=0).unbind(-1)
            rows = torch.arange(len(i), device=result.weights.device)[:, None]
            edges = [result.weights[rows, :, a, b] for a, b in ((i, j), (j, k), (i, k))]
            self.found[layer].append(torch.stack(edges, 2).detach())
