"""Means and variances of what attention heads write, on the tangent space of each token, from Gram matrices.

A head with weights P_ij, values v_j and output matrix W_O writes W_O m_i, m_i = sum_j P_ij v_j. At a state y_i of
direction x_i and length |y_i|, with T_i the projector to the tangent space at x_i (orthogonal to x_i and, where norms
remove the mean over coordinates, to 1),

    tr(T W_O Cov W_O^T T) = tr(G Cov) - g^T Cov g,    G = W_O^T C W_O,    g = W_O^T x,

so that no d x d matrix is formed: the costs are those of the attention weights. Everything is divided by |y_i|, or
|y_i|^2: the direction of a residual stream moves by T f / |y| [Helmholtz Transformer, no. 1].

A row that sums to less than 1 leaves its rest to a key of value 0, the sink of some families; a row that sums to more,
as in USA, has a drift but no sampling covariance: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import matrix_product
from helmscope.observe.kernel import ROW_SUM_TOLERANCE, check_kernel
from helmscope.observe.track import row_blocks
from helmscope.types import HelmscopeError, Needs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext

HEADS_NEED = Needs.KERNEL | Needs.QKV | Needs.OUTPUT | Needs.ATTENTION_WRITE


@dataclass(frozen=True, eq=False)
class TangentSpaces:
    """The tangent space at the direction of each token, of dimension d - 1, or d - 2 if ``centered``.

    >>> TangentSpaces(torch.tensor([[[1.0, 0.0]]]), torch.ones(1, 1), False).project(torch.ones(1, 1, 2))
    tensor([[[0., 1.]]])
    """

    x: Float[Tensor, "rows n d"]
    radius: Float[Tensor, "rows n"]
    centered: bool

    @classmethod
    def of(cls, context: ReplayContext, tensors: AttentionTensors) -> TangentSpaces:
        """The tangent spaces of the states that a half reads; raises HelmscopeError if one is not finite, with the
        number of its text and token.

        >>> from helmscope.types import AttentionTensors, Half, ReplayContext
        >>> x = torch.eye(3).expand(1, 3, 3)
        >>> context = ReplayContext(0, Half.ATTENTION, 0.0, slice(0, 1))
        >>> TangentSpaces.of(context, AttentionTensors(2 * x, x)).radius
        tensor([[2., 2., 2.]])
        """
        counts = torch.ones_like(tensors.state[..., 0]) if context.weights is None else context.weights
        bad = (~torch.isfinite(tensors.state).all(-1) & (counts > 0)).nonzero()
        if len(bad):
            text, token = bad[0].tolist()
            raise HelmscopeError(
                f"state of text {context.rows.start + text} has a value that is not finite at token {token} in layer "
                f"{context.layer}, but every state must be finite"
            )
        return cls(tensors.direction, tensors.radius, context.centered)

    @property
    def dim(self) -> int:
        """The dimension of the tangent spaces."""
        return self.x.shape[-1] - (2 if self.centered else 1)

    def project(self, vectors: Float[Tensor, "rows n d"]) -> Float[Tensor, "rows n d"]:
        """The tangential parts of vectors.

        >>> spaces = TangentSpaces(torch.tensor([[[0.6, -0.8, 0.2]]]), torch.ones(1, 1), True)
        >>> spaces.project(torch.ones(1, 1, 3)).abs().max().item()
        0.0
        """
        if self.centered:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        return vectors - (self.x * vectors).sum(-1, keepdim=True) * self.x


def centered_output(output: Float[Tensor, "heads d s"], *, centered: bool) -> Float[Tensor, "heads d s"]:
    """The output matrices, without the mean over coordinates of what they write if norms remove it.

    >>> centered_output(torch.tensor([[[1.0], [3.0]]]), centered=True).flatten()
    tensor([-1.,  1.])
    """
    return output - output.mean(-2, keepdim=True) if centered else output


@dataclass(frozen=True, eq=False)
class HeadMoments:
    """Tangential moments of every head and token, divided by the radius |y| or its square, (rows, heads, n) each.

    ``drift`` is |T W_O m|; ``sampling`` tr(T Cov_A T) and ``random`` tr(T Cov_B T) are the traces of the covariances of
    modes A and B *without* their factor 1/2, and ``sampling_ambient`` that of mode A without the projector.
    ``total_drift`` (rows, n) is the length of the tangential part of the whole write, biases included.
    """

    spaces: TangentSpaces
    drift: Float[Tensor, "rows heads n"]
    sampling: Float[Tensor, "rows heads n"]
    sampling_ambient: Float[Tensor, "rows heads n"]
    random: Float[Tensor, "rows heads n"]
    total_drift: Float[Tensor, "rows n"]
    has_heads: bool

    @classmethod
    def of(cls, context: ReplayContext, tensors: AttentionTensors) -> HeadMoments:
        """The moments of a chunk; computed once for all instruments that use them.

        >>> from helmscope.types import AttentionTensors, Half, ReplayContext
        >>> x, half = torch.eye(2).expand(1, 2, 2), torch.full((1, 2, 2), 0.5)
        >>> tensors = AttentionTensors(x, x, half, x, x, x, x / 2 + 0.5 * x.flip(-1), torch.eye(2))
        >>> moments = HeadMoments.of(ReplayContext(0, Half.ATTENTION, 0.0, slice(0, 1)), tensors)
        >>> moments.drift, moments.sampling  # the mean (1/2, 1/2), and values e1, e2 in the direction of the other
        (tensor([[[0.5000, 0.5000]]]), tensor([[[0.2500, 0.2500]]]))
        """
        if tensors not in _KNOWN:
            assert tensors.kernel is not None
            blocks = row_blocks(len(tensors.kernel), tensors.kernel[0].numel())
            _KNOWN[tensors] = _joined([_moments(*_rows(context, tensors, block)) for block in blocks])
        return _KNOWN[tensors]

    def dropped_heads(self, values: Float[Tensor, "rows heads ..."]) -> Tensor:
        """Values without their axis of heads for a simulated field of a single head, else unchanged.

        >>> one = torch.ones(1, 1, 2)
        >>> HeadMoments(None, one, one, one, one, one[0], False).dropped_heads(one).shape
        torch.Size([1, 2])
        """
        return values if self.has_heads else values.squeeze(1)


_KNOWN: WeakKeyDictionary[AttentionTensors, HeadMoments] = WeakKeyDictionary()


def _rows(context: ReplayContext, tensors: AttentionTensors, block: slice) -> tuple[ReplayContext, AttentionTensors]:
    """Some systems of a chunk."""
    first = context.rows.start
    masks = {name: getattr(context, name) for name in ("weights", "visible")}
    some = {name: mask[block] for name, mask in masks.items() if mask is not None}
    names = ("state", "direction", "kernel", "query", "key", "value", "write")
    parts = {name: getattr(tensors, name) for name in names}
    return (
        replace(context, rows=slice(first + block.start, first + block.stop), **some),
        replace(tensors, **{name: part[block] for name, part in parts.items() if part is not None}),
    )


def _joined(blocks: list[HeadMoments]) -> HeadMoments:
    """The moments of a chunk from those of its systems."""
    names = ("drift", "sampling", "sampling_ambient", "random", "total_drift")
    first = blocks[0].spaces
    x, radius = (torch.cat([getattr(each.spaces, name) for each in blocks]) for name in ("x", "radius"))
    values = {name: torch.cat([getattr(each, name) for each in blocks]) for name in names}
    return HeadMoments(TangentSpaces(x, radius, first.centered), **values, has_heads=blocks[0].has_heads)


def with_heads(tensors: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (rows, heads, n, n), values (rows, heads, n, s) and output matrices (heads, d, s), with an axis of heads
    also for a single simulated head. Rows that sum to 1 up to single precision are normalized.

    >>> from helmscope.types import AttentionTensors
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> [tuple(part.shape) for part in with_heads(AttentionTensors(x, x, x, x, x, x, x, torch.eye(2)))]
    [(1, 1, 2, 2), (1, 1, 2, 2), (1, 2, 2)]
    """
    kernel, value, output = check_kernel(tensors.kernel), tensors.head_values, tensors.output
    assert value is not None
    assert output is not None
    mass = kernel.sum(-1, keepdim=True)
    # rows that sum to 1 up to the rounding of the model's softmax sum to 1
    kernel = kernel / torch.where((mass - 1).abs() <= ROW_SUM_TOLERANCE, mass, 1.0)
    if kernel.ndim == 3:
        return kernel.unsqueeze(1), value.unsqueeze(1), output.unsqueeze(0)
    return kernel, value.to(kernel), output.to(kernel)


