"""What the dynamics look like at one step of training: small arrays, by layer.

    coherence       of the rows w_j of W_in: max and mean over i != j of |cos(w_i, w_j)|
    alignment       mean over neurons of cos(w_j, v_j), v_j the column of W_out that neuron j writes
    gate sparsity   share of pre-activations below 0, where the GELU is nearly shut
    radius          mean length of the residual stream without its mean, at every depth
    entropy         of the attention rows, nats, mean over tokens: by layer and head
    clustering      mean inner product of two tokens of one text (their directions without the mean), and the share of
                    pairs above .9, at every depth

Depth 0 is the first block's input, depth l + 1 the output of layer l. Nothing of helmscope is used, so that these can
be held against what it measures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def measured(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """All of the above on texts (batch, n)."""
    before, states = [], []
    blocks, fan_in = _parts(model)
    handles = [block.register_forward_pre_hook(_first_into(states)) for block in blocks]
    handles += [blocks[-1].register_forward_hook(lambda _, __, out: ends.append(_tensor(out)))]
    handles += [matrix.register_forward_hook(lambda _, __, out: before.append(out.float() < 0)) for matrix in fan_in]
    ends: list[Tensor] = []
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rows = model(input_ids=ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(own)
        for handle in handles:
            handle.remove()
    cloud = torch.stack([*states, ends[-1]]).float()
    cloud = cloud - cloud.mean(-1, keepdim=True)
    unit = torch.nn.functional.normalize(cloud, dim=-1)
    inner = torch.einsum("lbnd,lbmd->lbnm", unit, unit)
    apart = ~torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    pairs = [weights(block) for block in blocks]
    found = {
        "coherence_max": torch.stack([coherence(w_in).amax() for w_in, _ in pairs]),
        "coherence_mean": torch.stack([off_diagonal_mean(coherence(w_in)) for w_in, _ in pairs]),
        "alignment": torch.stack([torch.cosine_similarity(w_in, w_out, dim=-1).mean() for w_in, w_out in pairs]),
        "gate_sparsity": torch.stack([each.float().mean() for each in before]),
        "radius": cloud.norm(dim=-1).mean((1, 2)),
        "entropy": torch.stack([torch.special.entr(each.float()).sum(-1).mean((0, 2)) for each in rows]),
        "inner_product": inner[..., apart].mean((1, 2)),
        "share_above": (inner[..., apart] > 0.9).float().mean((1, 2)),
    }
    return {name: value.float().cpu().contiguous() for name, value in found.items()}


def coherence(rows: Tensor) -> Tensor:
    """|cos| between all rows, 0 on the diagonal."""
    unit = torch.nn.functional.normalize(rows.float(), dim=-1)
    return (unit @ unit.T).abs().fill_diagonal_(0.0)


def off_diagonal_mean(table: Tensor) -> Tensor:
    """The mean of a square table whose diagonal is 0, over the rest."""
    return table.sum() / (len(table) * (len(table) - 1))


def weights(block: Any) -> tuple[Tensor, Tensor]:
    """W_in and W_out of a block as (neurons, width): what each neuron reads, and what it writes."""
    if hasattr(block, "mlp"):  # GPT-2 keeps (in, out)
        return block.mlp.c_fc.weight.T.float(), block.mlp.c_proj.weight.float()
    return block.ffn.weight.float(), block.ffn_output.weight.T.float()


def _parts(model: Any) -> tuple[list[Any], list[Any]]:
    """The blocks, and what gives the pre-activations of each."""
    if hasattr(model, "transformer"):
        blocks = list(model.transformer.h)
        return blocks, [block.mlp.c_fc for block in blocks]
    block = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    return [block], [block.ffn]


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _first_into(states: list[Tensor]) -> Any:
    def keep(_: Any, args: tuple[Any, ...]) -> None:
        states.append(args[0])

    return keep
