"""Replay of a recording: the values that instruments receive agree with the recorded ones, in one forward pass per
chunk.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

import helmscope as hs
from helmscope.models.record import record
from helmscope.models.topology import Kind
from helmscope.observe.measure import streaming_instruments
from helmscope.types import Half
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
EVERYTHING = (
    hs.models.KeptTensors.QUERIES
    | hs.models.KeptTensors.KEYS
    | hs.models.KeptTensors.VALUES
    | hs.models.KeptTensors.KERNELS
    | hs.models.KeptTensors.WRITES
)
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [3, 4, 5, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
}


class Everything(hs.Instrument):
    """Keeps all values that it receives."""

    name = "everything"
    needs = ~hs.types.Needs.NOTHING & ~hs.types.Needs.OUTPUT_MATRIX  # which sandwich norms refuse

    def __init__(self, needs=None):
        self.needs = self.needs if needs is None else needs
        self.seen = []

    def attention(self, context, tensors):
        self.seen.append((context, tensors))
        self.keep(context, {"length": tensors.state.norm(dim=(-1, -2))})

    def mlp(self, context, tensors):
        self.attention(context, tensors)

    def put_together(self, half, name):
        """(layer, prompt, ...) of what the chunks showed."""
        layers = sorted({context.layer for context, _ in self.seen})
        return torch.stack(
            [
                torch.cat([getattr(p, name) for m, p in self.seen if (m.layer, m.half) == (layer, half)])
                for layer in layers
            ]
        )


def count_forwards(model):
    """A list that grows by one with every forward pass of the model's trunk."""
    calls = []
    model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def alike(one, other, bound):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= bound * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("batch_size", [2, 16])
@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "gptj", "gemma2", "granite", "bert", "albert", "mpnet", "bloom", "modernbert"]
)
def test_what_passes_is_what_was_recorded(family, batch_size):
    recording = record(tiny_model(family, dtype=F64), inputs_of(family), keep=EVERYTHING, batch_size=batch_size)
    instrument, own = Everything(), recording.anatomy.layers
    recording.replay(instrument)
    assert all(context.step == 1 for context, _ in instrument.seen)
    kept, path = recording.kept, recording.trajectory
    first = instrument.put_together(Half.ATTENTION, "state")
    alike(first, torch.stack([recording.residual_stream(depth=2 * layer) for layer in range(3)]), 1e-13)
    alike(instrument.put_together(Half.ATTENTION, "direction"), path.states[:-1:2], 1e-13)
    for name in ("query", "key", "value"):
        alike(instrument.put_together(Half.ATTENTION, name), kept[name], 1e-13)
    alike(instrument.put_together(Half.ATTENTION, "kernel"), kept["kernel"], 1e-13)
    for half in (Half.ATTENTION, Half.MLP):
        alike(instrument.put_together(half, "write"), kept[f"{half.value} write"], 1e-13)
    depths = [2 * layer + (own[layer].wiring.kind is not Kind.PARALLEL) for layer in range(3)]
    assert [m.time for m, _ in instrument.seen if m.half is Half.MLP][:3] == depths
    read = instrument.put_together(Half.MLP, "state")
    alike(read, torch.stack([recording.residual_stream(depth=depth) for depth in depths]), 1e-13)
    points = torch.stack([recording.force_points(layer=layer) for layer in range(3)])
    alike(instrument.put_together(Half.MLP, "point"), points, 1e-13)
    for context, tensors in instrument.seen:
        if context.half is Half.MLP and not own[context.layer].wiring.sandwich:
            alike(tensors.force.ambient(tensors.point), tensors.write, 1e-6)


