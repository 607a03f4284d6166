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

import math
from dataclasses import dataclass
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

ROUNDING = 32  # units in the last place, up to which equal values may differ
RADIAL = 0.1  # share of a squared length below which a difference of squares would lose more than a digit
HEADS_NEED = Needs.KERNEL | Needs.QKV | Needs.OUTPUT_MATRIX | Needs.ATTENTION_WRITE


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
        radius = tensors.radius
        bad = ~torch.isfinite(radius)  # NaN for a state with NaN, and for one too long for its dtype
        bad = bad if context.weights is None else bad & (context.weights > 0)
        if bool(bad.any()):
            text, token = bad.nonzero()[0].tolist()
            raise HelmscopeError(
                f"state of text {context.rows.start + text} has a value that is not finite at token {token} in layer "
                f"{context.layer}, but every state must be finite"
            )
        return cls(tensors.direction, radius, context.centered)

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
    ``moved`` (rows, n, d) is the tangential part of the whole write, biases included.
    """

    spaces: TangentSpaces
    drift: Float[Tensor, "rows heads n"]
    sampling: Float[Tensor, "rows heads n"]
    sampling_ambient: Float[Tensor, "rows heads n"]
    random: Float[Tensor, "rows heads n"]
    moved: Float[Tensor, "rows n d"]
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
            check_kernel(tensors.kernel)
            _KNOWN[tensors] = _moments(context, tensors)
        return _KNOWN[tensors]

    @property
    def total_drift(self) -> Float[Tensor, "rows n"]:
        """The length of ``moved``."""
        length: Tensor = torch.linalg.vector_norm(self.moved, dim=-1)
        return length

    def dropped_heads(self, values: Float[Tensor, "rows heads ..."]) -> Tensor:
        """Values without their axis of heads for a simulated field of a single head, else unchanged.

        >>> one = torch.ones(1, 1, 2)
        >>> HeadMoments(None, one, one, one, one, one, False).dropped_heads(one).shape
        torch.Size([1, 2])
        """
        return values if self.has_heads else values.squeeze(1)


_KNOWN: WeakKeyDictionary[AttentionTensors, HeadMoments] = WeakKeyDictionary()


def with_heads(tensors: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (rows, heads, n, n), values (rows, heads, n, s) and output matrices (heads, d, s), with an axis of heads
    also for a single simulated head. Rows that sum to 1 up to single precision are normalized.

    >>> from helmscope.types import AttentionTensors
    >>> x = torch.eye(2).expand(1, 2, 2)
    >>> [tuple(part.shape) for part in with_heads(AttentionTensors(x, x, x, x, x, x, x, torch.eye(2)))]
    [(1, 1, 2, 2), (1, 1, 2, 2), (1, 2, 2)]
    """
    check_kernel(tensors.kernel)
    kernel, value, output = _unnormalized(tensors)
    mass = kernel.sum(-1, keepdim=True)
    return kernel / torch.where(_sums_to_1(mass), mass, 1.0), value, output


def _sums_to_1(mass: Tensor) -> Tensor:
    """Where a row sums to 1 up to the rounding of the model's softmax."""
    return (mass - 1).abs() <= ROW_SUM_TOLERANCE


