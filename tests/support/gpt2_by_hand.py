"""The forward of a GPT-2 written out, with queries, keys and the temperature of attention in the hands of the caller:
an oracle for edits that does not use hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import rel_entr, softmax

Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def unchanged(layer: int, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query, key


def logits_by_hand(
    model: Any, ids: torch.Tensor, change: Change = unchanged, *, temperature: float = 1.0
) -> torch.Tensor:
    """Logits (text, token, vocabulary) with the queries and keys (text, head, token, r) of each layer changed."""
    trunk, count = model.transformer, ids.shape[1]
    state = trunk.wte(ids) + trunk.wpe(torch.arange(count))
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    with torch.no_grad():
        for layer, block in enumerate(trunk.h):
            heads = model.config.n_head
            parts = block.attn.c_attn(block.ln_1(state)).chunk(3, -1)
            query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in parts)
            query, key = change(layer, query, key)
            logits = query @ key.mT / query.shape[-1] ** 0.5 / temperature
            weights = torch.softmax(logits.masked_fill(later, -torch.inf), -1)
            state = state + block.attn.c_proj((weights @ value).transpose(1, 2).flatten(2))
            state = state + block.mlp(block.ln_2(state))
        return model.lm_head(trunk.ln_f(state))


def queries_and_keys(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of every layer."""
    found = []

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found.append((query, key))
        return query, key

    logits_by_hand(model, ids, keep)
    return found


def divergence(plain: torch.Tensor, edited: torch.Tensor) -> np.ndarray:
    """The mean over tokens of KL(p || q) of the next-token distributions, by text."""
    p, q = (softmax(each[:, :-1].double().numpy(), axis=-1) for each in (plain, edited))
    return np.asarray(rel_entr(p, q).sum(-1).mean(-1))
