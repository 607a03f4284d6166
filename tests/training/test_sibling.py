"""The sibling of model A: its measures against plain loops, its training on a tiny model, what is stored."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.claims.prompts import choose_prompts

SIZES = {"n_embd": 8, "n_head": 2}
APART = 16


def tiny(training, layers=2):
    """A tiny model whose weights, gains and biases are all far from their initial values."""
    model = replace(training.sibling.SIBLING, layers=layers).model(**SIZES).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.4 * torch.randn(value.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 12, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def windows():
    return np.random.default_rng(2).integers(3, 4096, (2, 257)).astype(np.int16)


def direct_states(model, ids, arm):
    """The residual stream at every half-layer, computed without hooks."""
    body, rows = model.transformer, []
    x = body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))
    rows.append(x)
    future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    for block in body.h:
        if arm in ("whole model", "attention alone"):
            q, k, v = (
                part.unflatten(-1, (2, 4)).transpose(1, 2) for part in block.attn.c_attn(block.ln_1(x)).split(8, -1)
            )
            scores = (q @ k.mT / 2).masked_fill(future, -torch.inf)
            x = x + block.attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        rows.append(x)
        if arm in ("whole model", "MLP alone"):
            x = x + block.mlp(block.ln_2(x))
        rows.append(x)
    return torch.stack(rows).detach().double().numpy()


def test_the_arms_against_loops(training, ids, windows):
    """Every arm, depth and prompt, with a model without hooks and one pair of tokens at a time."""
    model = tiny(training)
    found = {name: value.double().numpy() for name, value in training.arms.measure_arms(model, ids, windows).items()}
    for a, arm in enumerate(training.arms.ARMS):
        for depth, batch in enumerate(direct_states(model, ids, arm)):
            for prompt, (rows, words) in enumerate(zip(batch, ids.tolist(), strict=True)):
                tokens = [row - row.mean() for row in rows]
                tokens = [row / math.sqrt(row @ row) for row in tokens]
                pairs = [(i, j) for j in range(20) for i in range(1, j - APART + 1) if words[i] != words[j]]
                inner = np.array([tokens[i] @ tokens[j] for i, j in pairs])
                here = (a, depth, prompt)
                assert found["mean_inner_product"][here] == pytest.approx(inner.mean(), abs=2e-6)
                shares = [(inner > level).mean() for level in (0.8, 0.9, 0.99)]
                assert found["aligned_pair_share"][a, depth, :, prompt] == pytest.approx(shares, abs=1e-7)
                cloud = np.stack(tokens[1:])
                s = np.linalg.svd(cloud, compute_uv=False)
                p = s[s > 1e-9] / s.sum()
                assert found["participation_ratio"][here] == pytest.approx((s**2).sum() ** 2 / (s**4).sum(), rel=1e-5)
                assert found["effective_rank"][here] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-4)
                distance = np.linalg.norm(cloud - cloud.mean(0)) / np.linalg.norm(cloud)
                assert found["collapse_residual_frobenius"][here] == pytest.approx(distance, abs=1e-6)
    assert found["aligned_pair_share"].max() > 0.05  # there is something to count


def test_the_loss_of_every_arm_belongs_to_the_edited_model(training, ids, windows):
    """Removing the last projections of a module is the same as silencing it."""
    found = training.arms.measure_arms(tiny(training), ids, windows)["validation_loss"]
    for loss, silent in zip(found.tolist(), training.arms.ARMS.values(), strict=True):
        model = tiny(training)
        with torch.no_grad():
            for block in model.transformer.h:
                for name in silent:
                    for value in getattr(block, name).c_proj.parameters():
                        value.zero_()
        assert loss == pytest.approx(training.evaluate.validation_loss(model, windows), rel=1e-6)
    assert len({round(loss, 3) for loss in found.tolist()}) == 4


def test_no_hook_is_left_and_the_precision_is_restored(training, ids, windows):
    model = tiny(training)
    before = model(input_ids=ids).logits
    torch.set_float32_matmul_precision("high")
    try:
        training.arms.measure_arms(model, ids, windows)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_mlps_against_automatic_differentiation(training, ids, windows):
    """The antisymmetric share from the Jacobian of the MLP after its norm's gain and bias, and both shares of gates."""
    model = tiny(training)
    found = training.arms.measure_arms(model, ids, windows)
    middles = torch.from_numpy(direct_states(model, ids, "whole model")[1::2])
    model = model.double()
    for layer, (block, middle) in enumerate(zip(model.transformer.h, middles, strict=True)):
        plain = torch.nn.functional.layer_norm(middle, (8,), eps=block.ln_2.eps)

        def force(y, block=block):
            return block.mlp(y * block.ln_2.weight + block.ln_2.bias)

        for prompt in range(3):
            indices = []
            for token in range(1, 20):
                jacobian = torch.func.jacrev(force)(plain[prompt, token]).detach()
                indices.append(float(((jacobian - jacobian.T) ** 2).sum() / (4 * (jacobian**2).sum())))
            assert float(found["antisymmetric_share"][layer, prompt]) == pytest.approx(np.mean(indices), abs=1e-5)
        z = block.mlp.c_fc(plain * block.ln_2.weight + block.ln_2.bias)[:, 1:].detach()
        (slope,) = torch.autograd.grad(torch.nn.functional.gelu(z.requires_grad_()).sum(), z)
        assert torch.allclose(found["gate_sparsity"][layer].double(), (z < 0).double().mean((1, 2)), atol=1e-6)
        assert torch.allclose(
            found["closed_gate_share"][layer].double(), (slope < 0.1).double().mean((1, 2)), atol=1e-6
        )


