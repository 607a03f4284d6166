"""Power of the rules of evidence on planted effects: writes power.json and power.svg beside itself.

    python docs/power.py

A replicate vector of n numbers has its true mean ``effect`` standard deviations inside the bound of a one-sided region.
``supported`` is the share of 4,000 such vectors whose verdict is right, ``refuted`` the share of vectors planted as far
outside whose verdict is. At effect 0 both are shares of false verdicts. Shares of successes are planted at .9 + effect
against a bound of .9.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helmscope.plots.style import COLORS, new_figure, styled, svg
from helmscope.stats.intervals import bootstrap_t, mean_interval, proportion_interval
from helmscope.stats.power import power
from helmscope.stats.ruling import rule
from helmscope.types import Interval, Region, Ruling

HERE = Path(__file__).parent
EFFECTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
SHARES = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)
SIZES = (32, 64, 128)
VECTORS = 4_000

Draw = Callable[[np.random.Generator, float, int], Interval]


def normal(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Normal replicates, Student's interval; the bound is 0."""
    return mean_interval(effect + rng.standard_normal(n))


def heavy(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """t3 replicates, Student's interval; the effect is in their standard deviation, sqrt 3."""
    return mean_interval(effect * 3**0.5 + rng.standard_t(3, n))


def skewed(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Lognormal(1) replicates on the plain scale, bootstrap-t; their mean is moved to the effect."""
    spread = ((np.e - 1) * np.e) ** 0.5
    return bootstrap_t(np.exp(rng.standard_normal(n)) - np.e**0.5 + effect * spread, seed=int(rng.integers(2**32)))


def share(rng: np.random.Generator, effect: float, n: int) -> Interval:
    """Successes, Clopper and Pearson's interval; the bound is .9."""
    return proportion_interval(int(rng.binomial(n, 0.9 + effect)), n)


LAWS: dict[str, tuple[Draw, float, tuple[float, ...], int]] = {
    "normal (also: positive numbers as logarithms)": (normal, 0.0, EFFECTS, VECTORS),
    "t3": (heavy, 0.0, EFFECTS, VECTORS),
    "lognormal, bootstrap-t": (skewed, 0.0, EFFECTS, 400),
    "share": (share, 0.9, SHARES, VECTORS),
}


def shares(law: str, effect: float, n: int, *, vectors: int, seed: int) -> tuple[float, float]:
    """Shares of right verdicts: supported where the effect is planted inside, refuted where it is outside."""
    draw, bound, *_ = LAWS[law]
    rng = np.random.default_rng([seed, n, round(1000 * effect), list(LAWS).index(law)])
    region = Region(text="", low=bound)
    inside = [rule(draw(rng, effect, n), region) is Ruling.SUPPORTED for _ in range(vectors)]
    outside = [rule(draw(rng, -effect, n), region) is Ruling.REFUTED for _ in range(vectors)]
    return float(np.mean(inside)), float(np.mean(outside))


def main() -> None:
    """All curves, and their picture."""
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
                    exact = [power(effect, curve["n"]) for effect in curve["effect"]]
                    panel.plot(curve["effect"], exact, "o", color=color, markersize=3)
            unit = "true share - .9" if draw is share else "planted effect, in standard deviations"
            panel.set(title=law, ylim=(-0.02, 1.02), xlabel=unit, ylabel="share of right verdicts")
            panel.legend(loc="lower right")
        figure.suptitle("solid: planted inside the region, supported; dashed: outside, refuted; dots: closed form")
        (HERE / "power.svg").write_bytes(svg(figure))


if __name__ == "__main__":
    main()
