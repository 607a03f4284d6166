"""Synthetic laws with known answers for the measurements under edits; see ``calibration_laws``.

Damage is compared, prompt by prompt, with its expectation at second order in closed form, so that the true value of the
quotient is 1: noise is small enough (1e-3) for higher orders not to count.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import xarray as xr
from scipy import integrate, special
from transformers import GPT2LMHeadModel

from helmscope.claims.evidence import Replicates
from helmscope.claims.experiments.sinks_are_anchors import Sinks
from helmscope.models.record import record
from helmscope.observe.cloud_projection import cloud_projection
from helmscope.observe.fourier_band_damage import fourier_band_damage
from helmscope.observe.layer_ablation_damage import AblationKind, layer_ablation_damage
from helmscope.observe.noise_ratio import query_key_noise_ratio
from helmscope.observe.query_key_metric import HeadMatrices, qk_ov_alignment, symmetric_share
from helmscope.observe.query_key_noise import NoiseKind, query_key_noise
from support.calibration_laws import Law, Values, normals
from support.planted_attention import directions, one_head
from support.planted_updates import WORDS, silent_model, subspace

SMALL = 1e-3
CONTENTS, TOKENS = 24, 12


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def _over_prompts(values: np.ndarray, averaged_as: str = "") -> xr.DataArray:
    attributes = {"averaged_as": averaged_as} if averaged_as else {}
    return xr.DataArray(np.asarray(values, dtype=float).ravel(), dims="prompt", attrs=attributes)


def _one_head_model() -> GPT2LMHeadModel:
    """Contents c with a component a along the key direction and a value v, all of one length, and a query of length 8;
    the head writes 2 v along a direction that the output layer reads.
    """
    own, draw = directions(CONTENTS + 3, 0), torch.Generator().manual_seed(7)
    key, value = (torch.randn(CONTENTS, generator=draw).clamp(-1.5, 1.5) for _ in range(2))
    rest = (6 - key.square() - value.square()).sqrt()
    embeddings = rest[:, None] * own[:CONTENTS] + key[:, None] * own[-1] + value[:, None] * own[-2]
    return one_head(embeddings, own[-3], [0.0, 8.0], [own[-1]], own[-2], 0).double()


ONE_HEAD = _one_head_model()


def noise_laws(ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The expected KL of noise of unit size on the queries and on the keys of ``ONE_HEAD``, by prompt, at second order.

    A change dl of the logits of a row changes what is written by e = sum_j A_j (v_j - mean v) dl_j, and what is read,
    r sqrt(d) s / |x + s o| with s what is written, by r sqrt(d) |x|^2 / |x + s o|^3 e: KL = Var_p(r) (...)^2 / 2.
    """
    model, d = ONE_HEAD, ONE_HEAD.config.n_embd
    attention, output = model.transformer.h[0].attn, 2 * directions(CONTENTS + 3, 0)[-3].double()
    with torch.no_grad():
        x = model.transformer.wte(ids)
        # a LayerNorm only divides by the length, since all have mean 0; its epsilon is 1e-5 of the mean square
        read = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        query, key, value = (read @ attention.c_attn.weight + attention.c_attn.bias).split(d, -1)
        beta, count = d**-0.5, ids.shape[1]
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = torch.softmax((beta * query @ key.mT).masked_fill(hidden, -torch.inf), -1)
        v = value[..., 0]
        written = (weights @ v.unsqueeze(-1)).squeeze(-1)
        about = weights * (v.unsqueeze(-2) - written.unsqueeze(-1))
        of_keys = beta**2 * query.square().sum(-1) * about.square().sum(-1)
        of_queries = beta**2 * (about @ key).square().sum(-1)
        length = output.square().sum()
        after = x.square().sum(-1) + length * written.square()
        square = after + 1e-5 * d
        step = math.sqrt(d) * length / square.sqrt() * (1 - length * written.square() / square)
        readers = model.lm_head.weight @ output / length
        logits = readers * (math.sqrt(d) * length * written / square.sqrt()).unsqueeze(-1)
        p = torch.softmax(logits, -1)
        variance = (p * readers.square()).sum(-1) - (p * readers).sum(-1).square()
        scale = 0.5 * variance * step.square()
    scored = slice(0, -1)  # the last position predicts nothing
    return tuple((scale * each)[:, scored].mean(-1).numpy() for each in (of_queries, of_keys))


