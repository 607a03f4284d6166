"""Random requests: every size, mask and temperature that a kernel may meet."""

from __future__ import annotations

import torch

from helmscope.kernels.request import Request

F64 = torch.float64
SIZES = (1, 2, 3, 5, 31, 32, 33, 64, 65, 100, 127, 150)


def random_request(seed: int, *, plain: bool = False, dims: tuple[int, int] = (2, 130), dtype=F64) -> Request:
    """One of many: n = 1, 2, 3 and on, d in ``dims``, beta = 0, 1, 4, 50 or 500, and unless ``plain`` a bias."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    def normal(*shape):
        return torch.randn(*shape, dtype=F64, generator=generator)

    n, d = pick(SIZES), int(torch.randint(dims[0], dims[1] + 1, (1,), generator=generator))
    batch = pick(((), (1,), (2,), (1, 2)))
    x = torch.nn.functional.normalize(normal(*batch, n, d), dim=-1)
    beta = pick((0.0, 1.0, 4.0, 50.0, 500.0))
    weights = normal(*batch, n).abs() if pick((False, True)) else None
    if weights is not None and n > 2:
        weights[..., 1] = 0.0
    bias = None if plain or pick((False, True)) else normal(n, n)
    if bias is not None and n > 3:
        bias[0, 2] = -torch.inf
    plain_value = plain or pick((False, True))
    value = x if plain_value else normal(*batch, n, int(torch.randint(1, 20, (1,), generator=generator)))
    parts = (part.to(dtype) for part in (beta * x, x, value))
    return Request(
        *parts,
        weights=None if weights is None else weights.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        causal=pick((False, True)),
        skip_self=pick((False, True)),
        beta=beta if plain_value and bias is None else None,
    )
