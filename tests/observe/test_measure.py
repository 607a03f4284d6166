"""Many instruments by one replay, and the reduction of what they give."""

from __future__ import annotations

import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.observe import measurement_names
from helmscope.observe.measure import streaming_instruments, unsupported_measurements

DRAW = torch.Generator().manual_seed(0)
MLP = hs.MLP(
    w_in=torch.randn(4, 3, dtype=torch.float64, generator=DRAW),
    w_out=torch.randn(3, 4, dtype=torch.float64, generator=DRAW),
    activation=hs.activations.Tanh(),
)
X = hs.Uniform(5, 3).sample(4, seed=0)
RUN = hs.integrate(hs.Block(hs.SA(2.0), MLP), X, times=[0.0, 0.5])


def test_what_only_looks_takes_no_forward():
    instruments = streaming_instruments()
    attention = {"kernel_statistics", "attention_drift", "attention_diffusion"}
    assert {instrument.name for instrument in instruments} == {*attention, "mlp_force"}
    assert all(instrument.extra_forward_passes == 0 for instrument in instruments)


def test_many_instruments_take_one_replay(monkeypatch):
    class Peaks(hs.Instrument):
        name, needs = "peaks", hs.types.Needs.KERNEL

        def attention(self, context, tensors):
            self.keep(context, {"peak": tensors.kernel.amax((-1, -2))})

    plain, layers = hs.SA.kernel, []
    monkeypatch.setattr(hs.SA, "kernel", lambda *given, **named: layers.append(1) or plain(*given, **named))
    seen = hs.measure(RUN, hs.observe.KernelStatistics(), hs.observe.MlpForce(), Peaks())
    assert len(layers) == 2
    assert list(seen) == ["kernel_statistics", "mlp_force", "peaks"]
    wanted = torch.stack([RUN.kernel(layer=layer).amax((-1, -2)) for layer in (0, 1)])
    assert seen["peaks"].peak.values == pytest.approx(wanted.numpy(), rel=1e-14)
    assert seen["peaks"].time.values.tolist() == [0.0, 0.5]


def test_without_names_it_takes_what_the_system_can_serve():
    of_states = {"arc_length", "depth_steps", "transport_ratio", "perturbation_growth", "entropy_along_depth"}
    of_mlp = {"mlp_force", "mlp_weights", "gate_sparsity", "mlp_jacobian", "mlp_swirl_bound"}
    of_models, of_blocks = {"context_noise"}, {"layer_whitening", "jko_step_test"}
    of_steps = {
        "mlp_entropy_change",
        "free_energy_along_depth",
        "generator_test",
    }  # of layers, or flows under an MLP alone
    assert set(hs.measure(RUN)) | {"mlp_swirl_bound"} | of_models | of_steps == set(measurement_names())
    of_attention = set(measurement_names()) - of_states - of_mlp - of_models - of_blocks - of_steps
    assert set(hs.measure(hs.integrate(hs.SA(1.0), X, times=[0.0]))) == of_attention | of_states
    assert set(hs.measure(hs.integrate(MLP, X, times=[0.0]))) | {"mlp_swirl_bound"} == of_mlp | of_states
    two = hs.integrate(MLP, X, times=[0.0, 1.0])
    assert set(hs.measure(two, only=["free_energy_along_depth"])) == {"free_energy_along_depth"}
    stepped = hs.integrate(MLP, X, times=[0.0, 1.0], stepper=hs.Layer())
    assert set(hs.measure(stepped, only=["mlp_entropy_change"], quick=True)) == {"mlp_entropy_change"}
    long = hs.Block(
        hs.SA(2.0), MLP, placement=hs.fields.PostNorm(attention_norm=hs.fields.RMSNorm(), mlp_norm=hs.fields.RMSNorm())
    )
    layered = hs.integrate(long, 3**0.5 * X, times=[0.0, 1.0], stepper=hs.Layer())
    assert {"kernel_statistics", "generator_test"} <= set(hs.measure(layered))
    assert "mlp_force" not in hs.measure(layered)
    with pytest.raises(hs.HelmscopeError, match="does not read unit vectors, but mlp_force needs one that does"):
        hs.mlp_force(layered)


def test_only_some_and_all_agree_with_their_functions():
    told = {"system": RUN.title}
    some = hs.measure(RUN, only=["transport_ratio", "kernel_statistics"])
    assert list(some) == ["kernel_statistics", "transport_ratio"]
    xr.testing.assert_identical(some["transport_ratio"], hs.observe.transport_ratio(RUN).assign_attrs(told))
    shares = []
    seen = hs.measure(RUN, quick=True, progress=shares.append)
    xr.testing.assert_identical(seen["depth_steps"], hs.observe.depth_steps(RUN).assign_attrs(told))
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_noise_leaves_out_the_flow_of_one_token():
    noisy = hs.integrate(hs.SA(1.0), X, times=[0.0, 0.1], noise=hs.noise.IsotropicNoise(0.1))
    assert "perturbation_growth" not in hs.measure(noisy)
    assert "without noise" in unsupported_measurements(noisy)["perturbation_growth"]


def test_replicates_are_kept_until_they_are_reduced():
    seen = hs.measure(RUN, hs.observe.KernelStatistics(), hs.observe.MlpForce())
    assert seen["kernel_statistics"].row_entropy.dims == ("time", "system")
    xr.testing.assert_identical(seen["kernel_statistics"], hs.kernel_statistics(RUN))
    xr.testing.assert_identical(seen["mlp_force"], hs.mlp_force(RUN))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.measure(RUN.trajectory), "system is a Trajectory.*System"),
        (lambda: hs.measure(RUN, hs.observe.KernelStatistics), r"instruments\[0\] is the class KernelStatistics, but"),
        (
            lambda: hs.measure(RUN, hs.observe.KernelStatistics(), hs.mlp_force),
            r"instruments\[1\] is a function: pass `MlpForce\(\)`, or only=\['mlp_force'\]",
        ),
        (
            lambda: hs.measure(RUN, hs.observe.depth_steps),
            r"instruments\[0\] is a function: pass only=\['depth_steps'\]",
        ),
        (
            lambda: hs.measure(hs.integrate(torch.zeros_like, X, times=[0.0]), only=["kernel_statistics"]),
            "attention fields only",
        ),
        (lambda: hs.measure(RUN, only=["depth_step"]), "did you mean 'depth_steps'"),
        (lambda: hs.measure(RUN, only="depth_steps"), "only is a str, but it must be a list"),
        (lambda: hs.measure(RUN, only=[]), "only is empty, but it must hold at least one name"),
        (lambda: hs.measure(RUN, only=[3]), r"only\[0\] is 3, but it must be the name of a measurement"),
        (lambda: hs.measure(RUN, only=["depth_steps"], quick="yes"), "quick is 'yes', but it must be True or False"),
        (lambda: hs.measure(RUN, only=["depth_steps"], seed=-1), "seed is -1, but it must be a whole number >= 0"),
        (lambda: hs.measure(RUN, only=["depth_steps"], seed="a"), "seed is 'a', but it must be a whole number >= 0"),
        (lambda: hs.measure("A"), r"system is 'A', .* record the model first, hs.measure\(hs.record\('A'\)\)"),
        (lambda: hs.measure(RUN, hs.observe.KernelStatistics(), quick=True), "instruments are given: omit them"),
        (lambda: hs.measure(hs.integrate(MLP, X, times=[0.0]), hs.observe.KernelStatistics()), "attention fields only"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