def test_all_streaming_instruments_take_one_forward_per_chunk():
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2", batch=5), batch_size=2)
    calls = count_forwards(model)
    seen = hs.measure(recording, *streaming_instruments())
    assert len(calls) == 3
    assert set(seen) == {"kernel_statistics", "attention_drift", "attention_diffusion", "mlp_force"}
    assert seen["kernel_statistics"].row_entropy.dims == ("layer", "prompt", "head")
    assert seen["mlp_force"].attention_tangential_length.dims == ("layer", "prompt")
    hs.kernel_statistics(recording)
    hs.mlp_force(recording)
    assert len(calls) == 9
    assert recording.replay() == {}
    assert len(calls) == 9


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bert"])
def test_the_size_of_the_chunks_changes_nothing(family):
    model = tiny_model(family, dtype=F64)
    instruments = hs.observe.KernelStatistics(), hs.observe.MlpForce()
    whole = record(model, PADDED).replay(*instruments)
    for size in (1, 2):
        for name, seen in record(model, PADDED, batch_size=size).replay(*instruments).items():
            assert seen.sizes == whole[name].sizes
            for quantity, value in seen.data_vars.items():
                np.testing.assert_allclose(value.values, whole[name][quantity].values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_padding_is_neither_counted_nor_seen(family):
    """The values of a prompt do not depend on the other prompts of the batch."""
    model = tiny_model(family, dtype=F64)
    instruments = hs.observe.KernelStatistics(), hs.observe.MlpForce()
    recording = record(model, PADDED)
    together, told = recording.replay(*instruments), Everything(hs.types.Needs.ATTENTION)
    recording.replay(told)
    for context, _ in told.seen:
        assert torch.equal(context.weights > 0, recording.batch.counted)
        assert torch.equal(context.visible, recording.visible)
    for row, mask in enumerate(PADDED["attention_mask"]):
        alone = record(model, PADDED["input_ids"][row : row + 1, : int(mask.sum())]).replay(*instruments)
        for name, seen in alone.items():
            for quantity, value in seen.data_vars.items():
                wanted = together[name][quantity].isel(prompt=[row]).values
                np.testing.assert_allclose(value.values, wanted, rtol=1e-6, atol=1e-9, err_msg=quantity)


def same_blocks():
    """A GPT-2 whose two layers of one head are the same block, and that block as a field: attention without biases."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 1, "n_positions": 16}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()
    first, second = model.transformer.h
    with torch.no_grad():
        for value in first.parameters():
            value.normal_(std=0.5)
        for linear in (first.attn.c_attn, first.attn.c_proj):
            linear.bias.zero_()
        second.load_state_dict(first.state_dict())
    norms = [
        hs.fields.LayerNorm(gain=n.weight.detach(), bias=n.bias.detach(), eps=n.eps) for n in (first.ln_1, first.ln_2)
    ]
    query, key, value = first.attn.c_attn.weight.detach().split(8, 1)
    attention = hs.SA(
        8**-0.5, query_key=query @ key.T, value=(value @ first.attn.c_proj.weight.detach()).T, causal=True
    )
    return model, attention, hs.fields.PreNorm(attention_norm=norms[0], mlp_norm=norms[1])


def test_a_simulation_and_a_recording_of_the_same_model_have_the_same_numbers():
    model, attention, placement = same_blocks()
    recording = record(model, torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0)))
    block = hs.Block(attention, recording.forces[0].force, placement=placement)
    simulation = hs.integrate(block, recording.residual_stream(depth=0), times=[0.0, 1.0, 2.0], stepper=hs.Layer())
    assert (simulation.residual_stream(depth=2) - recording.residual_stream(depth=4)).abs().max() < 1e-11
    instruments = hs.observe.KernelStatistics(), hs.observe.MlpForce()
    recorded, simulated = recording.replay(*instruments), simulation.replay(*instruments)
    for name, seen in recorded.items():
        assert set(seen) == set(simulated[name])
        for quantity, value in seen.data_vars.items():
            wanted = simulated[name][quantity].values[:2]
            np.testing.assert_allclose(value.values.reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def twice():
    """The same model as a recording and as a simulation; times are the depths at which a layer begins."""
    model, attention, placement = same_blocks()
    recording = record(model, torch.randint(9, (8, 12), generator=torch.Generator().manual_seed(0)))
    block = hs.Block(attention, recording.forces[0].force, placement=placement)
    start = recording.residual_stream(depth=0)
    return recording, hs.integrate(block, start, times=[0.0, 1.0, 2.0], stepper=hs.Layer())


OF_LAYERS = (
    "kernel_statistics",
    "attention_drift",
    "attention_diffusion",
    "mlp_force",
    "mlp_weights",
    "bistochasticity",
    "gate_sparsity",
    "effective_beta",
    "attention_diffusion_spectrum",
    "mlp_jacobian",
    "mlp_swirl_bound",
    "mobility_test",
)


@pytest.mark.parametrize("name", OF_LAYERS)
def test_every_measurement_of_layers_is_the_same_of_a_simulation(name, twice):
    recorded, simulated = (hs.measure(system, only=[name])[name] for system in twice)
    assert set(recorded) == set(simulated)
    for quantity, value in recorded.data_vars.items():
        of = simulated[quantity]
        wanted = of.isel({of.dims[0]: slice(2)}).values
        np.testing.assert_allclose(value.values.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-9, err_msg=quantity)


def test_divergences_flows_and_distances_are_the_same_of_a_simulation(twice):
    """Where a model is estimated and a simulation exact, with enough signs and iterations; over depth, at the depths
    that both have.
    """
    divergences = [hs.observe.attention_surface_divergence(each, random_signs=8) for each in twice]
    for name in ("surface_divergence", "total_surface_divergence"):
        recorded, simulated = (each[name].values for each in divergences)
        np.testing.assert_allclose(recorded.reshape(2, 8), simulated[:2], rtol=1e-9, atol=1e-11)
    grown = [hs.observe.perturbation_growth(each, iterations=30) for each in twice]
    np.testing.assert_allclose(grown[0].singular_value.values, grown[1].singular_value.values, rtol=1e-6)
    steps = [hs.observe.depth_steps(each) for each in twice]
    ratios = [hs.observe.transport_ratio(each) for each in twice]
    for name, (recorded, simulated) in {"net_angle": steps, "radius": steps, "ratio_from_start": ratios}.items():
        np.testing.assert_allclose(recorded[name].values[::2], simulated[name].values, rtol=1e-9, err_msg=name)


def test_a_resumed_recording_replays_its_layers():
    recording = record(tiny_model("bert", dtype=F64), inputs_of("bert"))
    states = recording.trajectory.states
    for depth in (2, 3, 6):
        again = recording.resume(depth=depth, states=states[depth].flip(1))
        instrument = Everything()
        seen = again.replay(instrument)["everything"]
        assert seen.layer.values.tolist() == list(again.layers) == list(range(min(depth // 2, 2), 3))
        layer = again.layers[-1] if depth < 6 else None
        if layer is not None:
            alike(instrument.put_together(Half.MLP, "point")[-1], again.force_points(layer=layer), 1e-12)
    middle = recording.resume(depth=3, states=states[3].flip(1))
    instrument = Everything(hs.types.Needs.MLP)
    middle.replay(instrument)
    alike(instrument.put_together(Half.MLP, "direction")[0], states[3].flip(1), 1e-12)


def test_a_change_is_seen():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    instrument = Everything(hs.types.Needs.ATTENTION_WRITE)
    recording.under(hs.intervene.Ablate([1], site=hs.Site.ATTENTION)).replay(instrument)
    sizes = instrument.put_together(Half.ATTENTION, "write").abs().amax((1, 2, 3))
    assert (sizes > 0).tolist() == [True, False, True]


def hiding():
    """A DeBERTa, which returns only its attention weights."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    places = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
    torch.manual_seed(0)
    return tf.DebertaModel(tf.DebertaConfig(**sizes, **places, num_attention_heads=4)).eval()


def test_a_family_without_q_k_and_v_provides_everything_else():
    recording = record(hiding(), inputs_of("gpt2"))
    instrument = Everything(hs.types.Needs.KERNEL | hs.types.Needs.ATTENTION_WRITE)
    recording.replay(instrument)
    alike(instrument.put_together(Half.ATTENTION, "kernel")[1], recording.kernel(layer=1), 1e-6)
    assert all(tensors.query is tensors.key is tensors.value is None for _, tensors in instrument.seen)
    with pytest.raises(hs.HelmscopeError, match=r"^replay is not available.*hides q, k and v"):
        recording.replay(hs.observe.KernelStatistics(), Everything(hs.types.Needs.QKV))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("olmo2", "system has an MLP without a norm before it in layer 0, but mlp_force needs MLPs"),
    ],
)
def test_a_model_that_an_instrument_does_not_fit(family, said):
    recording = record(tiny_model(family), inputs_of(family))
    with pytest.raises(hs.HelmscopeError, match=said):
        hs.mlp_force(recording)
    heads = [] if family == "olmo2" else ["attention_drift", "attention_diffusion"]  # a norm follows the heads of olmo2
    supported = [each.name for each in streaming_instruments() if recording.unsupported_reason(each) is None]
    assert supported == ["kernel_statistics", *heads]


def test_an_exception_of_an_instrument_is_not_reported_as_one_of_the_model():
    class Faulty(Everything):
        def attention(self, context, tensors):
            raise KeyError("no such thing")

    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(KeyError, match="no such thing"):
        recording.replay(Faulty(hs.types.Needs.ATTENTION))
    recording.replay(hs.observe.KernelStatistics())  # and the model is as it was


def test_half_precision_is_shown_in_single():
    recording = record(tiny_model("bert", dtype=torch.bfloat16), inputs_of("bert"))
    instrument = Everything()
    recording.replay(instrument)
    for name in ("state", "direction", "write", "kernel", "query"):
        assert instrument.put_together(Half.ATTENTION, name).dtype == torch.float32
    points = torch.stack([recording.force_points(layer=layer) for layer in range(3)])
    alike(instrument.put_together(Half.MLP, "point"), points, 1e-5)