def _unnormalized(tensors: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as they are, values and output matrices, with an axis of heads."""
    kernel, value, output = tensors.kernel, tensors.head_values, tensors.output_matrix
    assert kernel is not None
    assert value is not None
    assert output is not None
    if kernel.ndim == 3:
        return kernel.unsqueeze(1), value.unsqueeze(1), output.unsqueeze(0)
    return kernel, value.to(kernel), output.to(kernel)


@full_precision
def _moments(context: ReplayContext, tensors: AttentionTensors) -> HeadMoments:
    spaces = TangentSpaces.of(context, tensors)
    kernel, value, raw = _unnormalized(tensors)
    output = centered_output(raw, centered=context.centered)
    sums = _KernelSums.of(kernel, value, _along_heads(spaces.x, output), output, raw, context)
    valid, has_keys = sums.rest >= 0, sums.mass > 0
    per_radius = 1 / spaces.radius.unsqueeze(1)
    rounding = ROUNDING * torch.finfo(kernel.dtype).eps
    tangent, ambient = sums.sampling()
    random, size = sums.random()
    # of the values before the shift: |W (v - shift)|^2 + |W shift|^2 is at least half of |W v|^2
    unmoved = 2 * (sums.raw_lengths + sums.mass * sums.raw_shift_length)
    floor = rounding * sums.second + rounding**2 * unmoved
    random_floor = rounding * size + rounding**2 * unmoved * sums.square_mass.sqrt()
    write = tensors.write
    assert write is not None

    def scaled(trace: Tensor, floor: Tensor) -> Tensor:
        """A trace over |y|^2; 0 where it is rounding, as for equal values and rows of entropy 0."""
        return torch.where(valid & has_keys, torch.where(trace > floor, trace, 0.0), torch.nan) * per_radius**2

    return HeadMoments(
        spaces,
        torch.where(has_keys, _drift_lengths(spaces, sums, output), torch.nan) * per_radius,
        scaled(tangent, floor),
        scaled(ambient, floor),
        scaled(random, random_floor),
        spaces.project(write) / spaces.radius.unsqueeze(-1),
        tensors.kernel is not None and tensors.kernel.ndim == 4,
    )


@full_precision
def _along_heads(x: Tensor, output: Tensor) -> Tensor:
    """g = W_O^T x of every head, (rows, heads, n, s)."""
    heads, d, s = output.shape
    along = matrix_product(x, output.movedim(1, 0).reshape(d, heads * s))
    return along.reshape(*x.shape[:-1], heads, s).transpose(1, 2)


@full_precision
def _drift_lengths(spaces: TangentSpaces, sums: _KernelSums, output: Tensor) -> Tensor:
    """|T W_O m| of every head. By its Gram form |W_O m|^2 - (g . m)^2, and where that would lose digits, because W_O m
    is nearly radial, as the length of a vector.
    """
    mean, inner = sums.about + sums.shift, sums.inner + sums.shift_inner
    squares, along = (inner * mean).sum(-1), (sums.g * mean).sum(-1)
    tangential = squares - along**2
    lengths = tangential.clamp(min=0).sqrt()
    radial = (tangential < RADIAL * squares).nonzero(as_tuple=True)
    if len(radial[0]):
        rows, heads, tokens = radial
        for head in sorted(set(heads.tolist())):
            chosen = rows[heads == head], tokens[heads == head]
            written = mean[:, head][chosen] @ output[head].mT
            # W_O m of centered output matrices has mean 0 over coordinates already
            written.addcmul_(along[:, head][chosen].unsqueeze(-1), spaces.x[chosen], value=-1)
            lengths[chosen[0], head, chosen[1]] = torch.linalg.vector_norm(written, dim=-1)
    return lengths


@dataclass(frozen=True, eq=False)
class _KernelSums:
    """The sums over keys that all moments need, with the weights and with their squares, in one product each.

    Values are shifted by a common vector, which avoids cancellation; the sink, of value 0, then has the value -shift.
    ``mean`` is sum_j P_ij v_j of the shifted values and ``about`` that of the row with its sink; ``lengths`` and
    ``raw_lengths`` are the means of v^T G v (with the mean over coordinates) and ``radial`` that of (g_i . v)^2;
    ``square_...`` have P_ij^2 in place of P_ij. ``inner`` is G about, ``shift_inner`` G shift, and ``about_length``,
    ``shift_length``, ``raw_...`` are their products with about and shift. Rows that sum to 1 up to rounding are
    normalized, by their sums and not weight by weight.
    """

    g: Tensor
    shift: Tensor
    mass: Tensor
    rest: Tensor
    mean: Tensor
    about: Tensor
    lengths: Tensor
    raw_lengths: Tensor
    radial: Tensor
    square_mass: Tensor
    square_mean: Tensor
    square_lengths: Tensor
    square_radial: Tensor
    inner: Tensor
    shift_inner: Tensor
    about_length: Tensor
    raw_about_length: Tensor
    shift_length: Tensor
    raw_shift_length: Tensor

    @classmethod
    @full_precision
    def of(
        cls, kernel: Tensor, value: Tensor, g: Tensor, output: Tensor, raw: Tensor, context: ReplayContext
    ) -> _KernelSums:
        s = value.shape[-1]
        seen = torch.ones_like(kernel[:, :1, :, 0]) if context.visible is None else context.visible[:, None].to(kernel)
        shift = (seen.unsqueeze(-1) * value).sum(-2, keepdim=True) / seen.sum(-1)[..., None, None]
        moved, gram = value - shift, output.mT @ output
        # |W v|^2 is that of the centered matrix and d (mean over coordinates)^2
        means = raw.mean(-2).unsqueeze(-2) * math.sqrt(raw.shape[-2]) if context.centered else None
        sums, squares, radial, square_radial = _pair_sums(kernel, g, moved, _inner_products(moved, gram, means)[1:])
        mass = sums[..., -1:]
        ones = _sums_to_1(mass)
        per_mass = torch.where(ones, 1 / mass, 1.0)
        rest = torch.where(ones, 0.0, 1 - mass)
        sums, squares = sums * per_mass, squares * per_mass**2
        mean = sums[..., :s]
        about = mean - rest * shift
        about_inner, about_length, raw_about_length = _inner_products(about, gram, means)
        shift_inner, shift_length, raw_shift_length = _inner_products(shift, gram, means)
        return cls(
            g,
            shift,
            sums[..., -1],
            rest.squeeze(-1),
            mean,
            about,
            sums[..., s],
            sums[..., s + 1],
            radial * per_mass.squeeze(-1),
            squares[..., -1],
            squares[..., :s],
            squares[..., s],
            square_radial * per_mass.squeeze(-1) ** 2,
            about_inner,
            shift_inner,
            about_length.squeeze(-1),
            raw_about_length.squeeze(-1),
            shift_length.squeeze(-1),
            raw_shift_length.squeeze(-1),
        )

    @property
    def second(self) -> Tensor:
        """The second moment of mode A, the size of what cancels."""
        return self.lengths + self.rest * self.shift_length

    def sampling(self) -> tuple[Tensor, Tensor]:
        """tr(T Cov T) and tr Cov of mode A without their factor 1/2, the latter with the mean over coordinates."""
        radial = self.radial + self.rest * (self.g * self.shift).sum(-1) ** 2 - (self.g * self.about).sum(-1) ** 2
        ambient = self.raw_lengths + self.rest * self.raw_shift_length - self.raw_about_length
        return self.second - self.about_length - radial, ambient

    def random(self) -> tuple[Tensor, Tensor]:
        """tr(T [sum_j P_ij^2 (v_j - mean_i)(v_j - mean_i)^T] T) for each token, with the mean over its keys; and the
        size of its terms.
        """
        per_mass = 1 / torch.where(self.mass > 0, self.mass, 1.0).unsqueeze(-1)
        center = self.mean * per_mass
        inner = (self.inner + self.rest.unsqueeze(-1) * self.shift_inner) * per_mass  # G times the center
        along, own = (self.g * center).sum(-1), (inner * center).sum(-1)
        cross = (self.square_mean * inner).sum(-1) - (self.g * self.square_mean).sum(-1) * along
        trace = self.square_lengths - self.square_radial - 2 * cross + self.square_mass * (own - along**2)
        return trace, self.square_lengths + self.square_mass * own


@full_precision
def _pair_sums(
    kernel: Tensor, g: Tensor, moved: Tensor, lengths: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum_j K_ij (v_j, lengths_j, 1), the same with K_ij^2, and sum_j K_ij A_ij^2 and sum_j K_ij^2 A_ij^2 with A_ij =
    g_i . v_j; a few systems at a time.
    """
    # the ones are for the mass; products whose number of columns is a multiple of 4 are a fifth faster
    ones = moved.new_ones(*moved.shape[:-1], 4 - (moved.shape[-1] + 2) % 4)
    columns = torch.cat([moved, *lengths, ones], -1)
    found = []
    for block in row_blocks(len(kernel), kernel[0].numel()):
        weights, along = kernel[block], g[block] @ moved[block].mT
        weighted = weights * along
        square_radial = torch.linalg.vector_norm(weighted, dim=-1) ** 2
        radial = weighted.mul_(along).sum(-1)
        found.append((weights @ columns[block], (weights * weights) @ columns[block], radial, square_radial))
    sums, squares, radial, square_radial = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sums, squares, radial, square_radial


@full_precision
def _inner_products(vectors: Tensor, gram: Tensor, means: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """G v, v^T G v (..., 1), and that with the square of the product with ``means`` added."""
    products = vectors @ gram
    lengths = (products * vectors).sum(-1, keepdim=True)
    if means is None:
        return products, lengths, lengths
    return products, lengths, lengths + (vectors * means).sum(-1, keepdim=True) ** 2
