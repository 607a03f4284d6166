"""The norms of transformers, with gain, bias and epsilon, over the last axis [Helmholtz Transformer, no. 1].

    UnitNorm     y / |y|                                 onto the sphere S^(d-1)
    RMSNorm      G y / sqrt(|y|^2 / d + eps)             onto the ellipsoid sqrt(d) G S^(d-1) where eps = 0
    LayerNorm    G C y / sqrt(|C y|^2 / d + eps) + b     onto sqrt(d) G S^(d-2) + b, S^(d-2) the sphere in 1-perp

with G = diag(gain) and C = I - 1 1^T / d, which removes the mean. Once gain and bias are folded into the weights that
follow (``fold``), the normalized state is on a sphere. A vector without a direction (y = 0, for LayerNorm a constant y)
is mapped to NaN if eps = 0 and to the bias if eps > 0. A NaN or infinite entry makes its whole vector NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.parameters import shape_or_type
from helmscope.geometry.arithmetic import check_dense_values, every, full_precision
from helmscope.geometry.retraction import length
from helmscope.geometry.sphere import retract
from helmscope.types import ConciseRepr, HelmscopeError, check_integer, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Norm(ConciseRepr, ABC):
    """Base class of ``UnitNorm``, ``RMSNorm`` and ``LayerNorm``: a norm over the last axis.

    Norms check the shape and dtype of their input but not its values, so they work under all torch.func transforms.

    >>> norm = LayerNorm()
    >>> norm.radius(torch.tensor([4.0, 10.0, 10.0, 4.0])), norm.direction(torch.tensor([4.0, 10.0, 10.0, 4.0]))
    (tensor(6.), tensor([-0.5000,  0.5000,  0.5000, -0.5000]))
    """

    gain: Float[Tensor, " d"] | None
    bias: Float[Tensor, " d"] | None
    eps: float

    def __post_init__(self) -> None:
        for name in ("gain", "bias"):
            _check_vector(name, getattr(self, name))
        if self.gain is not None and self.bias is not None and self.gain.shape != self.bias.shape:
            raise HelmscopeError(f"bias has shape {tuple(self.bias.shape)}, but gain has {tuple(self.gain.shape)}")
        object.__setattr__(self, "eps", check_real("eps", self.eps, at_least=0))

    @abstractmethod
    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The normalized vectors."""

    @abstractmethod
    def jacobian(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """The derivative at y in closed form: row i is the gradient of entry i of the result.

        >>> UnitNorm().jacobian(torch.tensor([0.0, 2.0]))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
        """

    @abstractmethod
    def without_affine(self) -> Norm:
        """This norm without gain and bias, whose values are on a sphere if eps = 0.

        >>> RMSNorm(gain=torch.tensor([1.0, 2.0])).without_affine()
        RMSNorm()
        """

    @abstractmethod
    def normalized_part(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The part of y that is normalized: y itself, or C y for LayerNorm.

        >>> LayerNorm().normalized_part(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
        """

    def radius(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The length that is divided out: |y|, or |C y| for LayerNorm; without eps.

        >>> RMSNorm().radius(torch.tensor([3.0, 4.0]))
        tensor(5.)
        """
        self.check_size(y)
        return length(self.normalized_part(y))

    def direction(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The unit vector y / |y|, or C y / |C y| for LayerNorm; without eps.

        >>> LayerNorm().direction(torch.tensor([1.0, 1.0, 4.0, 4.0]))
        tensor([-0.5000, -0.5000,  0.5000,  0.5000])
        """
        self.check_size(y)
        return retract(self.normalized_part(y))

    @full_precision
    def fold(
        self, w: Float[Tensor, "*heads k d"], b: Float[Tensor, "*heads k"] | None = None
    ) -> tuple[Float[Tensor, "*heads k d"], Float[Tensor, "*heads k"]]:
        """Fold gain and bias into the weights that follow: (w', b') act on the output without affine part as (w, b) act
        on this norm,

            w' normalized(y) + b' = w norm(y) + b,      w' = w G,   b' = b + w bias.

        b' is 0 if there is neither b nor bias. The result has the dtype and device of w. Raises ``HelmscopeError`` for
        shapes that do not fit.

        >>> LayerNorm(gain=torch.tensor([1.0, 2.0]), bias=torch.tensor([0.0, 0.5])).fold(torch.ones(1, 2))
        (tensor([[1., 2.]]), tensor([0.5000]))
        """
        _check_float_tensor("w", w, 2)
        self.check_size(w, name="w")
        if b is not None and (not isinstance(b, torch.Tensor) or b.shape != w.shape[:-1]):
            raise HelmscopeError(
                f"b is {shape_or_type(b)}, but w of shape {tuple(w.shape)} requires {tuple(w.shape[:-1])}"
            )
        shift = torch.zeros_like(w[..., 0]) if b is None else b.to(w)
        shift = shift if self.bias is None else shift + w @ self.bias.to(w)
        return (w if self.gain is None else w * self.gain.to(w)), shift

    def check_size(self, y: Float[Tensor, "*batch d"], *, name: str = "y") -> None:
        """Raise ``HelmscopeError`` unless y is a float tensor whose last axis fits gain and bias."""
        _check_float_tensor(name, y, 1)
        for parameter, vector in (("gain", self.gain), ("bias", self.bias)):
            if vector is not None and vector.shape != y.shape[-1:]:
                raise HelmscopeError(
                    f"{name} has shape {tuple(y.shape)}, but {parameter} of shape {tuple(vector.shape)} requires "
                    f"(..., {len(vector)})"
                )


@dataclass(frozen=True, eq=False)
class UnitNorm(Norm):
    """Normalization to length 1: N(y) = y / |y|, the norm of theory [Helmholtz Transformer, no. 1]. Jacobian (I - x
    x^T) / |y| with x = N(y), of rank d - 1.

    It has no gain, bias or eps; y = 0 is mapped to NaN.

    >>> UnitNorm()(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    gain = None
    bias = None
    eps = 0.0

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """y / |y|."""
        return self.direction(y)

    def jacobian(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """(I - x x^T) / |y|."""
        x = self.direction(y)
        return (_identity(x) - x.unsqueeze(-1) * x.unsqueeze(-2)) / self.radius(y)[..., None, None]

    def without_affine(self) -> UnitNorm:
        """Itself."""
        return self

    def normalized_part(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """y."""
        return y


@dataclass(frozen=True, eq=False)
class RMSNorm(Norm):
    """Root mean square normalization: N(y) = G y / sqrt(s^2 + eps), s^2 = |y|^2 / d ([Helmholtz Transformer, no. 1];
    Zhang and Sennrich 2019, arXiv:1910.07467).

    Equal to ``torch.nn.functional.rms_norm``. Its Jacobian (s^2 + eps)^(-1/2) G (I - x x^T s^2 / (s^2 + eps)) maps the
    radial direction x = y / |y| to G x eps / (s^2 + eps)^(3/2), which is 0 only if eps = 0. ``gain`` (d,) defaults to
    1. At y = 0 the norm is 0 if eps > 0 and NaN if eps = 0. Raises ``HelmscopeError`` for a gain that is not a finite
    vector and for eps < 0.

    >>> RMSNorm(gain=torch.tensor([1.0, 2.0]))(torch.tensor([3.0, 3.0]))
    tensor([1., 2.])
    """

    gain: Float[Tensor, " d"] | None = field(default=None, kw_only=True)
    eps: float = field(default=0.0, kw_only=True)
    bias = None

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """G y / sqrt(|y|^2 / d + eps)."""
        self.check_size(y)
        return _normalized(y, self)

    def jacobian(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """(s^2 + eps)^(-1/2) G (I - x x^T s^2 / (s^2 + eps))."""
        self.check_size(y)
        return _jacobian(y, _identity(y), self)

    def without_affine(self) -> RMSNorm:
        """y / sqrt(|y|^2 / d + eps)."""
        return replace(self, gain=None)

    def normalized_part(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """y."""
        return y


@dataclass(frozen=True, eq=False)
class LayerNorm(Norm):
    """Layer normalization: N(y) = G C y / sqrt(s^2 + eps) + bias, s^2 = |C y|^2 / d ([Helmholtz Transformer, no. 1];
    Ba, Kiros and Hinton 2016, arXiv:1607.06450).

    Equal to ``torch.nn.functional.layer_norm``. Its Jacobian (s^2 + eps)^(-1/2) G (C - x x^T s^2 / (s^2 + eps)),
    x = C y / |C y|, has rank d - 2 if eps = 0: neither the mean nor the length of C y matters. ``gain`` (d,) defaults
    to 1 and ``bias`` (d,) to 0. At a constant y the norm is the bias if eps > 0 and NaN if eps = 0. Raises
    ``HelmscopeError`` for a gain or bias that is not a finite vector, for unequal shapes and for eps < 0.

    >>> LayerNorm(bias=torch.tensor([0.0, 0.5]))(torch.tensor([1.0, 7.0]))
    tensor([-1.0000,  1.5000])
    """

    gain: Float[Tensor, " d"] | None = field(default=None, kw_only=True)
    bias: Float[Tensor, " d"] | None = field(default=None, kw_only=True)
    eps: float = field(default=0.0, kw_only=True)

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """G C y / sqrt(|C y|^2 / d + eps) + bias."""
        self.check_size(y)
        return _normalized(self.normalized_part(y), self)

    def jacobian(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """(s^2 + eps)^(-1/2) G (C - x x^T s^2 / (s^2 + eps))."""
        self.check_size(y)
        return _jacobian(self.normalized_part(y), _identity(y) - 1 / y.shape[-1], self)

    def without_affine(self) -> LayerNorm:
        """C y / sqrt(|C y|^2 / d + eps)."""
        return replace(self, gain=None, bias=None)

    def normalized_part(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """C y = y - mean(y)."""
        centered = y - y.mean(-1, keepdim=True)
        # twice, because the first mean is rounded, and for a constant y that error would look like a direction
        return centered - centered.mean(-1, keepdim=True)


def layer_beta(dim: int, head_dim: int, *, scale: float = 1.0) -> float:
    """The inverse temperature on the unit sphere of a layer whose tokens have norm sqrt(d) and whose logits are
    q.k / sqrt(d_head) [Helmholtz Transformer, no. 1]: beta = scale d / sqrt(d_head).

    ``scale`` >= 0 is the scale of W_Q^T W_K. With Q = K = I and d_head = d, beta = sqrt(d). Raises ``HelmscopeError``
    for dimensions below 1 and a negative scale.

    >>> layer_beta(64, 64)
    8.0
    """
    dim, head_dim = check_integer("dim", dim, at_least=1), check_integer("head_dim", head_dim, at_least=1)
    return check_real("scale", scale, at_least=0) * dim / math.sqrt(head_dim)


def _rescaled(c: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """u, r, m with u / r = c / sqrt(|c|^2 / d + eps) and u = c / m, where the scale m prevents the squares of tiny and
    huge vectors from underflow and overflow. m is a constant to autograd: it cancels, so the gradient is exact.
    """
    scale = c.detach().abs().amax(-1, keepdim=True).clamp_min(math.sqrt(eps))
    scale = torch.where((scale > 1e-12) & (scale < 1e12), 1.0, scale)
    unit, floor = c / scale, math.sqrt(eps) / scale
    return unit, torch.sqrt((unit * unit).mean(-1, keepdim=True) + floor * floor), scale


def _normalized(c: Tensor, norm: Norm) -> Tensor:
    """G c / sqrt(|c|^2 / d + eps) + bias, for the part c of the input that is normalized."""
    unit, size, _ = _rescaled(c, norm.eps)
    result = unit / size
    result = result if norm.gain is None else norm.gain.to(c) * result
    return result if norm.bias is None else result + norm.bias.to(c)


def _jacobian(c: Tensor, centering: Tensor, norm: Norm) -> Tensor:
    """The derivative of ``_normalized`` with respect to y, where c = centering y."""
    unit, size, scale = _rescaled(c, norm.eps)
    x = unit / size
    # x x^T / d = xhat xhat^T s^2 / (s^2 + eps), which is also defined at c = 0
    result = (centering - x.unsqueeze(-1) * x.unsqueeze(-2) / c.shape[-1]) / size.unsqueeze(-1) / scale.unsqueeze(-1)
    return result if norm.gain is None else norm.gain.to(c).unsqueeze(-1) * result


def _identity(y: Tensor) -> Tensor:
    return torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)


def _check_float_tensor(name: str, y: object, ndim: int) -> None:
    """Raise ``HelmscopeError`` unless y is a float tensor of at least ``ndim`` axes."""
    if not isinstance(y, torch.Tensor) or y.dtype not in (torch.float64, torch.float32):
        shown = f"a tensor of {y.dtype}" if isinstance(y, torch.Tensor) else type_with_article(y)
        raise HelmscopeError(f"{name} is {shown}, but it must be a torch tensor of float64 or float32")
    if y.ndim < ndim or y.shape[-1] < 1:
        wanted = "(..., d)" if ndim == 1 else "(..., k, d)"
        raise HelmscopeError(f"{name} has shape {tuple(y.shape)}, but it must be {wanted} with d >= 1")


def _check_vector(name: str, vector: object) -> None:
    """Raise ``HelmscopeError`` unless the argument is None or a vector of finite floats."""
    if vector is None:
        return
    if not isinstance(vector, torch.Tensor) or vector.ndim != 1 or len(vector) < 1:
        shown = f"of shape {tuple(vector.shape)}" if isinstance(vector, torch.Tensor) else type_with_article(vector)
        raise HelmscopeError(f"{name} is {shown}, but it must be a torch tensor of shape (d,)")
    if not vector.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {vector.dtype}, but it must hold floating-point numbers")
    check_dense_values(name, vector)
    entries = vector.detach()
    good = torch.isfinite(entries)
    if not every(good):
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be finite")
