"""settles: tokens reach an equilibrium, not chaos; how far apart they stay is described."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import angle, project, retract
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.models.subject import Subject
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.recording import Recording

STEP, CIRCLE = 0.2, 64  # of RK4; steps of the planted map


@experiment("settles", seconds={"simulation": 3, "model": 25}, default_subjects=(Subject.simulation(), Subject("tied")))
@prints_premise
def settles(case: TrialCase) -> Finding:
    """Tokens settle if what they move per layer falls and one token, with the others frozen, forgets a perturbation."""
    return _simulated(case) if case.subject.is_simulation else _looped(case)


def _simulated(case: TrialCase) -> Finding:
    """The simple attention model of the source, SA with V = I, from uniform starts on S^2.

    The displacement is the mean angle that a token moves per unit of time; its statistic is the slope of its logarithm
    over the second half of the run. For the exponent all tokens but one are frozen at a random state, the one moves
    until it has forgotten its start, and then a tangent vector is carried along; its mean logarithmic growth per unit
    of time is the largest Lyapunov exponent. V = I + A with A antisymmetric makes the cluster rotate for ever, at a
    constant displacement. Angles that double at each step are chaotic, with exponent log 2.
    """
    n, beta, end = (case.constant(name) for name in ("tokens", "beta", "time"))
    starts = case.count(128, quick=32)
    x = retract(case.normal(starts, n, 3, index=0))
    # the control has a true slope of 0 and a bound close to it, so it needs more starts than the claim
    rotated = retract(case.normal(case.constant("rotating_starts") * starts, n, 3, index=4))
    times = torch.arange(end + 1, dtype=torch.float64)
    turn = torch.zeros(3, 3, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = 1.0, -1.0
    fields = {
        "V = +I": SA(beta),
        "V = -I": SA(beta, value=-torch.eye(3, dtype=torch.float64)),
        "V = I + A": SA(beta, value=torch.eye(3, dtype=torch.float64) + turn),
    }
    paths = {name: integrate(field, x, times.tolist(), stepper=RK4(STEP)).states for name, field in fields.items()}
    rotating = integrate(fields["V = I + A"], rotated, times.tolist(), stepper=RK4(STEP)).states
    moved = {name: angle(path[1:], path[:-1]).mean(-1) for name, path in paths.items()}
    spacing = {name: _least_angle(path[-1]) for name, path in paths.items()}
    exponents = _exponent(_frozen_step(x[:, 1:], beta), x[:, 0], case.normal(starts, 3, index=1), end, STEP)
    circle = retract(case.normal(starts, 2, index=2))
    doubled = _exponent(_double_angle, circle, case.normal(starts, 2, index=3), CIRCLE, 1.0)
    return Finding(
        evidence={
            "exponent": Replicates(exponents, "starts"),
            "displacement": Replicates(_log_slope(moved["V = +I"]), "starts"),
        },
        controls={
            "rotating cluster": Replicates(_log_slope(angle(rotating[1:], rotating[:-1]).mean(-1)), "starts"),
            "chaotic map": Replicates(doubled, "starts"),
        },
        described={
            f"least angle between two tokens, {name}": Replicates(spacing[name], "starts")
            for name in ("V = +I", "V = -I")
        },
        data=curve(
            "displacement",
            torch.stack([each.mT for each in moved.values()], -1),
            {"time": times[1:].tolist(), "value": list(moved)},
            label="angle moved per unit of time (rad)",
            log=True,
        ),
        remark=f"At t = {end:g} the closest two tokens are {float(spacing['V = +I'].median()):.1e} rad apart with "
        f"V = +I, since all meet, and {float(spacing['V = -I'].median()):.2g} rad with V = -I.",
        setting=f"simulation on the unit sphere: n = {n}, d = 3, beta = {beta:g}, t <= {end:g}, RK4 step {STEP:g}",
    )


def _least_angle(x: Tensor) -> Tensor:
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    return angle(x[..., i, :], x[..., j, :]).amin(-1)


def _log_slope(moved: Tensor) -> Tensor:
    """The slope of the logarithm of the displacements (time, replicate) over the second half of the times."""
    late = moved[len(moved) // 2 :].double().clamp(min=torch.finfo(torch.float64).tiny).log()
    times = torch.arange(len(late), dtype=torch.float64)
    times = (times - times.mean())[:, None]
    return (late * times).sum(0) / times.square().sum()


def _frozen_step(others: Tensor, beta: float) -> Callable[[Tensor], Tensor]:
    """One RK4 step of a token (start, d) under SA with V = I, with the other tokens (start, n - 1, d) frozen."""

    def velocity(y: Tensor) -> Tensor:
        logits = beta * (others @ y.unsqueeze(-1)).squeeze(-1)
        weights = logits.exp() / (logits.exp().sum(-1, keepdim=True) + math.exp(beta))  # the token attends to itself
        return project(y, (weights.unsqueeze(-1) * others).sum(-2))

    def step(y: Tensor) -> Tensor:
        a = velocity(y)
        b = velocity(retract(y + STEP / 2 * a))
        c = velocity(retract(y + STEP / 2 * b))
        d = velocity(retract(y + STEP * c))
        return retract(y + STEP / 6 * (a + 2 * b + 2 * c + d))

    return step


def _double_angle(z: Tensor) -> Tensor:
    a, b = z[..., 0], z[..., 1]
    return torch.stack([a * a - b * b, 2 * a * b], -1)


def _exponent(step: Callable[[Tensor], Tensor], y: Tensor, direction: Tensor, end: float, duration: float) -> Tensor:
    """The largest Lyapunov exponent of a map of unit vectors (start, d): the mean logarithmic growth of a tangent
    vector per unit of time, after a transient as long as the time over which it is measured.
    """
    count = round(end / duration)
    w, growth = project(y, direction), torch.zeros(len(y), dtype=y.dtype)
    for k in range(2 * count):
        image, derivative = torch.func.jvp(step, (y,), (w,))[:2]
        y, w = retract(image), project(image, derivative)
        length = torch.linalg.vector_norm(w, dim=-1)
        w = w / length[:, None]
        if k >= count:
            growth = growth + length.log()
    return growth / (count * duration)


def _looped(case: TrialCase) -> Finding:
    """A tied model called more often than it was trained with; the same two statistics per loop.

    States are the directions of the residual stream. The exponent is that of the last token of each prompt: at half of
    the loops it is perturbed in a random direction, the others keep their recorded states, and the difference from the
    unperturbed token is compared at three quarters of the loops and at the end. Blocks that write nothing still apply
    their norms, whose gains can move tokens and let them settle too; how much more or less the trained blocks settle is
    described, paired by prompt.
    """
    if case.subject.tied_loops is None:
        return Finding.impossible("only a model with one tied block can be called more often than it was trained with")
    loops, length = case.constant("loops"), case.constant("length")
    subject = case.subject.looped(loops)
    prompts = prompts_or_finding(case, length=length)
    if isinstance(prompts, Finding):
        return prompts
    recording = subject.record(prompts.texts)
    arm = Arm(AttentionMode.OFF, mlp=False)
    silent = recording.under(*arm.edits(recording))
    noise = case.normal(len(prompts), recording.trajectory.states.shape[-1], index=0)
    moved = {name: _moved_per_loop(each) for name, each in (("trained", recording), ("no writes", silent))}
    exponents, silent_exponents = (
        _loop_exponents(each, loops, noise, case.constant("nudge")) for each in (recording, silent)
    )
    slopes, silent_slopes = (_log_slope(moved[name]) for name in ("trained", "no writes"))
    return Finding(
        evidence={
            "exponent": Replicates(exponents, "prompts"),
            "displacement": Replicates(slopes, "prompts"),
        },
        # the claim needs both, so the control supports it only as far as the larger of its two does
        controls={"blocks that write nothing": Replicates(torch.maximum(silent_exponents, silent_slopes), "prompts")},
        described={
            "exponent minus that of blocks that write nothing": PairedDifferences(
                exponents - silent_exponents, "prompts"
            ),
            "slope minus that of blocks that write nothing": PairedDifferences(slopes - silent_slopes, "prompts"),
            "least angle between two tokens": Replicates(
                _least_angle(recording.trajectory.states[-1].double()), "prompts"
            ),
        },
        data=curve(
            "displacement",
            torch.stack([each.mT for each in moved.values()], -1),
            {"loop": range(1, loops + 1), "model": list(moved)},
            label="angle moved per loop (rad)",
            log=True,
            over="prompt",
        ),
        remark=f"The last loop moves a token by {float(moved['trained'][-1].mean()):.2g} rad, and by "
        f"{float(moved['no writes'][-1].mean()):.2g} rad where blocks write nothing, by the norms alone; the "
        f"exponents are {float(exponents.mean()):.3g} and {float(silent_exponents.mean()):.3g} per loop."
        f"{_norms_remark(silent_exponents, silent_slopes)}",
        setting=f"directions of the residual stream, {loops} loops, {prompts.setting}, {length} tokens each",
        undecided_because=prompts.alike,
    )


def _norms_remark(exponents: Tensor, slopes: Tensor) -> str:
    """What it means that blocks which write nothing settle; "" if they do not."""
    if float(exponents.mean()) >= 0 or float(slopes.mean()) >= 0:
        return ""
    return (
        " So tokens settle under the norms alone, and it is not shown that attention and MLP make them settle; the "
        "paired differences say whether they do so faster or more slowly with what the blocks write."
    )


def _moved_per_loop(recording: Recording) -> Tensor:
    """The mean angle over the tokens of each prompt between the states before and after each loop, (loop, prompt)."""
    states = recording.trajectory.states[::2].double()
    return angle(states[1:], states[:-1]).mean(-1)


def _loop_exponents(recording: Recording, loops: int, noise: Tensor, nudge: float) -> Tensor:
    """The logarithmic growth per loop of a perturbation of the last token of length ``nudge``, far above rounding and
    far below the angle of a loop, the others frozen; one value per prompt.
    """
    depth = 2 * (loops // 2)
    states = recording.trajectory.states[depth]
    direction = project(states[:, -1], (noise - noise.mean(-1, keepdim=True)).to(states))
    perturbed = states.clone()
    perturbed[:, -1] = retract(states[:, -1] + nudge * retract(direction))
    frozen = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    frozen[:, -1] = False
    first, second = (
        recording.resume(depth=depth, states=each, frozen=frozen).trajectory.states[:, :, -1].double()
        for each in (states, perturbed)
    )
    distance = torch.linalg.vector_norm(first - second, dim=-1)
    half = 2 * (loops // 4)  # half-steps of a quarter of the loops
    growth: Tensor = (distance[-1] / distance[half]).log()
    return growth / ((len(distance) - 1 - half) / 2)
