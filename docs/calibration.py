"""Calibrate the estimators behind the measurements on synthetic laws with known answers; writes calibration.md to this
folder.

    python docs/calibration.py --workers 2
    python docs/calibration.py --only mlp_force mlp_swirl_bound    # the other tables stay as they are

Every estimator is drawn many times at a few sample sizes. Its bias is its mean minus the true value; its intervals,
over 32 prompts by ``reduce_replicates``, are judged by whether they cover its own expectation at that sample size.
Random numbers are seeded by law and size, so that every run writes the same file.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from joblib import Parallel, delayed

from helmscope.stats.reduce import reduce_replicates

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.calibration_depth_laws import DEPTH_LAWS, MLP_LAWS  # noqa: E402
from support.calibration_flow_laws import FLOW_LAWS  # noqa: E402
from support.calibration_laws import ATTENTION_LAWS, PROMPTS, Law  # noqa: E402

LAWS = (*ATTENTION_LAWS, *MLP_LAWS, *DEPTH_LAWS, *FLOW_LAWS)
EXACT = {
    "kernel_statistics": "functions of the attention weights of each row",
    "bistochasticity": "a function of the kernel, to a tolerance of 1e-9",
}
MISSES = {
    (
        "perturbation_growth",
        "lyapunov_exponent",
        16,
    ): "log |T w| of one random direction w of a plane is nearly log |cos|, with a skewness "
    "of -2.4 that no scale removes. It is -0.8 where 15 of 30 directions are stretched by 1.5 and the others by 0.75, "
    "-1.5 where one of them is, and -0.3 and 0.1 in the two exponents of model A over 64 texts",
    **{
        (
            "entropy_along_depth",
            name,
            size,
        ): "uniform tokens have the least Fisher information of all laws on the sphere, "
        "so that it changes in second order only: intervals are too wide, and miss less often than they may"
        for name in ("fisher_information", "surface_fisher_information")
        for size in (8, 32)
    },
    **{
        (
            "free_energy_along_depth",
            "predicted_entropy_change",
            size,
        ): "at nu = 0.2 E div b and nu I change in opposite directions with the spread of the cloud and nearly cancel, "
        "so that the second order is what is left, in which an estimate and its error rise together; at nu = 0.05 they "
        "do not"
        for size in (8, 32)
    },
    (
        "jko_step_test",
        "gap_closed_share",
        8,
    ): "with halves of 128 tokens the correction of the bias adds a tenth to the variance, which the jackknife does "
    "not see",
}
CHUNK = 3200  # prompts that are measured at once
FEWEST = 400  # intervals; with fewer, coverage is not stated
ONE_SIDE = 0.04  # share of intervals that miss on one side, above which it is shown in bold
NEAR_NORMAL = 0.5  # largest absolute skewness of replicates that are called nearly normal
HEADER = """# Calibration of the instruments

Which numbers of `hs.measure` (and of `context_noise`) are estimates from a sample, how far their expectation is from
the truth, and whether their intervals cover that expectation. Written by `python docs/calibration.py`.

- **True value**: of the population, in closed form: the limit of many tokens, contexts, probes, layers or iterations.
- **Expectation** and **bias**: mean over all synthetic prompts of the given size, with its standard error. An interval
  over prompts does not contain the bias: more prompts do not remove it, larger ones do.
