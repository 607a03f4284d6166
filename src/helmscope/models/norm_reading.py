"""A norm module of a real model as a ``fields.Norm``, read off its values: no class name is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_epsilon")


def read_norm(module: nn.Module, like: Tensor) -> Norm | None:
    """Gain, bias and eps of a norm over vectors like the rows of ``like``; None where the module is no such norm.

    The bias is the image of 0. A vector of signs whose mean is 0 is normalized to itself over sqrt(1 + eps), and so
    its image shows the gain; the vector of an odd length has one 0, which a second one covers. That the module and what
    was read agree on random vectors decides.

    >>> norm = read_norm(torch.nn.LayerNorm(4, eps=1e-5), torch.ones(1, 4))
    >>> type(norm).__name__, norm.eps, norm.gain
    ('LayerNorm', 1e-05, tensor([1., 1., 1., 1.]))
    """
    eps = next((float(value) for name in EPSILONS if (value := getattr(module, name, None)) is not None), None)
    d, dtype = like.shape[-1], like.dtype
    drawn = torch.randn(16, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
    with torch.no_grad():
        try:
            zero, image, shifted = module(torch.zeros_like(drawn[:1])), module(drawn), module(drawn + 1)
        except (RuntimeError, TypeError):
            return None
        if not all(isinstance(each, torch.Tensor) and each.shape[1:] == drawn.shape[1:] for each in (zero, image)):
            return None
        eps = _epsilon(module, drawn, zero[0]) if eps is None else eps
        bias, gain = zero[0].detach(), _gain(module, drawn, zero[0], eps)
    size = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    centered = bool((image - shifted).norm() <= size * image.norm())
    kind: type[Norm] = LayerNorm if centered else RMSNorm
    norm = LayerNorm(gain=gain, bias=bias, eps=eps) if centered else RMSNorm(gain=gain, eps=eps)
    wide = drawn.float() if dtype not in (torch.float32, torch.float64) else drawn
    agrees = bool((norm(wide) - image.to(wide)).norm() <= size * image.norm()) and isinstance(norm, kind)
    return norm if agrees else None


def _epsilon(module: nn.Module, like: Tensor, bias: Tensor) -> float:
    """The eps of a norm that does not say it, from how much shorter the image of a vector of signs gets when the vector
    is short: (1 + eps) / (1 + eps / s^2) of it is left, squared.
    """
    signs = like.new_ones(like.shape[-1])
    signs[1::2] = -1
    signs = signs - signs.mean()
    short = 1e-2
    whole, small = (float((module((s * signs)[None])[0] - bias).double().norm()) for s in (1.0, short))
    ratio = (whole / small) ** 2 if small > 0 else 1.0  # (1 + eps / s^2) / (1 + eps)
    found = (ratio - 1) / (short**-2 - ratio)
    return found if found > 1e-9 else 0.0


def _gain(module: nn.Module, like: Tensor, bias: Tensor, eps: float) -> Tensor:
    d = like.shape[-1]
    signs = like.new_ones(d)
    signs[1::2] = -1
    if d % 2:
        signs[-1] = 0
    size = (float((signs * signs).mean()) + eps) ** 0.5
    gain = torch.zeros_like(signs)
    for each in (signs, signs.roll(1)):
        seen = (module(each[None])[0] - bias) * each * size
        gain = torch.where(each != 0, seen, gain)
    return gain.detach()
