"""A norm module of a real model as a ``fields.Norm``, identified by its values and not by its class name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_epsilon")


def read_norm(module: nn.Module, like: Tensor) -> Norm | None:
    """The norm that a module computes on vectors like the rows of ``like``, (..., d); None if the module is not a norm.

    A vector s of signs with mean 0 is normalized to s / sqrt(1 + eps), so the images of s and -s determine bias and
    gain; an s of odd length has one entry 0, for which a second, shifted s is used. Many norms compute in float32
    whatever the model's dtype: if a parameter of the module, or 1 plus it, agrees with the estimate, the parameter is
    used, which has full precision. The result is accepted if it agrees with the module on random vectors.

    >>> norm = read_norm(torch.nn.LayerNorm(4, eps=1e-5), torch.ones(1, 4))
    >>> type(norm).__name__, norm.eps, norm.gain
    ('LayerNorm', 1e-05, tensor([1., 1., 1., 1.]))
    """
    wide = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    tol = 1e-4 if wide == like.dtype else 3e-2
    generator = torch.Generator("cpu").manual_seed(0)
    points = torch.randn(16, like.shape[-1], generator=generator, dtype=torch.float64, device="cpu").to(like)
    with torch.no_grad():
        try:
            image, shifted = module(points), module(points + 1)
        except (RuntimeError, TypeError):
            return None
        if not isinstance(image, torch.Tensor) or image.shape != points.shape:
            return None
        eps = epsilon_of(module)
        eps = _estimate_epsilon(module, points) if eps is None else eps
        gain, bias = _estimate_gain_and_bias(module, points, eps)
    if not bool(torch.isfinite(gain).all() and torch.isfinite(bias).all()):
        return None
    gain = _nearest_parameter(module, gain.to(wide), (0, 1), tol)
    bias = _nearest_parameter(module, bias.to(wide), (0,), tol)
    centered = bool((image - shifted).norm() <= tol * image.norm())
    norm = LayerNorm(gain=gain, bias=bias, eps=eps) if centered else RMSNorm(gain=gain, eps=eps)
    agrees = bool((norm(points.to(wide)) - image.to(wide)).norm() <= tol * image.norm())
    return norm if agrees else None


def epsilon_of(module: nn.Module) -> float | None:
    """The epsilon attribute of a norm module; None if it has none.

    >>> epsilon_of(torch.nn.LayerNorm(4, eps=1e-5)), epsilon_of(torch.nn.Linear(1, 1))
    (1e-05, None)
    """
    values = (getattr(module, name, None) for name in EPSILONS)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def _signs(like: Tensor) -> Float[Tensor, " d"]:
    """Alternating +1 and -1, with a final 0 if the length is odd."""
    signs = like.new_ones(like.shape[-1])
    signs[1::2] = -1
    if len(signs) % 2:
        signs[-1] = 0
    return signs


def _estimate_epsilon(module: nn.Module, like: Tensor) -> float:
    """Estimate the epsilon of a norm without such an attribute, from the images of a vector of signs and of s times it.

    The squared length of the second image is (1 + eps) / (1 + eps / s^2) times that of the first.
    """
    signs, short = _signs(like), 1e-2
    whole, small = (float(_odd_and_even(module, s * signs)[0].double().norm()) for s in (1.0, short))
    ratio = (whole / small) ** 2 if small > 0 else 1.0  # (1 + eps / s^2) / (1 + eps)
    epsilon = (ratio - 1) / (short**-2 - ratio)
    return epsilon if epsilon > 1e-9 else 0.0


def _odd_and_even(module: nn.Module, x: Float[Tensor, " d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """The odd and the even part of a module at x."""
    plus, minus = module(x[None])[0].detach(), module(-x[None])[0].detach()
    return (plus - minus) / 2, (plus + minus) / 2


def _estimate_gain_and_bias(
    module: nn.Module, like: Tensor, eps: float
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Gain and bias from the images of vectors of signs."""
    signs = _signs(like)
    rms = (float((signs * signs).mean()) + eps) ** 0.5
    gain = torch.zeros_like(signs)
    for x in (signs, signs.roll(1)):
        odd, bias = _odd_and_even(module, x)
        gain = torch.where(x != 0, odd * x * rms, gain)
    return gain, bias


def _nearest_parameter(
    module: nn.Module, estimate: Float[Tensor, " d"], shifts: tuple[int, ...], tol: float
) -> Float[Tensor, " d"]:
    """The parameter of the module, plus a shift, nearest to the estimate; the estimate itself if none is near."""
    parameters = [p.detach().to(estimate) for p in module.parameters(recurse=False) if p.shape == estimate.shape]
    candidates = [shift + value for value in parameters for shift in shifts]
    gaps = [float((value - estimate).abs().max()) for value in candidates]
    best = min(range(len(candidates)), key=gaps.__getitem__, default=None)
    is_near = best is not None and gaps[best] <= tol * float(estimate.abs().max())
    return candidates[best] if is_near and best is not None else estimate