- **Low, high**: how often the 95 % interval of {prompts} prompts lies wholly below, or above, the expectation, in
  percent; 2.5 each is nominal. **Bound**: 3.2 to 6.8 in all where the skewness of the replicates is at most {normal:g},
  otherwise at most 8. Skewed replicates have most of their misses on one side (a skewness of 1 adds about 1.5 there,
  and Student's interval does not correct for it): sides above 4 are in bold. Read a one-sided verdict on such a
  quantity with that in mind. No entry where there are fewer than {fewest} intervals.
- A mean is that of the values, except for `context_noise.r_squared`, which is averaged as log(1 - R^2): on its own
  scale a third of its intervals missed, since few contexts make it very negative.
- Singular values by subspace iteration are lower bounds. Where all prompts have the same matrix, what the iteration
  misses is all that differs between them, and very skewed (-1.2, -2.7 and -8.6 after 1, 2 and 4 iterations): intervals
  are then not covered by this table, whose prompts differ in their radii, as those of models do.

"""
COLUMNS = ("quantity", "size", "true value", "expectation", "bias", "low", "high", "bound")


@dataclass(frozen=True)
class Row:
    """One quantity at one sample size."""

    quantity: str
    size: str
    truth: float
    expectation: float
    error: float
    skewness: float
    low: float | None
    high: float | None

    @property
    def bound(self) -> tuple[float, float]:
        """The least and largest allowed share of intervals that miss."""
        return (0.032, 0.068) if abs(self.skewness) <= NEAR_NORMAL else (0.0, 0.08)

    @property
    def holds(self) -> bool:
        """Whether the intervals miss as often as they may; True where that was not measured."""
        if self.low is None or self.high is None:
            return True
        return self.bound[0] <= self.low + self.high <= self.bound[1]

    def __str__(self) -> str:
        bias = f"{self.truth:.4g} | {self.expectation:.4g} | {self.expectation - self.truth:+.2g} ± {self.error:.1g}"
        if self.low is None or self.high is None:
            return f"| {self.quantity} | {self.size} | {bias} | | | |"
        low, high = (100 * self.bound[k] for k in (0, 1))
        bound = f"{low:.1f} to {high:.1f}" if low else f"at most {high:.0f}"
        sides = [f"**{100 * each:.1f}**" if each > ONE_SIDE else f"{100 * each:.1f}" for each in (self.low, self.high)]
        misses = f"{sides[0]} | {sides[1]} | {bound}{'' if self.holds else ', **missed**'}"
        return f"| {self.quantity} | {self.size} | {bias} | {misses} |"


def draws(law: Law, size: int, repetitions: int) -> xr.Dataset:
    """Independent prompts of one size: every quantity over (prompt, repetition)."""
    seed = zlib.crc32(f"{law.measurement} {law.text} {size}".encode())
    generator, left, parts = torch.Generator().manual_seed(seed), repetitions * PROMPTS, []
    while left > 0:
        count = PROMPTS if law.together else min(CHUNK, left)
        parts.append(law.draw(size, count, generator))
        left -= count
    data = {}
    for name in parts[0]:
        values = np.concatenate([part[name].values for part in parts]).reshape(repetitions, PROMPTS).T
        data[name] = xr.DataArray(values, dims=("prompt", "repetition"), attrs=parts[0][name].attrs)
    return xr.Dataset(data)


def calibrated(law: Law, size: int, repetitions: int) -> Iterator[Row]:
    """The rows of all quantities of a law at one size."""
    sample = draws(law, size, repetitions)
    whole = reduce_replicates(sample.stack(all=("prompt", "repetition")).reset_index("all"), over="all")
    intervals = reduce_replicates(sample)
    for name, truth in law.truths(size).items():
        center, values = float(whole[name]), sample[name].values
        skewness = float(np.mean(((values - values.mean()) / values.std()) ** 3))
        low = float((intervals[f"{name}_high"] < center).mean())
        high = float((intervals[f"{name}_low"] > center).mean())
        counted = repetitions >= FEWEST
        yield Row(
            f"`{name}`",
            f"{size} {law.unit}",
            float(truth),
            center,
            float(whole[f"{name}_stderr"]),
            skewness,
            low if counted else None,
            high if counted else None,
        )


def table_rows(law: int, size: int) -> str:
    """The rows of one of the laws at one of its sizes, computed with one thread."""
    torch.set_num_threads(1)
    each = LAWS[law]
    repetitions = each.repetitions if size == 0 or each.others is None else each.others
    return "".join(f"{row}\n" for row in calibrated(each, each.sizes[size], repetitions))


def title(law: Law) -> str:
    """The heading of a law's table."""
    return f"## {law.measurement}: {law.text}"


def tables(text: str) -> dict[str, str]:
    """The tables of a written document by their headings."""
    parts = ("\n" + text).split("\n## ")[1:]
    return {f"## {head}": body.lstrip("\n") + "\n" for head, _, body in (part.partition("\n") for part in parts)}


def main() -> None:
    """Calibrate the laws and write their tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    names = sorted({law.measurement for law in LAWS})
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="measurements to calibrate again")
    options = parser.parse_args()
    kept = {} if options.only == names else tables((HERE / "calibration.md").read_text(encoding="utf8"))
    chosen = [k for k, law in enumerate(LAWS) if law.measurement in options.only or title(law) not in kept]
    cells = [(k, size) for k in chosen for size in range(len(LAWS[k].sizes))]
    found = Parallel(n_jobs=options.workers)(delayed(table_rows)(*cell) for cell in cells)
    text = HEADER.format(prompts=PROMPTS, normal=NEAR_NORMAL, fewest=FEWEST)
    for k, law in enumerate(LAWS):
        text += f"{title(law)}\n\n"
        if k not in chosen:
            text += kept[title(law)]
            continue
        text += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
        text += "".join(rows for cell, rows in zip(cells, found, strict=True) if cell[0] == k) + "\n"
    text += "## Missed bounds\n\n"
    text += "".join(f"- `{name}.{quantity}` at size {size}: {why}.\n" for (name, quantity, size), why in MISSES.items())
    text += "\n## No estimates\n\n"
    text += "".join(
        f"- `{name}`: {reason}; nothing is sampled beyond the prompt itself.\n" for name, reason in EXACT.items()
    )
    (HERE / "calibration.md").write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
