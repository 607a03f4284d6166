"""Calls that may take long report shares that rise to 1, and draw one bar where a person can see it."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import helmscope as hs
from helmscope.claims.reading import read_catalogue
from helmscope.report.page import page
from helmscope.runs import bar
from support.model_families import inputs_of, tiny_model

MODEL, IDS = tiny_model("gpt2"), inputs_of("gpt2")
RECORDING = hs.record(MODEL, IDS, batch_size=1)
RUN = hs.integrate(hs.SA(2.0), hs.Uniform(5, 3).sample(4, seed=0), times=[0.0, 0.5, 1.0])
TRIALS = [hs.run_trial(claim, quick=True) for claim in ("kuramoto", "radial")]
PHASE = {"betas": [1, 4], "times": [0, 1], "start": hs.Uniform(n=4, dim=3), "samples": 4}
CIRCLE = hs.Uniform(n=16, dim=2).sample(seed=0)
CAPS = {name: hs.meanfield.Cap(torch.tensor([sign, 0.0]), min_cosine=0.9) for name, sign in (("a", -1.0), ("b", 1.0))}


def double_well(x):
    return x[..., 0] ** 2


WELLS = hs.geometry.critical_points.find_critical_points(double_well, CIRCLE)
LONG = {
    "record": lambda progress: hs.record(MODEL, IDS, batch_size=1, progress=progress),
    "under": lambda progress: RECORDING.under(hs.intervene.Ablate([1]), progress=progress),
    "replay of a model": lambda progress: RECORDING.replay(hs.observe.KernelStatistics(), progress=progress),
    "replay of a simulation": lambda progress: RUN.replay(
        hs.observe.KernelStatistics(), batch_size=2, progress=progress
    ),
    "measure": lambda progress: hs.measure(RECORDING, progress=progress),
    "track": lambda progress: hs.track(
        RUN, order=hs.order_parameter, rank=hs.observe.effective_rank, inner=hs.mean_inner_product, progress=progress
    ),
    "overview": lambda progress: hs.overview(RECORDING, beta=1.0, progress=progress),
    "logit_lens_kl": lambda progress: hs.logit_lens_kl(RECORDING, progress=progress),
    "next_token_loss": lambda progress: hs.next_token_loss(RECORDING, progress=progress),
    "token_loss": lambda progress: hs.observe.token_loss(RECORDING, progress=progress),
    "loss_under_edits": lambda progress: hs.observe.loss_under_edits(
        RECORDING, {"cut": hs.intervene.Ablate([1])}, progress=progress
    ),
    "head_ablation_loss": lambda progress: hs.observe.head_ablation_loss(RECORDING, progress=progress),
    "token_logits": lambda progress: hs.token_logits(RECORDING, [3], depth=[0, 6], progress=progress),
    "integrate": lambda progress: hs.integrate(
        hs.SA(2.0), torch.eye(3), times=[1.0, 2.0, 3.0], stepper=hs.RK4(h=1.0), progress=progress
    ),
    "phase_diagram": lambda progress: hs.phase_diagram(hs.SA, **PHASE, progress=progress),
    "run_trial": lambda progress: hs.run_trial("kuramoto", quick=True, progress=progress),
    "find_critical_points": lambda progress: hs.geometry.critical_points.find_critical_points(
        double_well, CIRCLE, progress=progress
    ),
    "find_equilibria": lambda progress: hs.observe.find_equilibria(hs.SA(1.0), CIRCLE[:, None], progress=progress),
    "label_basins": lambda progress: hs.meanfield.label_basins(double_well, CIRCLE, WELLS, progress=progress),
    "simulated_committor": lambda progress: hs.meanfield.simulated_committor(
        torch.zeros_like, CIRCLE, **CAPS, noise=hs.noise.IsotropicNoise(0.5), horizon=1.0, paths=2, progress=progress
    ),
    "outputs": lambda progress: RECORDING.runner.outputs(progress=progress),
    "factorial": lambda progress: hs.observe.attention_mlp_factorial(RECORDING, gap=1, progress=progress),
    "jacobian_spectrum": lambda progress: hs.observe.jacobian_spectrum(hs.SA(2.0), RUN.states[-1], progress=progress),
    "vmf_mixture": lambda progress: hs.observe.vmf_mixture(RUN.states[-1], max_components=2, progress=progress),
    "merge_tree": lambda progress: hs.observe.merge_tree(RUN.states[-1], progress=progress),
    "hull_distance": lambda progress: hs.observe.hull_distance(RUN.states[0], RUN.states[-1], progress=progress),
    "page": lambda progress: page(read_catalogue(), TRIALS, progress=progress),
    "published_scheme_probability": lambda progress: hs.observe.published_scheme_probability(
        hs.SA, **PHASE, progress=progress
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_shares_rise_to_one(name):
    shares = []
    LONG[name](shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert min(shares) > 0.0
    if name not in ("integrate", "run_trial"):  # at most ten times per second; at the end only
        assert len(shares) > 1


@pytest.mark.parametrize("name", LONG)
def test_what_cannot_be_called_is_refused(name):
    with pytest.raises(hs.HelmscopeError, match="progress is 'bar', but it must be a callable that takes the share of"):
        LONG[name]("bar")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


WITHOUT_SHARES = {  # only the time is known, or the share is that of a part which draws the bar
    "load": lambda: hs.load("A"),
    "untrained_twin": lambda: hs.models.untrained_twin(MODEL, seed=0),
    "diagnose": lambda: hs.models.diagnose(MODEL, text_count=2, text_length=8),
    "resume of a simulation": lambda: RUN.resume(depth=1, states=RUN.residual_stream(depth=1)),
    "resume of a model": lambda: RECORDING.resume(depth=2, states=RECORDING.trajectory.states[2]),
    "kernel of a model": lambda: RECORDING.kernel(layer=0),
    "logits": lambda: RECORDING.logits(depth=2),
    "kernel_statistics": lambda: hs.kernel_statistics(RUN),
    "estimate": lambda: hs.jobs.estimate(hs.jobs.SimulationSpec(n=4, batch=2, times=[0, 0.1])),
    "cluster_count": lambda: hs.cluster_count(RUN.states, max_angle=0.1),
    "cloud_statistics": lambda: hs.observe.cloud_statistics(RECORDING, gap=1),
    "token_decoding_accuracy": lambda: hs.observe.token_decoding_accuracy(RECORDING, RECORDING),
    "jacobian_split": lambda: hs.fields.jacobian_split(torch.sin, torch.zeros(2)),
    "Subject.twin_recordings": lambda: next(hs.Subject(MODEL, IDS[:1]).twin_recordings(1)),
}


@pytest.mark.parametrize("name", [*LONG, *WITHOUT_SHARES])
def test_one_bar_is_drawn_on_a_terminal(name, monkeypatch):
    """However many calls are nested, and as if every call were a long one."""
    monkeypatch.setattr(bar, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    WITHOUT_SHARES[name]() if name in WITHOUT_SHARES else LONG[name](None)
    written = sys.stderr.getvalue()
    assert written.count("100%") == written.count("\n") == 1
    assert written.endswith("\n")


@pytest.mark.parametrize("name", LONG)
def test_false_draws_nothing(name, monkeypatch):
    monkeypatch.setattr(bar, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    LONG[name](False)
    assert sys.stderr.getvalue() == ""


def test_the_bar_of_a_recording_names_its_phase(monkeypatch):
    phases = []
    monkeypatch.setattr(sys.modules["helmscope.models.record"], "name_phase", phases.append)
    hs.record("B", ["Once upon a time"])
    assert phases == ["loading B", "checking", "recording"]
