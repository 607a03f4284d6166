"""settles: tokens reach an equilibrium, not chaos; how far apart they stay is described."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import Case, experiment
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
NUDGE = 1e-3  # length of a perturbation of a model's token, far above rounding and far below the angle of a loop


@experiment("settles", seconds={"simulation": 3, "model": 25}, defaults=(Subject.simulation(), Subject("tied")))
def settles(case: Case) -> Finding:
    """Tokens settle if what they move per layer falls and one token, with the others frozen, forgets a perturbation."""
    return _simulated(case) if case.subject.is_simulation else _looped(case)


def _simulated(case: Case) -> Finding:
    """The simple attention model of the source, SA with V = I, from uniform starts on S^2.

    The displacement is the mean angle that a token moves per unit of time; its statistic is the slope of its logarithm
    over the second half of the run. For the exponent all tokens but one are frozen at a random state, the one moves
    until it has forgotten its start, and then a tangent vector is carried along; its mean logarithmic growth per unit
    of time is the largest Lyapunov exponent. V = I + A with A antisymmetric makes the cluster rotate for ever, at a
    constant displacement. Angles that double at each step are chaotic, with exponent log 2.
    """
    n, beta, end = (case.constant(name) for name in ("tokens", "beta", "time"))
    starts = case.count(128, quick=32)
    x = retract(case.normal(starts, n, 3, stream=0))
    times = torch.arange(end + 1, dtype=torch.float64)
    turn = torch.zeros(3, 3, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = 1.0, -1.0
    fields = {
        "V = +I": SA(beta),
        "V = -I": SA(beta, value=-torch.eye(3, dtype=torch.float64)),
        "V = I + A": SA(beta, value=torch.eye(3, dtype=torch.float64) + turn),
    }
    paths = {name: integrate(field, x, times.tolist(), stepper=RK4(STEP)).states for name, field in fields.items()}
    moved = {name: angle(path[1:], path[:-1]).mean(-1) for name, path in paths.items()}
    spacing = {name: _least_angle(path[-1]) for name, path in paths.items()}
    exponents = _exponent(_frozen_step(x[:, 1:], beta), x[:, 0], case.normal(starts, 3, stream=1), end, STEP)
    circle = retract(case.normal(starts, 2, stream=2))
    doubled = _exponent(_double_angle, circle, case.normal(starts, 2, stream=3), CIRCLE, 1.0)
    return Finding(
        evidence={
            "exponent": Replicates(exponents, "starts"),
            "displacement": Replicates(_log_slope(moved["V = +I"]), "starts"),
        },
        controls={
            "rotating cluster": Replicates(_log_slope(moved["V = I + A"]), "starts"),
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
        where=f"simulation on the unit sphere: n = {n}, d = 3, beta = {beta:g}, t <= {end:g}, RK4 step {STEP:g}",
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


def _looped(case: Case) -> Finding:
    """A tied model called more often than it was trained with; the same two statistics per loop.

    States are the directions of the residual stream. The exponent is that of the last token of each prompt: at half of
    the loops it is perturbed in a random direction, the others keep their recorded states, and the difference from the
    unperturbed token is compared at three quarters of the loops and at the end. Blocks that write nothing still apply
    their norms, whose gains can move tokens and let them settle too.
    """
    if case.subject.tied_loops is None:
        return Finding.impossible("only a model with one tied block can be called more often than it was trained with")
    loops, length = case.constant("loops"), case.constant("length")
    subject = case.subject.looped(loops)
    rows = [row[:length] for row in subject.token_ids if len(row) >= length][: case.count(64, quick=32)]
    recording = subject.recording_of(rows)
    arm = Arm(AttentionMode.OFF, mlp=False)
    silent = recording.under(*arm.edits(recording))
    noise = case.normal(len(rows), recording.trajectory.states.shape[-1], stream=0)
    moved = {name: _moved_per_loop(each) for name, each in (("trained", recording), ("no writes", silent))}
    silent_exponents, silent_slopes = _loop_exponents(silent, loops, noise), _log_slope(moved["no writes"])
    return Finding(
        evidence={
            "exponent": Replicates(_loop_exponents(recording, loops, noise), "prompts"),
            "displacement": Replicates(_log_slope(moved["trained"]), "prompts"),
        },
        # the claim needs both, so the control supports it only as far as the larger of its two does
        controls={"blocks that write nothing": Replicates(torch.maximum(silent_exponents, silent_slopes), "prompts")},
        described={
            "least angle between two tokens": Replicates(
                _least_angle(recording.trajectory.states[-1].double()), "prompts"
            )
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
        f"{float(moved['no writes'][-1].mean()):.2g} rad where blocks write nothing, by the norms alone.",
        where=f"directions of the residual stream, {loops} loops, {len(rows)} prompts of {length} tokens",
    )


def _moved_per_loop(recording: Recording) -> Tensor:
    """The mean angle over the tokens of each prompt between the states before and after each loop, (loop, prompt)."""
    states = recording.trajectory.states[::2].double()
    return angle(states[1:], states[:-1]).mean(-1)


def _loop_exponents(recording: Recording, loops: int, noise: Tensor) -> Tensor:
    """The logarithmic growth per loop of a perturbation of the last token, the others frozen, one value per prompt."""
    depth = 2 * (loops // 2)
    states = recording.trajectory.states[depth]
    direction = project(states[:, -1], (noise - noise.mean(-1, keepdim=True)).to(states))
    perturbed = states.clone()
    perturbed[:, -1] = retract(states[:, -1] + NUDGE * retract(direction))
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
