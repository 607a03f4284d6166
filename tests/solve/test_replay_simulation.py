"""Replay of a simulation: what instruments receive against the fields themselves, in chunks of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.types import Half

F64 = torch.float64
HALVES = (Half.ATTENTION, Half.MLP)  # a simulation has no cross-attention
DRAW = torch.Generator().manual_seed(0)
B, V = torch.randn(2, 3, 3, dtype=F64, generator=DRAW)
MLP = hs.MLP(
    w_in=torch.randn(6, 3, dtype=F64, generator=DRAW),
    w_out=torch.randn(3, 6, dtype=F64, generator=DRAW),
    activation=hs.activations.Tanh(),
)
X = hs.Uniform(5, 3).sample(4, seed=0)
MASS = torch.tensor([[1.0, 2.0, 0.5, 1.0, 0.0], [1.0] * 5, [3.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 5], dtype=F64)
SA = hs.SA(2.0, query_key=B, value=V)
HEADS = hs.MultiHead([hs.SA(1.0, query_key=B), hs.SA(2.0, value=V)])


class Everything(hs.Instrument):
    """Keeps all that passes, by layer and half, and the number of tokens of each system."""

    name = "everything"
    needs = ~(hs.types.Needs.NOTHING | hs.types.Needs.OUTPUT_MATRIX)  # which heads before a norm do not have

    def __init__(self, needs=None):
        self.needs = self.needs if needs is None else needs
        self.seen = []

    def attention(self, context, tensors):
        self.seen.append((context, tensors))
        self.keep(context, {"length": tensors.state.norm(dim=(-1, -2))})

    def mlp(self, context, tensors):
        self.attention(context, tensors)


def replayed(run, needs=None):
    """What passes in one chunk: {(layer, half): (context, tensors)}."""
    instrument = Everything(needs)
    run.replay(instrument)
    return {(context.layer, context.half): (context, tensors) for context, tensors in instrument.seen}


ATTENTION = hs.types.Needs.KERNEL | hs.types.Needs.QKV | hs.types.Needs.ATTENTION_WRITE


@pytest.mark.parametrize("field", [SA, hs.USA(1.0, query_key=B), HEADS, hs.SA(2.0, causal=True)])
def test_the_kernel_follows_from_query_and_key_and_the_write_from_the_values(field):
    run = hs.integrate(field, X, times=[0.0, 0.5])
    for (layer, half), (context, tensors) in replayed(run, ATTENTION).items():
        assert half is Half.ATTENTION
        assert (context.time, context.is_increment, context.rows) == (run.times[layer].item(), False, slice(0, 4))
        assert torch.equal(tensors.state, run.trajectory.states[layer])
        assert torch.equal(tensors.kernel, run.kernel(layer=layer))
        logits = tensors.query @ tensors.key.mT
        if isinstance(field, hs.SA) and field.causal:
            logits = logits.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        wanted = torch.exp(logits) / 5 if isinstance(field, hs.USA) else torch.softmax(logits, -1)
        assert (tensors.kernel - wanted).abs().max() < 1e-13
        averages = tensors.kernel @ tensors.value
        total = averages.mean(1) if field is HEADS else averages
        assert (tensors.write - total).abs().max() < 1e-13


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "placement",
    [hs.fields.PostNorm(), hs.fields.PreNorm(mlp_norm=hs.fields.RMSNorm()), hs.fields.SandwichNorm(), hs.fields.NGPT()],
)
def test_both_halves_of_a_flow_read_the_stored_state(placement, parallel):
    block = hs.Block(HEADS, MLP, placement=placement, parallel=parallel)
    run = hs.integrate(block, X, times=[0.0, 0.3])
    seen = replayed(run)
    assert set(seen) == {(layer, half) for layer in (0, 1) for half in HALVES}
    for (layer, half), (context, tensors) in seen.items():
        state = run.residual_stream(depth=layer)
        assert not context.is_increment
        assert torch.equal(tensors.state, state)
        assert torch.equal(tensors.direction, run.trajectory.states[layer])
        assert (tensors.write - block.write(half, state)).abs().max() < 1e-14
        if half is Half.MLP:
            gave = MLP(block.placement.read(Half.MLP, state))
            assert (tensors.force(tensors.point) - gave).abs().max() < 1e-13
            assert (tensors.point.norm(dim=-1) - 1).abs().max() < 1e-14


@pytest.mark.parametrize("placement", [hs.fields.PostNorm(), hs.fields.PreNorm(), hs.fields.NGPT(attention_rate=0.5)])
@pytest.mark.parametrize("parallel", [False, True])
def test_the_writes_of_a_layer_lead_to_the_next_state(placement, parallel):
    """Under Layer(h) writes are increments, and the MLP of a sequential block reads the state between the halves."""
    block = hs.Block(SA, MLP, placement=placement, parallel=parallel)
    run = hs.integrate(block, X, times=[0.0, 0.5, 1.0], stepper=hs.Layer(0.5), weights=MASS)
    seen = replayed(run)
    for layer in (0, 1):
        (at, first), (then, second) = (seen[layer, half] for half in HALVES)
        assert at.is_increment
        assert then.step == 0.5
        start, end = run.residual_stream(depth=layer), run.residual_stream(depth=layer + 1)
        middle = start if parallel else block.placement.normalize_sum(Half.ATTENTION, start + first.write)
        assert (second.state - middle).abs().max() < 1e-15
        total = start + first.write + second.write if parallel else middle + second.write
        last = Half.ATTENTION if parallel else Half.MLP
        assert (block.placement.normalize_sum(last, total) - end).abs().max() < 1e-14


def test_the_noisy_layer_shows_increments_of_one_state():
    noise = hs.noise.IsotropicNoise(nu=1e-30)
    run = hs.integrate(hs.Block(SA, MLP), X, times=[0.0, 0.5], noise=noise, stepper=hs.solve.NoisyLayer(0.5))
    seen = replayed(run)
    total = run.states[0] + sum(seen[0, half][1].write for half in HALVES)
    assert (hs.sphere.retract(total) - run.states[1]).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("field", "stepper"),
    [(SA, None), (hs.Block(HEADS, MLP, placement=hs.fields.PreNorm()), None), (hs.Block(SA, MLP), hs.Layer(0.25))],
)
def test_the_size_of_the_chunks_changes_nothing(field, stepper):
    run = hs.integrate(field, X, times=[0.0, 0.5], stepper=stepper, weights=MASS)
    instruments = [hs.observe.KernelStatistics()] + [hs.observe.MlpForce()] * isinstance(field, hs.Block)
    whole = run.replay(*instruments)
    assert whole["kernel_statistics"].sizes["system"] == 4
    for size in (1, 2, 3, 100):
        for name, seen in run.replay(*instruments, batch_size=size).items():
            assert seen.sizes == whole[name].sizes
            for quantity, value in seen.data_vars.items():
                np.testing.assert_allclose(value.values, whole[name][quantity].values, rtol=0, atol=1e-12)


def test_an_instrument_receives_weights_and_visible_tokens():
    run = hs.integrate(SA, X, times=[0.0, 1.0], weights=MASS)
    instrument = Everything(hs.types.Needs.ATTENTION)
    run.replay(instrument, batch_size=3)
    assert [(context.layer, context.rows) for context, _ in instrument.seen] == [
        (layer, rows) for rows in (slice(0, 3), slice(3, 4)) for layer in (0, 1)
    ]
    for context, tensors in instrument.seen:
        assert torch.equal(context.weights, MASS[context.rows])
        assert torch.equal(context.visible, MASS[context.rows] > 0)
        assert tensors.kernel is tensors.query is tensors.write is None  # nobody asked


def test_only_what_instruments_need_is_computed(monkeypatch):
    run = hs.integrate(hs.Block(SA, MLP), X, times=[0.0, 1.0])
    asked = []
    monkeypatch.setattr(hs.Simulation, "kernel", lambda self, layer: asked.append(layer))
    monkeypatch.setattr(hs.Block, "write", lambda *given: asked.append(given))
    run.replay(Everything(hs.types.Needs.ATTENTION | hs.types.Needs.FORCE))
    assert asked == []


def test_a_half_that_is_not_there_is_not_shown():
    assert {
        half for _, half in replayed(hs.integrate(SA, X, times=[0.0]), hs.types.Needs.ATTENTION | hs.types.Needs.MLP)
    } == {Half.ATTENTION}
    alone = replayed(
        hs.integrate(MLP, X, times=[0.0]), hs.types.Needs.ATTENTION | hs.types.Needs.FORCE | hs.types.Needs.MLP_WRITE
    )
    ((context, tensors),) = alone.values()
    assert context.half is Half.MLP
    assert torch.equal(tensors.write, MLP(X))


class Plain(hs.Instrument):
    name = "plain"
    needs = hs.types.Needs.KERNEL


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.replay(Plain), r"instruments\[0\] is the class Plain, but it must be an Instrument"),
        (lambda run: run.replay("entropy"), r"instruments\[0\] is a str, but it must be an Instrument"),
        (lambda run: run.replay(Plain(), Plain()), "instruments holds 2 named 'plain', but each needs its own name"),
        (lambda run: run.replay(Plain()), "instrument plain kept nothing"),
        (lambda run: run.replay(Everything(ATTENTION), batch_size=0), "batch_size is 0"),
        (
            lambda run: run.replay(hs.observe.MlpForce()),
            r"no MLP: force\(layer=0\) is None, but mlp_force needs",
        ),
        (lambda run: Plain().result(), "instrument plain has no plan before its first replay"),
        (
            lambda run: hs.integrate(torch.zeros_like, X, times=[0.0]).replay(Everything(hs.types.Needs.QKV)),
            "field is .* but everything needs query, key and value",
        ),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    run = hs.integrate(SA, X, times=[0.0])
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call(run)
    assert "\n" not in str(caught.value)


def test_a_replay_without_instruments_returns_nothing():
    assert hs.integrate(SA, X, times=[0.0]).replay() == {}
