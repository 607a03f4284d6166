"""The trial of tokens-cluster: planted clouds that do and do not cluster, and the models in the box on a few words."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helmscope.claims.experiments import tokens_cluster
from helmscope.claims.finding import Finding
from helmscope.claims.judge import judge
from helmscope.claims.reading import entry
from helmscope.claims.registry import Case, experiments
from helmscope.geometry.sphere import retract
from helmscope.models.boxed import box_texts
from helmscope.models.cache import RecordingCache
from helmscope.models.certificate import Certificate, Line
from helmscope.models.depths import Depths
from helmscope.models.load import load
from helmscope.models.subject import Subject
from helmscope.models.texts import Batch
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Ruling, Trajectory

TOKENS, DIM = 12, 8


@dataclass(frozen=True)
class Planted:
    """Stands for a recording: tokens that come together by ``trained`` or ``untrained`` of the way."""

    trained: float
    untrained: float

    def __call__(self, loaded: Any, texts: list[str], *, truncate: bool) -> Any:
        name = loaded.origin.name
        twin = "untrained twin" in name
        depths = 25 if "A" in name else 97
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        x = torch.randn(len(texts), TOKENS, DIM, generator=generator)
        common = torch.randn(len(texts), 1, DIM, generator=generator)
        way = self.untrained if twin else self.trained
        steps = (torch.arange(depths) / min(depths - 1, 48)).clamp(max=1) * way  # looped on, the tied one stays
        states = torch.stack([retract((1 - s) * x + s * common) for s in steps])
        path = Trajectory(torch.arange(depths, dtype=torch.float64), states)
        batch = Batch({"input_ids": torch.arange(TOKENS).expand(len(texts), TOKENS)})
        return SimpleNamespace(
            on_sphere=path,
            trajectory=path,
            certificate=Certificate((Line("residual", True, name),)),
            batch=batch,
            anatomy=SimpleNamespace(post_norm="tied" in name, depths=Depths(depths // 2)),
            encoder=None,
            residual=SimpleNamespace(direction=states, radius=states[..., 0], mean=None),
        )


def tried(monkeypatch: pytest.MonkeyPatch, trained: float, untrained: float, subject: Subject | None = None) -> Any:
    monkeypatch.setattr("helmscope.models.record.record", Planted(trained, untrained))
    monkeypatch.setattr("helmscope.models.subject._CACHE", RecordingCache())
    case = experiments()["tokens-cluster"].case(0, quick=True, subject=subject)
    return judge(entry("tokens-cluster"), tokens_cluster.tokens_cluster(case))


@pytest.mark.parametrize(
    ("trained", "untrained", "ruling"),
    [
        (0.9, 0.0, Ruling.SUPPORTED),
        (0.6, 0.95, Ruling.REFUTED),  # the twins cluster as well, and more
        (0.1, 0.95, Ruling.REFUTED),
    ],
)
def test_planted_clouds_get_the_right_verdict(
    monkeypatch: pytest.MonkeyPatch, trained: float, untrained: float, ruling: Ruling
) -> None:
    seen = tried(monkeypatch, trained, untrained)
    assert seen.ruling is ruling, seen.sentence
    assert seen.interval.n == 32


@pytest.mark.parametrize(("way", "ruling"), [((0.9, 0.0), Ruling.SUPPORTED), ((0.6, 0.95), Ruling.REFUTED)])
def test_one_subject_alone(monkeypatch: pytest.MonkeyPatch, way: tuple[float, float], ruling: Ruling) -> None:
    seen = tried(monkeypatch, *way, subject=Subject("A"))
    assert seen.ruling is ruling, seen.sentence
    assert seen.null.interval.n == 5
    assert seen.where.startswith("model A, 32 texts")
    assert [exhibit.title for exhibit in seen.exhibits] == ["Certificate of A"]


def test_a_cloud_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    states = retract(torch.randn(2, 3, 6, 2, generator=generator, dtype=torch.float64))
    words = torch.tensor([[9, 0, 1, 0, 1, 2]] * 3)
    cloud = tokens_cluster._Cloud.of(Trajectory(torch.zeros(2), states), words)
    for depth, prompt in itertools.product(range(2), range(3)):
        x = states[depth, prompt, 1:].numpy()
        for y, mean, share in (
            (x, cloud.mean, cloud.share),
            (x - x.mean(0), cloud.mean_centred, cloud.share_centred),
        ):
            y = y / np.linalg.norm(y, axis=1, keepdims=True)
            inner = [float(y[i] @ y[j]) for i in range(5) for j in range(i)]
            assert mean[depth, prompt] == pytest.approx(np.mean(inner), abs=1e-14)
            assert share[depth, prompt] == pytest.approx(np.mean([each > 0.9 for each in inner]), abs=1e-14)
        apart = [float(x[i] @ x[j]) > 0.9 for i in range(5) for j in range(i) if words[0, i + 1] != words[0, j + 1]]
        assert len(apart) == 8
        assert cloud.share_distinct[depth, prompt] == pytest.approx(np.mean(apart), abs=1e-14)


def test_prompts_have_as_many_first_tokens_as_they_can() -> None:
    tokenizer = load("A").tokenizer
    texts, firsts = tokens_cluster._prompts(64, Subject("A"))
    assert len(set(texts)) == 64
    every = {ids[0] for ids in tokenizer(box_texts())["input_ids"]}
    assert firsts == len({tokenizer(text)["input_ids"][0] for text in texts}) == min(64, len(every)) >= 32


@pytest.fixture(scope="module")
def short() -> Any:
    """The trial itself on the first words of the texts."""
    texts = [" ".join(text.split()[:8]) for text in box_texts()]
    with pytest.MonkeyPatch.context() as patch, Subject("A", texts) as one, Subject("tied", texts) as two:
        patch.setattr(tokens_cluster, "FLOW_PROMPTS", 2)
        return tokens_cluster.tokens_cluster(Case(0, quick=True, subject=one, other=two))


def test_the_models_in_the_box(short: Finding) -> None:
    verdict = judge(entry("tokens-cluster"), short)
    assert verdict.interval.n == len(short.evidence.samples[0]) == 32
    assert list(short.evidence.names) == [
        *("A itself", "tied itself", "A over its untrained twins", "tied over its untrained twins")
    ]
    assert verdict.null.as_expected
    assert verdict.where.startswith("models A and tied")
    assert [exhibit.title for exhibit in verdict.exhibits] == ["Certificate of A", "Certificate of tied"]
    assert all("ok    residual" in exhibit.text and "FAIL" not in exhibit.text for exhibit in verdict.exhibits)
    assert short.data.sizes["prompt"] == 32
    data = reduce_replicates(short.data)
    assert data.histogram.dims == ("inner_product", "depth", "what")
    np.testing.assert_allclose(data.histogram.sum("inner_product"), 1.0, atol=1e-6)
    assert list(data.subject.values)[:4] == ["A", "A untrained", "tied", "tied untrained"]
    assert data["mean"].sel(subject="tied").notnull().sum() == 97
    by_flow = short.data["mean"].sel(subject=data.subject.values[-1], half_step=0)
    assert by_flow.notnull().sum() == 2  # it starts from some of the prompts, here two


def test_the_mean_inner_product_of_a_against_its_own_hidden_states(short: Finding) -> None:
    loaded = load("A", attention="eager")
    texts = [" ".join(text.split()[:8]) for text in box_texts()]
    chosen, _ = tokens_cluster._prompts(32, Subject("A", texts))
    means = []
    for text in chosen:
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            state = loaded.model(input_ids=ids, output_hidden_states=True).hidden_states[6][0, 1:].double()
        x = retract(state - state.mean(-1, keepdim=True)).numpy()
        n = len(x)
        means.append((np.sum(x @ x.T) - n) / (n * (n - 1)))
    seen = short.data["mean"].sel(subject="A", half_step=12).values
    assert seen == pytest.approx(means, abs=1e-5)
    assert seen.mean() == pytest.approx(np.mean(means), rel=1e-5)