def draw_noise(size: int, count: int, generator: torch.Generator) -> Values:
    ids = torch.stack([torch.randperm(CONTENTS, generator=generator)[:TOKENS] for _ in range(count)])
    recording = record(ONE_HEAD, ids, batch_size=count)
    noise = query_key_noise(
        recording, kinds=[NoiseKind.ACTIVATIONS], sigmas=[SMALL], draws=size, seed=_seed(generator), progress=False
    ).isel(kind=0, sigma=0)
    query, key = noise_laws(ids)
    kl = noise.kl.mean("draw")
    found = {
        "kl_of_queries": kl.sel(site="query") / (SMALL**2 * query),
        "kl_of_keys": kl.sel(site="key") / (SMALL**2 * key),
    }
    values = {name: _over_prompts(each.values) for name, each in found.items()}
    return values | {"ratio": _over_prompts(query_key_noise_ratio(noise).values * query / key, "log(x)")}


def damage_law(model: GPT2LMHeadModel, ids: torch.Tensor) -> np.ndarray:
    """The expected KL of a random turn by r = 1 of every token of a model whose blocks write nothing, at second order.

    With y the state, the direction u = y / |y| and P = 1 - u u^T - 1 1^T / d, logits change by sqrt(d) W P g for a
    perturbation r |y| g, E g g^T = 1 / d: KL = r^2 tr(P W^T Cov_p W P) / 2.
    """
    with torch.no_grad():
        y = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
        y = y - y.mean(-1, keepdim=True)
        d, matrix = y.shape[-1], model.lm_head.weight
        u = y / y.norm(dim=-1, keepdim=True)
        p = torch.softmax(math.sqrt(d) * u @ matrix.mT, -1)
        inside = matrix - matrix.mean(-1, keepdim=True)  # W times the projector along 1
        # rows of W P: without the part along u, for each token
        along = u @ inside.mT
        square = inside.square().sum(-1) - along.square()
        first = (p * square).sum(-1)
        mean = torch.einsum("bnv,vd->bnd", p, inside) - (p * along).sum(-1, keepdim=True) * u
    return ((first - mean.square().sum(-1)) / 2)[:, :-1].mean(-1).numpy()


def _flat_model() -> GPT2LMHeadModel:
    """Blocks that write next to nothing (attention about 1e-3 of the state, which shows that its mask is causal), and
    embeddings of one length without positions.
    """
    model = silent_model(32, heads=1)
    with torch.no_grad():
        table = model.transformer.wte.weight
        table -= table.mean(-1, keepdim=True)
        table.mul_(5 / table.norm(dim=-1, keepdim=True))
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.mul_(0.2)
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1.0)
            block.attn.c_attn.weight[:, 2 * 32 :] = 0.03 * torch.eye(32)
            block.attn.c_proj.weight.copy_(0.03 * torch.eye(32))
        for norm in (model.transformer.ln_f, *(part for b in model.transformer.h for part in (b.ln_1, b.ln_2))):
            norm.eps = 0.0
    return model


FLAT = _flat_model()


