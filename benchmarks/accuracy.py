"""Every kernel against the dense sum in float64: the largest relative error over n and d, for each beta and mask.

The error of the mean is |found - exact| / |exact| over the tokens of one system, that of log Z the largest difference;
the exact sum is taken of the very numbers that the kernel is given. float64 and float32 on a CPU, float32 on a GPU and
float64 where a kernel serves it.
"""

from __future__ import annotations

import torch
from common import Record, parser, record, relative_error, say, unit_vectors
from torch import Tensor

from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.kernel import Kernel, Request
from helmscope.kernels.streaming import Streaming

KERNELS: tuple[Kernel, ...] = (Dense(), Streaming(), Harmonic(), Flash())
BETAS = (0.0, 1.0, 4.0, 9.0, 50.0, 500.0)
# on a GPU no n that Triton would compile a kernel of its own for, 1 and multiples of 16: they would take minutes
SIZES = {"cpu": (1, 2, 3, 64, 257, 1_000), "cuda": (2, 3, 257, 1_000, 4_099)}
DIMS = (2, 3, 16, 64, 130)


def exact_sum(request: Request) -> tuple[Tensor, Tensor]:
    """The mean and log Z in float64, with the matrix stored and nothing clever."""
    pairs = request.query.double() @ request.key.double().mT
    if request.causal:
        pairs = pairs.masked_fill(torch.ones_like(pairs, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(pairs, -1) @ request.value.double(), torch.logsumexp(pairs, -1, keepdim=True)


def one_row(record: Record, kernel: Kernel, dtype: torch.dtype, beta: float) -> None:
    """One kernel at one beta, over all sizes and both masks."""
    row = {"kernel": type(kernel).__name__, "dtype": str(dtype).removeprefix("torch."), "beta": beta}
    reason = None
    for causal in (False, True):
        mean_error, mass_error, where, served = 0.0, 0.0, "", 0
        for n in SIZES[record.device.type]:
            for d in DIMS:
                x = unit_vectors(n, d, device=record.device, dtype=dtype, seed=1_000 * n + d)
                request = Request(beta * x, x, x, causal=causal, beta=beta)
                if refused := kernel.refuses(request):
                    reason = refused
                    continue
                served += 1
                found, (mean, log_mass) = kernel.sum(request), exact_sum(request)
                error = relative_error(found.mean, mean)
                if error >= mean_error:
                    mean_error, where = error, f"{n:,} x {d}"
                mass_error = max(
                    mass_error, float((found.log_mass.double() - log_mass).abs().nan_to_num(torch.inf).max())
                )
        if served:
            mask = "causal " if causal else ""
            row |= {f"{mask}mean": mean_error, f"{mask}log Z": mass_error, f"{mask}worst n x d": where}
    if len(row) == 3:
        say(f"  {row['kernel']}, {row['dtype']}, beta = {beta:g}: refused, {reason}")
        return
    record.tables.setdefault("Largest error against float64", []).append(row)


def main() -> None:
    """All kernels, all betas."""
    given = parser(__doc__).parse_args()
    found = record("accuracy", given)
    for kernel in KERNELS:
        for dtype in (torch.float64, torch.float32):
            say(f"{type(kernel).__name__}, {dtype}")
            for beta in BETAS:
                one_row(found, kernel, dtype, beta)
            found.save()
    found.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
