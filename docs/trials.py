"""Run all packaged trials, or those of some claims, and write their results and power to trials.md in this folder.

python docs/trials.py
python docs/trials.py attention-clusters radial
python docs/trials.py --workers 16
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from scipy import special

from helmscope.claims.entry import Entry
from helmscope.claims.evidence import (
    AbsoluteDifference,
    AbsoluteDifferenceInEveryCase,
    Count,
    Evidence,
    IdentityErrors,
    PairedDifferences,
    PremiseImpossible,
    Replicates,
    ReplicatesInEveryCase,
    ReplicatesInSomeCase,
)
from helmscope.claims.judge import judge
from helmscope.claims.rank_correlation import SpearmanCorrelation
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Registered, experiments
from helmscope.models.subject import Subject
from helmscope.stats.intervals import mean_interval
from helmscope.stats.power import minimum_detectable_effect
from helmscope.stats.scales import PLAIN
from helmscope.types import Region, interval_text

HEADER = """# The trials and their power

One full run with seed 0; models are tried on the development texts (those of `claims test`), not on the held-out ones
of `helmscope report`. *Detects* is the effect that the trial decides with a power of 90 %, in units of its statistic
(from the spread of its replicates, `hs.stats.minimum_detectable_effect`); for an identity, the share of inputs that may
violate it and go undetected in 10 % of runs; for a success rate over starts, the true rate that is supported in 90 % of
runs. It is the power of the statistic alone: the controls must hold too, and to refute one of several cases, Holm's
correction requires more. `power.svg` shows the curves.

| claim | subject | statistic [interval], n | ruling | as printed | detects |
|---|---|---|---|---|---|
"""


def detectable_effect(evidence: Evidence, region: Region) -> str:
    """The effect that a trial decides with a power of .9, in words."""
    if isinstance(evidence, IdentityErrors):
        n = np.asarray(evidence.errors).size
        return f"an error beyond the bound at {100 * (1 - 0.1 ** (1 / n)):.2g} % of the inputs"
    if isinstance(evidence, Count):
        bound = region.ends[0]  # included or not
        return f"a share of {_decisive_rate(evidence.n, bound):.3g} against the bound {bound:g}"
    if isinstance(evidence, AbsoluteDifference | PairedDifferences):
        return f"{_decisive_distance(evidence.differences, evidence):.2g} from the bound"
    if isinstance(evidence, AbsoluteDifferenceInEveryCase):
        widest = max(_decisive_distance(case, evidence) for case in evidence.differences)
        return f"{widest:.2g} from the bound, in each of {len(evidence.differences)}"
    if isinstance(evidence, Replicates) and not region.bounded:
        return f"a difference of {_decisive_distance(evidence.values, evidence):.2g}"
    if isinstance(evidence, Replicates):
        return f"{_decisive_distance(evidence.values, evidence):.2g} from the bound"
    if isinstance(evidence, SpearmanCorrelation):
        r = np.linspace(0, 0.999, 1000)
        errors = np.arctanh(r) / np.sqrt((1 + r**2 / 2) / (len(evidence.first) - 3))  # from 0, by spearman_interval
        return f"a correlation of {r[np.argmax(errors >= special.ndtri(0.975) + special.ndtri(0.9))]:.2g}"
    if isinstance(evidence, ReplicatesInEveryCase | ReplicatesInSomeCase):
        widest = max(_decisive_distance(layer, evidence) for layer in evidence.samples)
        return f"{widest:.2g} from the bound, in each of {len(evidence.samples)}"
    raise TypeError(type(evidence))


def _decisive_distance(values: object, evidence: object) -> float:
    """The decisive effect in units of the statistic: on the scale of the evidence, mapped back around the mean."""
    scale = getattr(evidence, "scale", PLAIN)
    scaled = scale.forward(np.asarray(values, dtype=float))
    interval = mean_interval(scaled)
    distance = minimum_detectable_effect(interval.n) * float(scaled.std(ddof=1))
    return float(scale.inverse(interval.estimate + distance) - scale.inverse(interval.estimate))


def _decisive_rate(n: int, bound: float) -> float:
    """The smallest true success rate at which the Clopper-Pearson lower limit reaches the bound with probability .9."""
    needed = next((k for k in range(n + 1) if k and special.betaincinv(k, n - k + 1, 0.025) >= bound), None)
    return math.nan if needed is None else float(special.betaincinv(needed, n - needed + 1, 0.9))


def line(entry: Entry, tried: Registered, subject: Subject) -> str:
    """One row of the table: the deciding condition of a claim on one subject."""
    case = tried.case(entry=entry) if tried.compares_models else tried.case(entry=entry, subject=subject)
    finding = tried.function(case)
    verdict = judge(entry, finding, subject_kind=case.subject_kind)
    statistic = interval_text(verdict.interval) + ("" if verdict.interval is None else f", {verdict.interval.n:,}")
    printed = "" if verdict.printed is None else verdict.printed.judgment.value
    deciding, effect = verdict.deciding, ""
    if deciding is not None and not isinstance(finding.evidence, PremiseImpossible):
        evidence = finding.evidence if isinstance(finding.evidence, Evidence) else finding.evidence[deciding.name]
        effect = detectable_effect(evidence, deciding.region)
    return (
        f"| {entry.id} | {' and '.join(case.names)} | {statistic} | {verdict.ruling.value} | {printed} | {effect} |\n"
    )


def made(number: int, claim: str, subject: Subject) -> tuple[int, str]:
    """The row of a claim on a subject, computed with one thread, and its number."""
    torch.set_num_threads(1)
    with subject:
        return number, line(read_catalogue()[claim], experiments()[claim], subject)


def main() -> None:
    """Write the table of all packaged trials; the rows of claims that are not tried again stay as they are."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("claims", nargs="*", help="claims to try again; all by default")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    again, table = options.claims or list(experiments()), Path(__file__).parent / "trials.md"
    rows = {tuple(row.split("|")[1:3]): row for row in table.read_text().splitlines(keepends=True) if row[:2] == "| "}
    order = [
        (claim, subject)
        for claim, tried in experiments().items()
        for subject in tried.default_subjects[: 1 if tried.compares_models else None]
    ]
    keys = [(f" {claim} ", f" {subject.name} ") for claim, subject in order]
    due = [k for k, (claim, _) in enumerate(order) if claim in again or keys[k] not in rows]
    tasks = (delayed(made)(k, *order[k]) for k in due)
    for k, row in Parallel(n_jobs=options.workers, return_as="generator_unordered")(tasks):
        rows[keys[k]] = row
        table.write_text(HEADER + "".join(rows[key] for key in keys if key in rows))


if __name__ == "__main__":
    main()
