"""Every kernel against the dense sum in float64: the largest error over n and d, for each beta and mask.

The error of the mean is |computed - exact| / |exact| over the tokens of one system, that of log Z the largest
difference; the exact sum has the same input as the kernel. Tokens are uniform, or in two antipodal clusters of width
0.1. float64 and float32 on a CPU; float32 on a GPU, and float64 where a kernel supports it. The fused kernel, which
integrates whole systems over time, is compared with the same Runge-Kutta steps in float64.
"""

from __future__ import annotations

import torch
from common import Results, new_results, parser, relative_error, say, unit_vectors
from torch import Tensor

import helmscope as hs
from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.fused import fused_clustering, fused_refuses
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.request import Request, Summation

KERNELS: tuple[Summation, ...] = (Dense(), Blockwise(), Harmonic(), Flash())
BETAS = (0.0, 1.0, 4.0, 9.0, 50.0, 500.0)
# on a GPU, no n for which Triton would compile a specialized kernel (1 and multiples of 16), which would take minutes
SIZES = {"cpu": (1, 2, 3, 64, 257, 1_000), "cuda": (2, 3, 257, 1_000, 4_099)}
DIMS = (2, 3, 16, 64, 130)


def exact_sum(request: Request) -> tuple[Tensor, Tensor]:
    """The mean and log Z in float64, from the full matrix of logits."""
    logits = request.query.double() @ request.key.double().mT
    if request.causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(logits, -1) @ request.value.double(), torch.logsumexp(logits, -1, keepdim=True)


def tokens(n: int, d: int, device: torch.device, dtype: torch.dtype, *, clustered: bool) -> Tensor:
    """Unit vectors, uniform or clustered around the two poles of the first axis."""
    x = unit_vectors(n, d, device=device, dtype=torch.float64, seed=1_000 * n + d)
    if clustered:
        x = 0.1 * x
        x[::2, 0] += 1
        x[1::2, 0] -= 1
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def one_row(results: Results, kernel: Summation, dtype: torch.dtype, beta: float, *, clustered: bool) -> None:
    """The errors of one kernel at one beta, over all sizes and both masks."""
    row = {
        "kernel": type(kernel).__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": "clusters" if clustered else "uniform",
        "beta": beta,
    }
    empty_length = len(row)
    reason = None
    for causal in (False, True):
        mean_error, mass_error, where, served = 0.0, 0.0, "", 0
        for n in SIZES[results.device.type]:
            for d in DIMS:
                x = tokens(n, d, results.device, dtype, clustered=clustered)
                request = Request(beta * x, x, x, causal=causal, beta=beta)
                if refused := kernel.unsupported_reason(request):
                    reason = refused
                    continue
                served += 1
                sums, (mean, log_mass) = kernel.sum(request), exact_sum(request)
                error = relative_error(sums.mean, mean)
                if error >= mean_error:
                    mean_error, where = error, f"{n:,} x {d}"
                mass_error = max(
                    mass_error, float((sums.log_mass.double() - log_mass).abs().nan_to_num(torch.inf).max())
                )
        if served:
            mask = "causal " if causal else ""
            row |= {f"{mask}mean": mean_error, f"{mask}log Z": mass_error, f"{mask}worst n x d": where}
    if len(row) == empty_length:
        say(f"  {row['kernel']}, {row['dtype']}, beta = {beta:g}: refused, {reason}")
        return
    results.tables.setdefault("Largest error against float64", []).append(row)


def fused_row(results: Results) -> None:
    """16 systems over time, with the same steps in float32 and float64; on a CPU (interpreted) only one size."""
    if reason := fused_refuses(tokens(32, 2, results.device, torch.float32, clustered=False).view(1, 32, 2)):
        say(f"  the fused kernel refused: {reason}")
        return
    sizes = ((2, 2), (17, 3), (32, 32), (64, 128)) if results.device.type == "cuda" else ((17, 3),)
    times, h = [0.0, 0.5, 1.0, 1.5], 0.1
    for beta in (1.0, 4.0):
        for field, causal in ((hs.SA, False), (hs.SA, True), (hs.USA, False)):
            worst, wrong = 0.0, 0
            for n, d in sizes:
                x = tokens(16 * n, d, results.device, torch.float32, clustered=False).view(16, n, d)
                y = torch.nn.functional.normalize(x.double(), dim=-1)
                scale = h * (torch.e**-beta if field is hs.USA else 1.0)
                scaled_times = [t * scale / h for t in times]
                run = hs.integrate(field(beta, causal=causal), y, scaled_times, stepper=hs.RK4(scale))
                fused = fused_clustering(
                    x,
                    scaled_times,
                    betas=torch.tensor([beta]),
                    steps=torch.tensor([5]),
                    normalized=field is hs.SA,
                    causal=causal,
                    stop=False,
                    keep_states=True,
                )
                assert fused.states is not None
                worst = max(worst, float((fused.states[0].double() - run.states[-1]).abs().max()))
                met = (hs.observe.close_pair_share(run.states, delta=1e-3).mT * fused.pairs).round()
                wrong = max(wrong, int((fused.met[0] - met).abs().max()))
            name = f"{field.__name__}{', causal' if causal else ''}"
            row = {"field": name, "beta": beta, "largest error of a coordinate": worst, "pairs counted wrongly": wrong}
            results.tables.setdefault("The fused kernel against the same steps in float64", []).append(row)


def main() -> None:
    """Measure all kernels at all betas."""
    options = parser(__doc__).parse_args()
    results = new_results("accuracy", options)
    for kernel in KERNELS:
        for dtype in (torch.float64, torch.float32):
            say(f"{type(kernel).__name__}, {dtype}")
            for beta in BETAS:
                for clustered in (False, True):
                    one_row(results, kernel, dtype, beta, clustered=clustered)
            results.save()
    fused_row(results)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