@full_precision
def _moments(context: ReplayContext, tensors: AttentionTensors) -> HeadMoments:
    spaces = TangentSpaces.of(context, tensors)
    kernel, value, raw = with_heads(tensors)
    output = centered_output(raw, centered=context.centered)
    sums = _KernelSums.of(kernel, value, _along_heads(spaces.x, output), output, raw, context)
    valid, has_keys = sums.rest >= 0, sums.mass > 0
    per_radius = 1 / spaces.radius.unsqueeze(1)
    rounding = 32 * torch.finfo(kernel.dtype).eps
    traces = sums.sampling(output, raw if context.centered else None)
    random, size = sums.random(output)
    floor = rounding * traces.second + rounding**2 * sums.unmoved
    random_floor = rounding * size + rounding**2 * sums.unmoved * kernel.amax(-1)
    length = torch.linalg.vector_norm(spaces.project(_write(tensors)), dim=-1)

    def scaled(trace: Tensor, floor: Tensor) -> Tensor:
        """A trace over |y|^2; 0 where it is rounding, as for equal values and rows of entropy 0."""
        return torch.where(valid & has_keys, torch.where(trace > floor, trace, 0.0), torch.nan) * per_radius**2

    return HeadMoments(
        spaces,
        torch.where(has_keys, _drift_lengths(spaces, sums.about + sums.shift, output), torch.nan) * per_radius,
        scaled(traces.tangent, floor),
        scaled(traces.ambient, floor),
        scaled(random, random_floor),
        length / spaces.radius,
        tensors.kernel is not None and tensors.kernel.ndim == 4,
    )