def test_the_prompts_are_those_of_the_claim_about_clusters(training):
    ids = training.sibling.bundled_ids(training.recipe.BUNDLED_FOLDER)
    chosen = [hs.models.story_texts()[k] for k in training.sibling.prompt_indices(ids)]
    assert tuple(chosen) == choose_prompts(64, hs.models.Subject("A"), gap=APART)[0]


def test_train_measure_and_store(training, ids, windows, tmp_path):
    """Three steps of a tiny model, with snapshots at two of them, as far as the file in the package."""
    sibling = training.sibling
    recipe = replace(sibling.SIBLING, layers=2, steps=3, batch=2, warmup=2)
    tokens = np.random.default_rng(3).integers(0, 4096, 3000).astype(np.int16)
    trainer = training.train.Trainer(recipe, tokens, tmp_path / "sibling", "cpu", **SIZES)
    measured = []

    def measures(model, texts):
        measured.append(training.arms.measure_arms(model, texts, windows))
        return measured[-1]

    assert training.train.train(trainer, windows, ids, 1e9, measures=measures, snapshots=(0, 3))
    training.train.finish(trainer)
    found = sibling.history(trainer.folder, [5, 7, 9], {"tokens": 3000, "sha256": "abc"})
    assert found.attrs["training_tokens"] == "3,000 (0.51 epochs), sha256 of train.npy abc"
    paths = [tmp_path / "one.nc", tmp_path / "two.nc"]
    for path in paths:
        sibling.store(found, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with xr.open_dataset(paths[0], engine="h5netcdf") as file:
        read = file.load()
    assert read.step.values.tolist() == [0, 3]
    assert read.prompt.values.tolist() == [5, 7, 9]
    assert read.aligned_pair_share.dims == ("step", "arm", "depth", "level", "prompt")
    assert read.aligned_pair_share.shape == (2, 4, 5, 3, 3)
    assert read.attrs["seed"] == sibling.SIBLING.seed
    assert read.attrs["seed"] not in {recipe.seed for recipe in training.recipe.RECIPES.values()}
    for name, (_, rounding, _) in sibling.VARIABLES.items():
        for k, snapshot in enumerate(measured):
            gap = np.abs(read[name].values[k] - snapshot[name].numpy()).max()
            assert gap <= (1e-7 if rounding is None else 0.501 * rounding), (name, gap)
    assert json.loads((trainer.folder / "final" / "training.json").read_text())["seed"] == 4
