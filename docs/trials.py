"""What each packaged trial can see: writes trials.md beside itself, from one run of them all.

python docs/trials.py
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from scipy import special

from helmscope.claims.entry import Entry
from helmscope.claims.finding import Count, Described, EveryLayer, Evidence, Identity, Paired, Replicates, SomeLayer
from helmscope.claims.judge import judge
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Registered, experiments
from helmscope.stats.intervals import mean_interval
from helmscope.stats.power import decisive_effect
from helmscope.stats.scales import PLAIN
from helmscope.types import Region, Ruling, interval_text

HEAD = """# The trials and what they can see

One run with seed 0, in full. *Sees* is the power of the trial: the planted effect that it decides in 9 of 10 runs, in
units of its statistic (from the spread of its replicates, `helmscope.decisive_effect`); of an identity, the share of
inputs that may break it and still escape in 1 of 10 runs; of a share of starts, the true share that is supported in 9
of 10. It is the power of the statistic alone: the controls must hold too, and to refute one case of several Holm asks
for more. `power.svg` has the curves behind it.

| claim | statistic [interval], n | ruling | printed form | sees |
|---|---|---|---|---|
"""


def seen(evidence: Evidence, region: Region) -> str:
    """The effect that a trial decides with a chance of .9."""
    if isinstance(evidence, Identity):
        n = np.asarray(evidence.errors).size
        return f"an error beyond the bound at {100 * (1 - 0.1 ** (1 / n)):.2g} % of the inputs"
    if isinstance(evidence, Count):
        return f"a share of {_share(evidence.n, float(region.low or 0)):.3g} against the bound {region.low:g}"
    if isinstance(evidence, Paired):
        return f"{_gap(evidence.differences, evidence):.2g} from 0"
    if isinstance(evidence, Described):
        return f"a difference of {_gap(evidence.values, evidence):.2g}"
    if isinstance(evidence, Replicates):
        return f"{_gap(evidence.values, evidence):.2g} from the bound"
    if isinstance(evidence, EveryLayer | SomeLayer):
        widest = max(_gap(layer, evidence) for layer in evidence.samples)
        return f"{widest:.2g} from the bound, in each of {len(evidence.samples)}"
    raise TypeError(type(evidence))


def _gap(values: object, evidence: object) -> float:
    """The decisive effect in units of the statistic, on the scale of the evidence mapped back around the mean."""
    scale = getattr(evidence, "scale", PLAIN)
    numbers = scale.forward(np.asarray(values, dtype=float))
    interval = mean_interval(numbers)
    reach = decisive_effect(interval.n) * float(numbers.std(ddof=1))
    return float(scale.back(interval.estimate + reach) - scale.back(interval.estimate))


def _share(n: int, bound: float) -> float:
    """The least true share at which Clopper and Pearson's lower end is at or above the bound with chance .9."""
    needed = next((k for k in range(n + 1) if k and special.betaincinv(k, n - k + 1, 0.025) >= bound), None)
    return math.nan if needed is None else float(special.betaincinv(needed, n - needed + 1, 0.9))


def line(entry: Entry, tried: Registered) -> str:
    """One row of the table."""
    finding = tried.function(tried.case())
    verdict = judge(entry, finding)
    number = interval_text(verdict.interval) + ("" if verdict.interval is None else f", {verdict.interval.n:,}")
    printed = "" if verdict.printed is None else verdict.printed.ruling.value
    power = "" if verdict.ruling is Ruling.IMPOSSIBLE else seen(finding.evidence, entry.region)
    return f"| {entry.id} | {number} | {verdict.ruling.value} | {printed} | {power} |\n"


def main() -> None:
    """The table of all packaged trials."""
    entries = read_catalogue()
    rows = [line(entries[claim], tried) for claim, tried in experiments().items()]
    (Path(__file__).parent / "trials.md").write_text(HEAD + "".join(rows))


if __name__ == "__main__":
    main()