@full_precision
def _along_heads(x: Tensor, output: Tensor) -> Tensor:
    """g = W_O^T x of every head, (rows, heads, n, s)."""
    heads, d, s = output.shape
    along = matrix_product(x, output.movedim(1, 0).reshape(d, heads * s))
    return along.reshape(*x.shape[:-1], heads, s).transpose(1, 2)


@full_precision
def _drift_lengths(spaces: TangentSpaces, mean: Tensor, output: Tensor) -> Tensor:
    """|T W_O m| of every head, one head at a time: the Gram form would lose half of the digits of a small drift."""
    lengths = [
        torch.linalg.vector_norm(spaces.project(mean[:, head] @ output[head].mT), dim=-1) for head in range(len(output))
    ]
    return torch.stack(lengths, 1)


def _write(tensors: AttentionTensors) -> Tensor:
    assert tensors.write is not None
    return tensors.write


@dataclass(frozen=True, eq=False)
class _Traces:
    """tr(T Cov T), tr Cov with the mean over coordinates, and the second moment, the size of what cancels."""

    tangent: Tensor
    ambient: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class _KernelSums:
    """The sums over keys that all moments need, with the weights and with their squares, in one product each.

    Values are shifted by a common vector, which avoids cancellation; the sink, of value 0, then has the value -shift.
    ``mean`` is sum_j P_ij v_j of the shifted values, ``about`` that of the row with its sink, ``lengths`` and
    ``raw_lengths`` the means of v^T G v (with the mean over coordinates), ``radial`` that of (g_i . v)^2, and
    ``unmoved`` the mean of v^T G v of the values as they are; ``square_...`` have P_ij^2 in place of P_ij.
    """

    g: Tensor
    shift: Tensor
    mass: Tensor
    rest: Tensor
    mean: Tensor
    about: Tensor
    lengths: Tensor
    raw_lengths: Tensor
    unmoved: Tensor
    radial: Tensor
    square_mass: Tensor
    square_mean: Tensor
    square_lengths: Tensor
    square_radial: Tensor

    @classmethod
    @full_precision
    def of(
        cls, kernel: Tensor, value: Tensor, g: Tensor, output: Tensor, raw: Tensor, context: ReplayContext
    ) -> _KernelSums:
        seen = torch.ones_like(kernel[:, :1, :, 0]) if context.visible is None else context.visible[:, None].to(kernel)
        shift = (seen.unsqueeze(-1) * value).sum(-2, keepdim=True) / seen.sum(-1)[..., None, None]
        moved, s = value - shift, value.shape[-1]
        lengths = _squares(moved, output)
        raw_lengths = _squares(moved, raw) if context.centered else lengths
        further = torch.stack([lengths, raw_lengths, _squares(value, raw)], -1)
        sums = kernel @ torch.cat([moved, further], -1)
        mean, means = sums[..., :s], sums[..., s:]
        square = kernel * kernel
        squares = square @ torch.cat([moved, lengths.unsqueeze(-1)], -1)
        along = g @ moved.mT
        along = along.mul_(along).mul_(kernel)  # P_ij (g_i . v_j)^2
        mass, radial = kernel.sum(-1), along.sum(-1)
        rest = torch.where((1 - mass).abs() <= ROW_SUM_TOLERANCE, 0.0, 1 - mass)
        about = mean - rest.unsqueeze(-1) * shift
        return cls(
            g,
            shift,
            mass,
            rest,
            mean,
            about,
            means[..., 0],
            means[..., 1],
            means[..., 2],
            radial,
            square.sum(-1),
            squares[..., :s],
            squares[..., s],
            along.mul_(kernel).sum(-1),
        )

    def sampling(self, output: Tensor, raw: Tensor | None) -> _Traces:
        """The traces of mode A without their factor 1/2; ``raw`` are the output matrices with their mean."""
        second = self.lengths + self.rest * _squares(self.shift, output)
        ambient = second - _squares(self.about, output)
        radial = self.radial + self.rest * (self.g * self.shift).sum(-1) ** 2 - (self.g * self.about).sum(-1) ** 2
        if raw is None:
            return _Traces(ambient - radial, ambient, second)
        with_mean = self.raw_lengths + self.rest * _squares(self.shift, raw) - _squares(self.about, raw)
        return _Traces(ambient - radial, with_mean, second)

    @full_precision
    def random(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """tr(T [sum_j P_ij^2 (v_j - mean_i)(v_j - mean_i)^T] T) for each token, with the mean over its keys; and the
        size of its terms.
        """
        center = self.mean / torch.where(self.mass > 0, self.mass, 1.0).unsqueeze(-1)
        inner, along = center @ _gram(output), (self.g * center).sum(-1)
        own = (inner * center).sum(-1)
        cross = (self.square_mean * inner).sum(-1) - (self.g * self.square_mean).sum(-1) * along
        trace = self.square_lengths - self.square_radial - 2 * cross + self.square_mass * (own - along**2)
        return trace, self.square_lengths + self.square_mass * own


@full_precision
def _gram(output: Tensor) -> Tensor:
    """W_O^T W_O of every head."""
    return output.mT @ output


@full_precision
def _squares(vectors: Tensor, output: Tensor) -> Tensor:
    """v^T W_O^T W_O v, (rows, heads, vectors)."""
    return ((vectors @ _gram(output)) * vectors).sum(-1)