def _flat_texts(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(WORDS, (count, TOKENS), generator=generator)


def draw_ablation(size: int, count: int, generator: torch.Generator) -> Values:
    """Noise after both half-steps: two independent turns."""
    ids = _flat_texts(count, generator)
    damage = layer_ablation_damage(
        record(FLAT, ids, batch_size=count),
        kinds=[AblationKind.NOISE],
        relative_norm=SMALL,
        draws=size,
        seed=_seed(generator),
        progress=False,
    )
    kl = damage.kl.isel(part=0, kind=0, layer=0).values
    return {"kl": _over_prompts(kl / (2 * SMALL**2 * damage_law(FLAT, ids)))}


def draw_bands(size: int, count: int, generator: torch.Generator) -> Values:
    ids = _flat_texts(count, generator)
    damage = fourier_band_damage(
        record(FLAT, ids, batch_size=count), relative_norm=SMALL, draws=size, seed=_seed(generator), progress=False
    )
    law = SMALL**2 * damage_law(FLAT, ids)
    low, high = (damage.kl.isel(layer=0).sel(band=band).values for band in ("low", "high"))
    return {
        "kl_of_low_band": _over_prompts(low / law),
        "kl_of_high_band": _over_prompts(high / law),
        "ratio": _over_prompts(high / low, "log(x)"),
    }


METRIC_DIM = 16


def draw_metric(size: int, count: int, generator: torch.Generator) -> Values:
    """Heads of rank ``size`` with independent normal factors."""
    queries, keys, values, outputs = (normals(generator, count, size, METRIC_DIM) for _ in range(4))
    heads = HeadMatrices(queries, keys, values, outputs.mT.contiguous(), METRIC_DIM)
    return {
        "symmetric_share": _over_prompts(symmetric_share(queries, keys).numpy()),
        "qk_ov_alignment": _over_prompts(qk_ov_alignment(heads).numpy()),
    }


SINK_DIM, SINK_MEAN = 8, 4.0


def draw_sinks(size: int, count: int, generator: torch.Generator) -> Values:
    """Values c + e of a sink about a mean value of 0, as pseudo-values of the prompts of an interval."""
    value = normals(generator, count, SINK_DIM)
    value[:, 0] += SINK_MEAN
    data = {
        "value": (("layer", "prompt", "head", "position", "component"), value[None, :, None, None].numpy()),
        "total": (("layer", "prompt", "head", "component"), np.zeros((1, count, 1, SINK_DIM))),
        "visible": (("layer", "prompt"), np.ones((1, count))),
    }
    sinks = Sinks(xr.Dataset(), xr.Dataset(data), [(0, 0)])
    cosine, share = sinks.cosine(), sinks.explained_share(_seed(generator))
    assert isinstance(cosine, Replicates)
    assert isinstance(share, Replicates)
    return {
        "cosine": _over_prompts(np.asarray(cosine.values), "artanh(x)"),
        "explained_share": _over_prompts(np.asarray(share.values), "log(1 - x)"),
    }


def sink_truths(size: int) -> dict[str, float]:
    """E cos = |E u|^2 for two independent unit vectors u, the length of whose mean is an integral over the radius; and
    1 - E |e|^2 (1 + 1 / fit) / (|c|^2 + E |e|^2) with a constant fitted to half of the prompts.
    """
    d, c = SINK_DIM, SINK_MEAN

    def mean_along(rho: float) -> float:
        """The mean cosine of the angle to c at the distance rho, times the density of rho: von Mises and Fisher."""
        density = rho ** (d / 2) * c ** (1 - d / 2) * math.exp(-((rho - c) ** 2) / 2)
        return float(density * special.ive(d / 2, rho * c))

    mean = integrate.quad(mean_along, 0, c + 12)[0]
    return {"cosine": mean**2, "explained_share": 1 - d * (1 + 2 / size) / (c**2 + d)}


SHARE = 0.5
CLOUD = subspace(SHARE)[0]


def draw_cloud(size: int, count: int, generator: torch.Generator) -> Values:
    """Tokens near a plane, to which the MLP moves them by half of the way."""
    rows = torch.randint(WORDS, (count, TOKENS), generator=generator)
    measured = cloud_projection(record(CLOUD, rows), sampled_tokens=size, seed=_seed(generator), progress=False)
    data = measured.isel(layer=0)
    return {name: _over_prompts(data[name].values) for name in ("growth_ratio", "idempotence_defect")}


def ones(*names: str):
    return lambda size: dict.fromkeys(names, 1.0)


ONE_HEAD_TEXT = "one head, noise of size 1e-3, over the law at second order"
FLAT_TEXT = "blocks that write next to nothing, noise of relative norm 1e-3, over the law at second order"
EDIT_LAWS = (
    Law(
        "query_key_noise", ONE_HEAD_TEXT, "draws", (2, 8), draw_noise, ones("kl_of_queries", "kl_of_keys", "ratio"), 400
    ),
    Law("layer_ablation_damage", FLAT_TEXT, "draws", (1, 4), draw_ablation, ones("kl"), 400),
    Law(
        "fourier_band_damage",
        FLAT_TEXT,
        "draws",
        (1, 4),
        draw_bands,
        ones("kl_of_low_band", "kl_of_high_band", "ratio"),
        400,
    ),
    Law(
        "query_key_metric",
        "independent normal factors in 16 dimensions",
        "rows",
        (2, 8),
        draw_metric,
        lambda size: {"symmetric_share": (METRIC_DIM + 1) / (2 * METRIC_DIM), "qk_ov_alignment": 0.0},
    ),
    Law(
        "sink_constancy",
        "normal values about a constant of length 4 in 8 dimensions, as the trial of sinks-are-anchors takes them",
        "prompts",
        (32,),
        draw_sinks,
        sink_truths,
        together=True,
    ),
    Law(
        "cloud_projection",
        "tokens near a plane of 9 dimensions, moved to it by half of the way",
        "tokens",
        (8,),
        draw_cloud,
        lambda size: {"growth_ratio": 1 - SHARE, "idempotence_defect": 1 - SHARE},
        400,
        together=True,
    ),
)
