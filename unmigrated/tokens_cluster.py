"""tokens-cluster: with depth the inner products of a model's tokens concentrate at 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Described, EveryLayer, Finding, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.subject import Subject
from helmscope.observe.inner_products import inner_product_histogram
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Exhibit, HelmscopeError, Region, Ruling, Trajectory, counted

if TYPE_CHECKING:
    from helmscope.models.recording import Recording

TWINS, LEVEL, BINS = 5, 0.9, 50
BETA, FLOW_PROMPTS = 1.0, 16  # of the simulated flow
MIN_TOKENS = 3  # per text: the first token and one pair
COLUMNS = 7  # of figure 1: evenly spaced depths
ALIKE = Region(text="Two twins of a model, both models pooled, differ by less than 0.01.", low=-0.01, high=0.01)
NEAR = Region(text="A twin differs from the mean of the others by less than 0.01.", low=-0.01, high=0.01)
DESCRIBED = Region(text="Described only.")


@experiment("tokens-cluster", seconds=120, subjects=("model",), usual=(Subject("A"), Subject("tied")))
def tokens_cluster(case: Case) -> Finding:
    """The share of pairs i != j of one prompt with <x_i, x_j> > 0.9 at the last depth minus that at the first, for each
    subject (by default the causal and the tied model of the box), and the same minus the mean of five untrained twins:
    all must grow.

    x are the tokens on the theory's sphere: the direction of the residual stream or, where states are outputs of norms,
    as in the tied model, the direction with gain and bias folded out. The mean over coordinates is removed, and the
    first token (the sink) is left out. Mean-centred: the prompt's mean token is subtracted first. The null compares one
    twin, in place of the model, with the others. A model of one tied block is looped to twice its depth. To compare,
    an SA flow with beta = 1 starts from the first states of the last subject, with one unit of time per layer.
    """
    missing = next((why for subject in case.subjects if (why := subject.needs("on_sphere")) is not None), None)
    if missing is not None:
        return Finding.impossible(missing)
    runs = [_Run.of(name, subject, case) for name, subject in zip(case.names, case.subjects, strict=True)]
    plotted = runs[-1]
    flow = _flow(plotted.path, plotted.end, plotted.steps)
    flow_cloud = _Cloud.of(flow)
    cases = {f"{run.name} itself": run.growth for run in runs}
    cases |= {f"{run.name} over its untrained twins": run.growth - run.null.mean(0) for run in runs}
    described = {
        **{f"{run.name}, pairs of different words": _growth(run.cloud.share_distinct, run.end) for run in runs},
        **{f"{run.name}, mean-centred": _growth(run.cloud.share_centred, run.end) for run in runs},
        **{what: growth for run in runs for what, growth in run.other_coordinates().items()},
        "simulated flow": _growth(flow_cloud.share, flow_cloud.depths - 1),
    }
    texts = " and ".join(
        dict.fromkeys(
            f"{counted(run.prompts, 'text')} with {counted(run.firsts, 'distinct first token')}" for run in runs
        )
    )
    spheres = ", ".join(f"{run.coordinates} ({run.name})" for run in runs)
    return Finding(
        evidence=EveryLayer(list(cases.values()), "prompts", names=list(cases)),
        null=_null(runs),
        data=_curves(runs, flow_cloud, _figure_one(plotted, flow)),
        also=tuple(
            Check(f"growth of the share: {what}", Described(values, "prompts"), Ruling.INCONCLUSIVE, DESCRIBED)
            for what, values in (cases | described).items()
        ),
        remark=_remark(runs),
        where=(
            f"model{'s' if len(runs) > 1 else ''} {' and '.join(run.name for run in runs)}, {texts}; from the first "
            f"block's input to the last block's output; {spheres}, mean over coordinates removed, first token left "
            "out. Intervals are over prompts, with the five twins held fixed. For comparison, an SA flow with beta = "
            f"{BETA:g}, V = I, one unit of time per layer, from the first states of {plotted.name} on {FLOW_PROMPTS} "
            "of the texts"
        ),
        exhibits=tuple(Exhibit(f"Certificate of {run.name}", str(run.recording.certificate)) for run in runs),
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """One subject and its twins on some prompts; ``end`` is the depth of the model as trained, beyond which a tied
    block is looped further.
    """

    name: str
    recording: Recording
    twins: list[_Cloud]
    cloud: _Cloud
    end: int
    prompts: int
    firsts: int

    @classmethod
    def of(cls, name: str, subject: Subject, case: Case) -> _Run:
        texts, firsts = _prompts(case.count(64, quick=32), subject)
        loops = subject.tied_loops
        deep = subject if loops is None else subject.looped(2 * loops)
        recording = deep.recording_of(texts)
        cloud = _Cloud.of(recording.on_sphere, recording.batch.inputs[recording.batch.ids_name])
        # map, so that no recording is kept while the next one is made
        twins = list(map(_Cloud.of_recording, deep.twin_recordings(TWINS, seed=case.seed, texts=texts)))
        end = cloud.depths - 1 if loops is None else recording.anatomy.depths.steps * loops
        return cls(name, recording, twins, cloud, end, len(texts), firsts)

    @property
    def path(self) -> Trajectory:
        return self.recording.on_sphere

    @property
    def steps(self) -> int:
        """The number of half-layers per layer."""
        return self.recording.anatomy.depths.steps

    @property
    def growth(self) -> np.ndarray:
        return _growth(self.cloud.share, self.end)

    @property
    def null(self) -> np.ndarray:
        """The growth of each twin."""
        return np.stack([_growth(twin.share, self.end) for twin in self.twins])

    @property
    def is_looped(self) -> bool:
        return self.end < self.cloud.depths - 1

    @property
    def coordinates(self) -> str:
        post = self.recording.anatomy.post_norm
        return "norm output with gain and bias folded out" if post else "residual direction"

    def other_coordinates(self) -> dict[str, np.ndarray]:
        """The growth with the first token, or with gain and bias, and while a tied block is looped further."""
        if not self.recording.anatomy.post_norm:
            return {f"{self.name} with the first token": _growth(_Cloud.of(self.path, sink=True).share, self.end)}
        growths = {f"{self.name} with gain and bias": _growth(_Cloud.of(self.recording.trajectory).share, self.end)}
        if self.is_looped:
            loops = self.end // self.steps
            what = f"{self.name}, from {loops} to {2 * loops} loops"
            growths[what] = self.cloud.share[-1] - self.cloud.share[self.end]
        return growths


@dataclass(frozen=True)
class _Cloud:
    """Inner products of the tokens of each prompt, (depth, prompt): their mean and the share above 0.9, both raw and
    mean-centred, and the share among pairs of different token ids.
    """

    mean: np.ndarray
    share: np.ndarray
    share_distinct: np.ndarray
    mean_centred: np.ndarray
    share_centred: np.ndarray

    @classmethod
    def of(cls, path: Trajectory, ids: Tensor | None = None, *, sink: bool = False) -> _Cloud:
        path = path if sink else _without_first(path)
        n = path.states.shape[2]
        real = torch.ones(path.states.shape[1:3], dtype=torch.bool) if path.weights is None else path.weights[0] > 0
        words = torch.arange(n).expand(real.shape) if ids is None else ids[:, -n:]
        i, j = torch.triu_indices(n, n, 1)
        pairs = (real[:, i] & real[:, j]).double()
        distinct = pairs * (words[:, i] != words[:, j])
        rows = []
        for x in path.states:
            mean = (x * real.unsqueeze(-1)).sum(1, keepdim=True) / real.sum(1)[:, None, None]
            inner, centred = ((y @ y.mT)[:, i, j] for y in (x, retract(x - mean)))
            weighted = [(inner, pairs), (inner > LEVEL, pairs), (inner > LEVEL, distinct)]
            weighted += [(centred, pairs), (centred > LEVEL, pairs)]
            rows.append(torch.stack([(value * weight).sum(1) / weight.sum(1) for value, weight in weighted]))
        return cls(*torch.stack(rows, 1).numpy())

    @classmethod
    def of_recording(cls, recording: Recording) -> _Cloud:
        return cls.of(recording.on_sphere)

    @property
    def depths(self) -> int:
        return len(self.mean)


def _null(runs: list[_Run]) -> Check:
    """The null: twins must not differ from each other. With two models, pairs of twins pooled over both; with one, each
    twin against the mean of the others, since two pairs would be too few for an interval.
    """
    means = [run.null.mean(1) for run in runs]
    if len(runs) == 1:
        differences = [mean - np.delete(means[0], k).mean() for k, mean in enumerate(means[0])]
        what = "growth of one untrained twin over the mean of the others"
        return Check(what, Replicates(differences, "twins"), Ruling.SUPPORTED, NEAR)
    pairs = [of_model[k] - of_model[k + 1] for of_model in means for k in range(0, TWINS - 1, 2)]
    what = "growth of one untrained twin over another's"
    return Check(what, Replicates(pairs, "pairs"), Ruling.SUPPORTED, ALIKE)


def _growth(share: np.ndarray, end: int) -> np.ndarray:
    """The growth from the first depth to ``end``, one value per prompt."""
    return np.asarray(share[end] - share[0])


def _without_first(path: Trajectory) -> Trajectory:
    return Trajectory(path.times, path.states[:, :, 1:], None if path.weights is None else path.weights[:, :, 1:])


def _prompts(count: int, subject: Subject) -> tuple[list[str | tuple[int, ...]], int]:
    """Texts of a subject that cover as many first tokens as possible: first one text for each first token, then a
    second one for each, and so on; and the number of distinct first tokens.
    """
    texts = subject.texts
    for k, row in enumerate(subject.token_ids):
        if len(row) < MIN_TOKENS:
            raise HelmscopeError(
                f"texts[{k}] has {counted(len(row), 'token')}, but the claim needs {MIN_TOKENS} or more in each"
            )
    firsts = [int(row[0]) for row in subject.token_ids]
    rank = [firsts[:k].count(first) for k, first in enumerate(firsts)]
    chosen = sorted(sorted(range(len(texts)), key=lambda k: (rank[k], k))[:count])
    return [texts[k] for k in chosen], len({firsts[k] for k in chosen})


def _flow(path: Trajectory, end: int, steps: int) -> Trajectory:
    """The SA flow from the first states of some prompts, with one unit of time per layer."""
    x = retract(path.states[0, :FLOW_PROMPTS].double())
    times = [k / steps for k in range(end + 1)]
    weights = None if path.weights is None else path.weights[0, :FLOW_PROMPTS]
    return integrate(SA(beta=BETA), x, times, weights=weights, stepper=DormandPrince(1e-5)).trajectory


def _curves(runs: list[_Run], flow: _Cloud, histograms: xr.Dataset) -> xr.Dataset:
    """Means and shares of each prompt over depth, of the models and the mean of their twins; the means also of the
    flow, which has only some of the prompts.
    """
    models = {}
    for run in runs:
        models[run.name] = [run.cloud]
        models[f"{run.name} untrained"] = run.twins
    subjects = {**models, f"SA flow, beta = {BETA:g} ({FLOW_PROMPTS} prompts)": [flow]}
    centred = "with the prompt's mean token subtracted first"
    labels = {
        "mean": "mean inner product of two tokens of a prompt",
        "mean_centred": f"mean inner product {centred}, where -1/(n - 1) is the mean of any even cloud",
        "share": f"share of inner products above {LEVEL} (the flow's goes to 1)",
        "share_centred": f"share of inner products above {LEVEL}, {centred}",
    }
    prompts, depth = max(run.prompts for run in runs), max(run.cloud.depths for run in runs)
    variables = []
    for name, long_name in labels.items():
        dim, curves = ("subject", subjects) if name == "mean" else ("model", models)
        values = np.full((prompts, depth, len(curves)), np.nan)
        for k, clouds in enumerate(curves.values()):
            mean = np.mean([getattr(cloud, name) for cloud in clouds], 0)
            values[: mean.shape[1], : len(mean), k] = mean.T
        axes: dict[str, list[Any]] = {"half_step": list(range(depth)), dim: list(curves)}
        variables.append(curve(name, values, axes, label=long_name, over="prompt"))
    return xr.merge([*variables, histograms], join="outer")


def _figure_one(run: _Run, flow: Trajectory) -> xr.Dataset:
    """Histograms at evenly spaced depths (inner product, relative depth, what): the model at its depth and, if it is
    one tied block, looped to twice that, as in figure 1 of the source, and the flow.
    """
    path, end = run.path, run.end
    layers, unit = end // run.steps, "loops" if run.is_looped else "layers"
    rows = {f"{layers} {unit}": (path, end)}
    rows |= {f"{2 * layers} loops": (path, 2 * end)} if run.is_looped else {}
    rows[f"SA flow, t to {layers}"] = (flow, end)
    histograms = []
    for trajectory, last in rows.values():
        depths = [round(last * k / (COLUMNS - 1)) for k in range(COLUMNS)]
        sampled = Trajectory(torch.linspace(0, 1, COLUMNS), trajectory.states[depths], trajectory.weights)
        histograms.append(inner_product_histogram(replace(_without_first(sampled), replicate="prompt"), bins=BINS))
    both = xr.concat(histograms, xr.DataArray(list(rows), dims="what", name="what"), join="outer")
    both = both.rename(time="depth", share="histogram")
    both = both.assign_coords(depth=np.round(np.linspace(0, 1, COLUMNS), 2))
    both.histogram.attrs["long_name"] = (
        f"{run.name} model: share of pairs in {BINS} bins over depth (figure 1); below, "
        f"the flow ({FLOW_PROMPTS} prompts)"
    )
    return both.transpose("prompt", "inner_product", "depth", "what")


def _remark(runs: list[_Run]) -> str:
    trained, looped = [], []
    for run in runs:
        share, end = run.cloud.share.mean(1), run.end
        twins = np.mean([cloud.share.mean(1) for cloud in run.twins], 0)
        trained.append(
            f"{run.name}: the share above {LEVEL} goes from {share[0]:.3f} over {share[: end + 1].max():.3f} to "
            f"{share[end]:.3f}, its untrained twins' from {twins[0]:.3f} to {twins[end]:.3f}"
        )
        if run.is_looped:
            looped.append(f"looped to {end}, {run.name} has {share[-1]:.3f} and its untrained twins {twins[-1]:.3f}")
    return f"{'; '.join(trained + looped)}."
