"""A norm module of a real model as a ``fields.Norm``, read off its values: no class name is asked."""

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
    """Gain, bias and eps of a norm over vectors like the rows of ``like``; None where the module is no such norm.

    A vector s of signs whose mean is 0 is normalized to itself over sqrt(1 + eps), and so the images of s and -s show
    bias and gain; an s of odd length has one 0, which a second one covers. Many norms compute in float32 whatever the
    model's dtype is: where a parameter of the module, or 1 plus it, is what the images show, the parameter itself is
    taken, which has all its digits. That the module and what was read agree on random vectors decides.

    >>> norm = read_norm(torch.nn.LayerNorm(4, eps=1e-5), torch.ones(1, 4))
    >>> type(norm).__name__, norm.eps, norm.gain
    ('LayerNorm', 1e-05, tensor([1., 1., 1., 1.]))
    """
    wide = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    size = 1e-4 if wide == like.dtype else 3e-2
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(16, like.shape[-1], generator=generator, dtype=torch.float64, device="cpu").to(like)
    with torch.no_grad():
        try:
            image, shifted = module(drawn), module(drawn + 1)
        except (RuntimeError, TypeError):
            return None
        if not isinstance(image, torch.Tensor) or image.shape != drawn.shape:
            return None
        eps = epsilon_of(module)
        eps = _epsilon(module, drawn) if eps is None else eps
        gain, bias = _shown(module, drawn, eps)
    if not bool(torch.isfinite(gain).all() and torch.isfinite(bias).all()):
        return None
    gain, bias = (_exact(module, seen.to(wide), shifts, size) for seen, shifts in ((gain, (0, 1)), (bias, (0,))))
    centered = bool((image - shifted).norm() <= size * image.norm())
    norm = LayerNorm(gain=gain, bias=bias, eps=eps) if centered else RMSNorm(gain=gain, eps=eps)
    agrees = bool((norm(drawn.to(wide)) - image.to(wide)).norm() <= size * image.norm())
    return norm if agrees else None


def epsilon_of(module: nn.Module) -> float | None:
    """The eps that a norm names; None where it names none.

    >>> epsilon_of(torch.nn.LayerNorm(4, eps=1e-5)), epsilon_of(torch.nn.Linear(1, 1))
    (1e-05, None)
    """
    told = (getattr(module, name, None) for name in EPSILONS)
    return next((float(value) for value in told if isinstance(value, int | float)), None)


def _signs(like: Tensor) -> Float[Tensor, " d"]:
    """+1 and -1 in turns, with a 0 at the end of an odd length."""
    signs = like.new_ones(like.shape[-1])
    signs[1::2] = -1
    if len(signs) % 2:
        signs[-1] = 0
    return signs


def _epsilon(module: nn.Module, like: Tensor) -> float:
    """The eps of a norm that does not say it, from how much shorter the image of a vector of signs gets when the vector
    is short: (1 + eps) / (1 + eps / s^2) of it is left, squared.
    """
    signs, short = _signs(like), 1e-2
    whole, small = (float(_halves(module, s * signs)[0].double().norm()) for s in (1.0, short))
    ratio = (whole / small) ** 2 if small > 0 else 1.0  # (1 + eps / s^2) / (1 + eps)
    found = (ratio - 1) / (short**-2 - ratio)
    return found if found > 1e-9 else 0.0


def _halves(module: nn.Module, x: Float[Tensor, " d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """The parts of a module's image of x that change sign with x, and that do not."""
    there, back = module(x[None])[0].detach(), module(-x[None])[0].detach()
    return (there - back) / 2, (there + back) / 2


def _shown(module: nn.Module, like: Tensor, eps: float) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Gain and bias as the images of signs show them."""
    signs = _signs(like)
    size = (float((signs * signs).mean()) + eps) ** 0.5
    gain = torch.zeros_like(signs)
    for each in (signs, signs.roll(1)):
        odd, bias = _halves(module, each)
        gain = torch.where(each != 0, odd * each * size, gain)
    return gain, bias


def _exact(module: nn.Module, seen: Float[Tensor, " d"], shifts: tuple[int, ...], size: float) -> Float[Tensor, " d"]:
    """The parameter of the module, plus a shift, that is nearest to what was seen; what was seen where none is near."""
    own = [value.detach().to(seen) for value in module.parameters(recurse=False) if value.shape == seen.shape]
    known = [shift + value for value in own for shift in shifts]
    gaps = [float((value - seen).abs().max()) for value in known]
    best = min(range(len(known)), key=gaps.__getitem__, default=None)
    near = best is not None and gaps[best] <= size * float(seen.abs().max())
    return known[best] if near and best is not None else seen
