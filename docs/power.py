"""Measure the power of the rules of evidence on planted effects; writes power.json and power.svg to this folder.

    python docs/power.py

A vector of n replicates has its true mean ``effect`` standard deviations inside the bound of a one-sided region.
``supported`` is the share of 4,000 such vectors that are ruled supported; ``refuted`` is the share of vectors with the
mean equally far outside that are ruled refuted. At effect 0 both are rates of false verdicts. Success rates are planted
at .9 + effect against a bound of .9.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helmscope.plots.style import COLORS, new_figure, styled, svg
from helmscope.stats.intervals import bootstrap_t, mean_interval, proportion_interval
from helmscope.stats.power import detection_power
from helmscope.stats.ruling import rule
from helmscope.types import Interval, Region, Ruling

HERE = Path(__file__).parent
EFFECTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
SHARES = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)
SIZES = (32, 64, 128)
VECTORS = 4_000

Draw = Callable[[np.random.Generator, float, int], Interval]


def normal(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Normal replicates with Student's t interval; the bound is 0."""
    return mean_interval(effect + rng.standard_normal(n))


def heavy(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """t3 replicates with Student's t interval; the effect is in units of their standard deviation, sqrt(3)."""
    return mean_interval(effect * 3**0.5 + rng.standard_t(3, n))


def skewed(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Lognormal(1) replicates on the plain scale with the bootstrap-t interval, shifted to the planted mean."""
    deviation = ((np.e - 1) * np.e) ** 0.5
    return bootstrap_t(np.exp(rng.standard_normal(n)) - np.e**0.5 + effect * deviation, seed=int(rng.integers(2**32)))


def share(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Counts of successes with the Clopper-Pearson interval; the bound is .9."""
    return proportion_interval(int(rng.binomial(n, 0.9 + effect)), n)


LAWS: dict[str, tuple[Draw, float, tuple[float, ...], int]] = {
    "normal (also: positive numbers as logarithms)": (normal, 0.0, EFFECTS, VECTORS),
    "t3": (heavy, 0.0, EFFECTS, VECTORS),
    "lognormal, bootstrap-t": (skewed, 0.0, EFFECTS, 400),
    "share": (share, 0.9, SHARES, VECTORS),
}


def shares(law: str, effect: float, n: int, *, vectors: int, seed: int) -> tuple[float, float]:
    """The shares of correct verdicts: supported when the mean is planted inside, refuted when it is outside."""
    draw, bound, *_ = LAWS[law]
    rng = np.random.default_rng([seed, n, round(1000 * effect), list(LAWS).index(law)])
    region = Region(text="", low=bound)
    inside = [rule(draw(rng, effect, n), region) is Ruling.SUPPORTED for _ in range(vectors)]
    outside = [rule(draw(rng, -effect, n), region) is Ruling.REFUTED for _ in range(vectors)]
    return float(np.mean(inside)), float(np.mean(outside))


def main() -> None:
    """Compute all curves and plot them."""
    curves = []
    for law, (_, _, effects, vectors) in LAWS.items():
        for n in SIZES:
            pairs = [shares(law, effect, n, vectors=vectors, seed=0) for effect in effects]
            supported, refuted = zip(*pairs, strict=True)
            curve = {"law": law, "n": n, "vectors": vectors, "effect": effects, "supported": supported}
            curves.append({**curve, "refuted": refuted})
    (HERE / "power.json").write_text(json.dumps(curves, indent=1) + "\n")
    with styled():
        figure, panels = new_figure(2, 2)
        for panel, (law, (draw, *_)) in zip(panels, LAWS.items(), strict=True):
            for curve, color in zip((c for c in curves if c["law"] == law), COLORS, strict=False):
                panel.plot(curve["effect"], curve["supported"], color=color, label=f"n = {curve['n']}")
                panel.plot(curve["effect"], curve["refuted"], color=color, linestyle="--")
                if draw is normal:
                    exact = [detection_power(effect, curve["n"]) for effect in curve["effect"]]
                    panel.plot(curve["effect"], exact, "o", color=color, markersize=3)
            unit = "true share - .9" if draw is share else "planted effect, in standard deviations"
            panel.set(title=law, ylim=(-0.02, 1.02), xlabel=unit, ylabel="share of right verdicts")
            panel.legend(loc="lower right")
        figure.suptitle("solid: planted inside the region, supported; dashed: outside, refuted; dots: closed form")
        (HERE / "power.svg").write_bytes(svg(figure))


if __name__ == "__main__":
    main()
