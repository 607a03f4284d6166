"""The planted cases of the claims about layers as steps of a flow: what is planted, and which ruling is right."""

from __future__ import annotations

from functools import partial

from helmscope.types import Ruling
from support import planted_entropy as entropy
from support import planted_layers as layers
from support.planted_cases import PlantedCase

S, R = Ruling.SUPPORTED, Ruling.REFUTED
TWINS = {"twins": 2}
LAYER_CASES = (
    PlantedCase("generator", "small updates", S, partial(entropy.updates, "small")),
    PlantedCase("generator", "large updates", R, partial(entropy.updates, "large")),
    PlantedCase("entropy-identity", "small steps", S, partial(entropy.gradients, "small")),
    PlantedCase("entropy-identity", "large steps", R, partial(entropy.gradients, "large")),
    PlantedCase("free-energy-descends", "uphill", S, partial(entropy.pulled, "uphill"), TWINS),
    PlantedCase("free-energy-descends", "against", R, partial(entropy.pulled, "against"), TWINS),
    *(
        PlantedCase("diffuse-then-compress", kind, ruling, partial(entropy.shifted, kind), TWINS)
        for kind, ruling in (("spread, then gathered", S), ("gathered, then spread", R))
    ),
    PlantedCase("whitening", "carried", S, partial(layers.drifts, "carried"), {"tokens_quick": 8}),
    PlantedCase("whitening", "gradient", R, partial(layers.drifts, "gradient"), {"tokens_quick": 8}),
    PlantedCase("mobility", "carried", S, partial(layers.drifts, "carried"), TWINS),
    PlantedCase("mobility", "gradient", R, partial(layers.drifts, "gradient"), TWINS),
    PlantedCase("jko-step", "diffusion, exact step", S, partial(layers.steps, "spreads", "steps"), TWINS),
    PlantedCase("jko-step", "gathered by noise", R, partial(layers.steps, "steps", "gathers"), TWINS),
    PlantedCase("jko-step", "turned", R, partial(layers.steps, "steps", "turns"), TWINS),
)


def layer_case(claim: str, kind: str) -> PlantedCase:
    """The case of a claim and a kind."""
    (found,) = [each for each in LAYER_CASES if (each.claim, each.kind) == (claim, kind)]
    return found
