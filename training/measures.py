"""Measures of a model's dynamics at one training step: small arrays, by layer.

    coherence       of the rows w_j of W_in: max and mean over i != j of |cos(w_i, w_j)|
    alignment       mean over neurons of cos(w_j, v_j), v_j the column of W_out that neuron j writes
    gate sparsity   share of pre-activations below 0, where the GELU is nearly 0
    radius          mean norm of the centered residual stream, at every depth
    row_entropy     of the attention rows, in nats, mean over tokens: by layer and head
    clustering      mean inner product of two tokens of one text (their centered directions), and the share of pairs
                    above .9, at every depth

Depth 0 is the first block's input, depth l + 1 the output of layer l. Nothing of helmscope is used, so that its
measurements can be checked against these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """All measures above, on texts (batch, n)."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    negative: list[Tensor] = []
    blocks, input_matrices = _blocks_and_input_matrices(model)
    handles = [block.register_forward_pre_hook(_append_first_argument(inputs)) for block in blocks]
    handles += [blocks[-1].register_forward_hook(lambda _, __, out: outputs.append(_tensor(out)))]
    handles += [
        matrix.register_forward_hook(lambda _, __, out: negative.append(out.float() < 0)) for matrix in input_matrices
    ]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        attentions = model(input_ids=ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(implementation)
        for handle in handles:
            handle.remove()
    states = torch.stack([*inputs, outputs[-1]]).float()
    states = states - states.mean(-1, keepdim=True)
    unit = torch.nn.functional.normalize(states, dim=-1)
    inner = torch.einsum("lbnd,lbmd->lbnm", unit, unit)
    off_diagonal = ~torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    matrices = [weights(block) for block in blocks]
    values = {
        "coherence_max": torch.stack([coherence(w_in).amax() for w_in, _ in matrices]),
        "coherence_mean": torch.stack([off_diagonal_mean(coherence(w_in)) for w_in, _ in matrices]),
        "neuron_alignment_mean": torch.stack(
            [torch.cosine_similarity(w_in, w_out, dim=-1).mean() for w_in, w_out in matrices]
        ),
        "gate_sparsity": torch.stack([layer.float().mean() for layer in negative]),
        "radius": states.norm(dim=-1).mean((1, 2)),
        "row_entropy": torch.stack([torch.special.entr(layer.float()).sum(-1).mean((0, 2)) for layer in attentions]),
        "mean_inner_product": inner[..., off_diagonal].mean((1, 2)),
        "aligned_pair_share": (inner[..., off_diagonal] > 0.9).float().mean((1, 2)),
    }
    return {name: value.float().cpu().contiguous() for name, value in values.items()}


def coherence(rows: Tensor) -> Tensor:
    """|cos| of all pairs of rows, 0 on the diagonal."""
    unit = torch.nn.functional.normalize(rows.float(), dim=-1)
    return (unit @ unit.T).abs().fill_diagonal_(0.0)


def off_diagonal_mean(table: Tensor) -> Tensor:
    """The off-diagonal mean of a square matrix whose diagonal is 0."""
    return table.sum() / (len(table) * (len(table) - 1))


def weights(block: Any) -> tuple[Tensor, Tensor]:
    """W_in and W_out of a block as (neurons, width): what each neuron reads, and what it writes."""
    if hasattr(block, "mlp"):  # GPT-2 stores weights as (in, out)
        return block.mlp.c_fc.weight.T.float(), block.mlp.c_proj.weight.float()
    return block.ffn.weight.float(), block.ffn_output.weight.T.float()


def _blocks_and_input_matrices(model: Any) -> tuple[list[Any], list[Any]]:
    """The blocks, and for each the module whose output is its pre-activations."""
    if hasattr(model, "transformer"):
        blocks = list(model.transformer.h)
        return blocks, [block.mlp.c_fc for block in blocks]
    block = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    return [block], [block.ffn]


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _append_first_argument(inputs: list[Tensor]) -> Any:
    def hook(_: Any, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])

    return hook
