"""Damage under edits against plain sums over the logits of the model itself, and exact cases."""

import numpy as np
import pytest
import torch
from tests.support.model_families import tiny_model

import helmscope as hs
from helmscope.intervene import Ablate, Perturb
from helmscope.models import record
from helmscope.observe import damage_under_edits, loss_under_edits
from helmscope.observe.damage import token_damage
from helmscope.types import HelmscopeError

IDS = torch.tensor([[1, 5, 7, 2, 9, 3], [4, 4, 8, 6, 1, 2]])


def by_loops(plain, edited, ids):
    """KL, increase of the loss, change of the entropy and share of kept tops, by loops in Python floats."""
    found = []
    for text, before, after in zip(ids.tolist(), plain.double(), edited.double(), strict=True):
        rows = []
        for t in range(len(text) - 1):
            p, q = (np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in (before[t].numpy(), after[t].numpy()))
            kl = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
            entropies = [-sum(a * np.log(a) for a in law) for law in (q, p)]
            target = text[t + 1]
            rows.append([kl, np.log(p[target] / q[target]), entropies[0] - entropies[1], p.argmax() == q.argmax()])
        found.append(np.mean(rows, 0))
    return np.array(found).T


@pytest.mark.parametrize("edit", [Ablate([1]), Perturb(site=hs.Site.KEY, sigma=2.0, seed=3)])
def test_damage_equals_loops_over_the_logits(edit):
    recording = record(tiny_model("gpt2"), IDS)
    damage = damage_under_edits(recording, {"edit": edit})
    expected = by_loops(recording.logits(), recording.under(edit).logits(), IDS)
    names = ("kl", "loss_increase", "prediction_entropy_change", "top_token_agreement")
    for name, values in zip(names, expected, strict=True):
        assert np.abs(damage[name].sel(edit="edit").values - values).max() < 1e-12, name
    assert (damage.kl.values > 0).all()
    losses = loss_under_edits(recording, {"edit": edit})
    assert np.abs(damage.loss_increase.values - losses.loss_increase.values).max() < 1e-12


def test_two_outcomes_in_closed_form():
    p, q = 0.8, 0.3
    plain, edited = (torch.tensor([[a, 1 - a]], dtype=torch.float64).log() for a in (p, q))
    kl, increase, entropy, kept = token_damage(edited, torch.tensor([1]), plain).squeeze(-1).tolist()
    assert kl == pytest.approx(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)), abs=1e-15)
    assert increase == pytest.approx(np.log((1 - p) / (1 - q)), abs=1e-15)
    assert entropy == pytest.approx(0.6108643020548935 - 0.5004024235381879, abs=1e-15)
    assert kept == 0.0


def test_a_small_change_keeps_its_digits():
    # p = (1/2, 1/2), logits apart by 2e: KL = log cosh e = e^2 / 2 - e^4 / 12
    e = 1e-9
    plain, edited = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[e, -e]], dtype=torch.float64)
    kl = token_damage(edited, torch.tensor([0]), plain)[0].item()
    assert kl == pytest.approx(e**2 / 2, rel=1e-6)


def test_tokens_that_cannot_occur_count_nothing():
    off = -torch.inf
    plain = torch.tensor([[0.0, 1.0, off]], dtype=torch.float64)
    edited = torch.tensor([[1.0, 0.0, off]], dtype=torch.float64)
    found = token_damage(edited, torch.tensor([0]), plain)
    without = token_damage(edited[:, :2], torch.tensor([0]), plain[:, :2])
    assert torch.equal(found, without)
    assert bool(found.isfinite().all())
    assert token_damage(plain, torch.tensor([0]), plain.new_zeros(1, 3))[0].item() == torch.inf


def test_texts_of_unequal_length_and_edits_that_do_not_fit():
    recording = record(tiny_model("gpt2"), IDS)
    with pytest.raises(HelmscopeError, match="layers holds 7, but the model has layers 0 to"):
        damage_under_edits(recording, {"edit": Ablate([7])})
    with pytest.raises(HelmscopeError, match=r"edits is \{\}, but it must be a mapping of names to edits"):
        damage_under_edits(recording, {})
