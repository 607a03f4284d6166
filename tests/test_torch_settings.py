"""What a caller has switched on in torch does not change our numbers: autocast, a default device, vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xarray as xr

import helmscope as hs

F32 = torch.float32


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def tokens(n: int = 6, dim: int = 3, batch: int | None = 2) -> torch.Tensor:
    return hs.Uniform(n=n, dim=dim).sample(batch=batch, seed=0, dtype=F32)


def mlp() -> hs.MLP:
    return hs.MLP(w_in=normal(16, 3), w_out=normal(3, 16, seed=1), b_in=normal(16, seed=2))


def gated() -> hs.GatedMLP:
    return hs.GatedMLP(w_gate=normal(16, 3), w_up=normal(16, 3, seed=1), w_out=normal(3, 16, seed=2))


def heads() -> hs.MultiHead:
    return hs.MultiHead([hs.SA(beta=2.0, query_key=normal(3, 3)), hs.SA(beta=4.0)])


def flow(field: object, x0: torch.Tensor | None = None, **options: object) -> hs.Simulation:
    return hs.integrate(field, tokens() if x0 is None else x0, [0, 1], **options)


def along_first_axis(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ normal(3, seed=5).to(x))


def evolved(grid: hs.meanfield.Grid) -> torch.Tensor:
    """The values of a density under noisy attention after a short time, in both forms."""
    start = hs.meanfield.Density.von_mises_fisher(grid, kappa=1.0)
    noise = hs.fields.IsotropicNoise(0.1)
    forms = [
        hs.meanfield.evolve(hs.SA(beta=1.0), start, times=[0.1], noise=noise, positive=p, tol=1e-6)
        for p in (False, True)
    ]
    return torch.stack([path[0](grid.points) for path in forms])


FIELDS: dict[str, Callable[[], object]] = {
    "SA": lambda: hs.SA(beta=4.0),
    "SA with all options": lambda: hs.SA(
        beta=4.0, query_key=normal(3, 3), value=normal(3, 3, seed=1), causal=True, bias=hs.fields.alibi_bias(6, 0.5)
    ),
    "USA": lambda: hs.USA(beta=2.0),
    "low rank": lambda: hs.SA(beta=1.0, query_key=hs.fields.LowRank(normal(3, 2), normal(3, 2, seed=1))),
    "Hardmax": lambda: hs.Hardmax(query_key=normal(3, 3)),
    "Sinkhorn": lambda: hs.SinkhornAttention(beta=2.0),
    "MultiHead": heads,
    "MLP": mlp,
    "GatedMLP": gated,
    "Block": lambda: hs.Block(heads(), mlp()),
}
CALLS: dict[str, Callable[[], object]] = {
    "integrate": lambda: flow(hs.SA(beta=4.0)).states,
    "density on the circle": lambda: evolved(hs.meanfield.CircleGrid(16)),
    "density on S^2": lambda: evolved(hs.meanfield.SphereGrid(14)),
    "density, zonal": lambda: evolved(hs.meanfield.ZonalGrid(dim=5, degree=14)),
    "integrate in the span": lambda: flow(hs.SA(beta=4.0), tokens(4, 9)).states,
    "integrate with merging": lambda: flow(hs.USA(beta=2.0), merge=1e-3).states,
    "integrate a callable": lambda: flow(lambda x: x @ normal(3, 3).to(x)).states,
    "integrate with noise": lambda: (
        flow(
            hs.SA(beta=4.0),
            noise=hs.noise.MatrixNoise(torch.diag(normal(3).square())),
            stepper=hs.solve.EulerMaruyama(0.1),
        ).states
    ),
    "integrate a stream": lambda: (
        flow(hs.Block(heads(), mlp(), placement=hs.fields.PreNorm()), 2 * tokens()).raw_states
    ),
    "events": lambda: flow(hs.SA(beta=1.0), events=[hs.solve.ClusterMerge(0.5)]).event_times[0],
    "resume": lambda: flow(hs.SA(beta=4.0)).resume(depth=0, states=tokens().flip(-1)).states,
    "kernel": lambda: flow(hs.SA(beta=4.0)).kernel(layer=1),
    "velocity": lambda: heads().velocity(tokens()),
    "blockwise": lambda: flow(hs.SA(beta=4.0), summation=hs.kernels.Blockwise()).states,
    "harmonic": lambda: hs.SA(beta=4.0)(tokens(2049, 3, None)),
    "harmonic on the circle": lambda: hs.SA(beta=4.0)(tokens(2049, 2, None)),
    "phase_diagram": lambda: hs.phase_diagram(
        hs.SA, betas=[1, 4], times=[0, 2], start=hs.Uniform(n=6, dim=9), samples=4, dtype=F32, stepper=hs.RK4(0.1)
    ),
    "helmholtz": lambda: torch.stack([hs.helmholtz(gated()).gradient(tokens()), hs.helmholtz(mlp()).swirl(tokens())]),
    "gaussian_hodge_split": lambda: hs.fields.gaussian_hodge_split(mlp()).gradient(tokens()),
    "sphere_hodge_split": lambda: hs.fields.sphere_hodge_split(mlp()).gradient(tokens()),
    "linear_hodge_split": lambda: hs.fields.linear_hodge_split(normal(3, 3), torch.diag(normal(3).square())).swirl,
    "jacobian_split": lambda: hs.fields.jacobian_split(mlp(), tokens()).symmetric,
    "merge_tokens": lambda: hs.fields.merge_tokens(tokens(), 0.3).states,
    "fold": lambda: hs.fields.LayerNorm(bias=normal(3)).fold(normal(4, 3))[1],
    "surface": lambda: hs.geometry.surface.hessian(along_first_axis, tokens()),
    "jacobian_spectrum": lambda: hs.observe.jacobian_spectrum(hs.SA(beta=4.0), tokens()).singular_values,
    "generator": lambda: hs.observe.sphere_generator(
        heads(), along_first_axis, tokens(), noise=hs.noise.IsotropicNoise(0.1)
    ),
    "ambient_generator": lambda: hs.observe.ambient_generator(normal(3), normal(3, 3), along_first_axis, tokens()),
    "context_covariance": lambda: hs.observe.context_covariance(tokens(12)),
    "token_sampling_covariance": lambda: hs.observe.token_sampling_covariance(
        hs.SA(beta=1.0).kernel(tokens()), tokens()
    ),
    "mlp_force": lambda: hs.mlp_force(flow(mlp())),
    "kernel_statistics": lambda: hs.kernel_statistics(flow(hs.SA(beta=4.0))),
    "overview": lambda: hs.overview(flow(hs.SA(beta=4.0))),
    "inner_product_histogram": lambda: hs.observe.inner_product_histogram(flow(hs.SA(beta=4.0)), bins=64),
    "interaction_energy": lambda: hs.interaction_energy(tokens(), beta=4.0),
    "vmf_mixture": lambda: hs.observe.vmf_mixture(tokens(12, 3, None)).centers,
}
CASES = {name: (lambda make=make: make()(tokens())) for name, make in FIELDS.items()} | CALLS


def same(found: object, expected: object) -> bool:
    if isinstance(expected, xr.Dataset):
        return expected.identical(found)
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_autocast_changes_no_bit(call):
    expected = call()
    with torch.autocast("cpu"):
        assert same(call(), expected)
        assert torch.is_autocast_enabled("cpu")


def test_autocast_is_as_it_was_after_an_error():
    with torch.autocast("cpu"):
        with pytest.raises(hs.HelmscopeError, match="field returns"):
            hs.integrate(lambda x: x[..., :2], tokens(), [1.0])
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


STARTS = {
    "Uniform": lambda: hs.Uniform(n=4, dim=3).sample(batch=2, seed=0),
    "Uniform in the span": lambda: hs.Uniform(n=4, dim=9).sample_in_span(batch=2, seed=0),
    "VonMisesFisher": lambda: hs.VonMisesFisher(n=4, dim=3, kappa=2.0).sample(batch=2, seed=0),
    "Orthonormal": lambda: hs.Orthonormal(n=3, dim=5).sample(batch=2, seed=0),
    "equiangular": lambda: hs.equiangular(hs.SA(beta=4.0), n=32, times=[1, 3]),
    "equiangular_rate": lambda: hs.theory.equiangular_rate(hs.SA(beta=4.0), n=32, gamma=0.1),
    "merge_tree": lambda: hs.observe.merge_tree(tokens(6, 3, None)).linkage(),
}


@pytest.mark.parametrize("call", [*CASES.values(), *STARTS.values()], ids=[*CASES, *STARTS])
def test_a_default_device_without_values_changes_no_bit(call):
    expected = call()
    with torch.device("meta"):  # as torch.set_default_device does
        assert torch.ones(1).is_meta
        assert same(call(), expected)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: hs.SA(beta=1.0)(torch.eye(3))),
        ("x0", lambda: hs.integrate(hs.SA(beta=1.0), torch.eye(3), [1.0])),
        ("value", lambda: hs.SA(beta=1.0, value=torch.eye(3))),
        ("left", lambda: hs.fields.LowRank(torch.eye(3), torch.eye(3))),
        ("w_in", lambda: hs.MLP(w_in=torch.eye(3), w_out=torch.eye(3))),
        ("gain", lambda: hs.fields.RMSNorm(gain=torch.ones(3))),
        ("diffusion", lambda: hs.noise.MatrixNoise(torch.eye(3))),
        ("mean", lambda: hs.VonMisesFisher(n=2, dim=3, kappa=1.0, mean=torch.ones(3))),
        ("weights", lambda: hs.SA(beta=1.0)(tokens(), weights=torch.ones(2, 6))),
        ("mask", lambda: hs.SA(beta=1.0)(tokens(), mask=torch.ones(6, dtype=torch.bool))),
    ],
)
def test_a_tensor_without_values_is_refused(name, call):
    sentence = f"^{name} is a tensor of layout torch.strided on meta, but it must be dense and hold values$"
    with torch.device("meta"), pytest.raises(hs.HelmscopeError, match=sentence):
        call()


# vmap and the other transforms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FIELDS.values(), ids=FIELDS)
def test_a_checked_call_can_be_vectorized(make):
    field, x = make(), tokens(batch=5).to(torch.float64)
    assert torch.allclose(torch.vmap(field)(x), field(x), rtol=0, atol=1e-13)
    jacobian = torch.vmap(torch.func.jacrev(field))(x)
    assert torch.allclose(jacobian[2], torch.func.jacfwd(field)(x[2]), rtol=0, atol=1e-11)
    rows = torch.autograd.functional.jacobian(field, x[2])
    assert torch.allclose(jacobian[2], rows, rtol=0, atol=1e-11)


def test_what_comes_with_the_tokens_can_be_vectorized():
    x, weights = tokens(batch=5), normal(5, 6).exp()
    mask, value = normal(5, 6, seed=1) > -1, normal(5, 3, 3, seed=2)
    found = torch.vmap(lambda x, w, m: hs.SA(beta=1.0)(x, weights=w, mask=m))(x, weights, mask)
    assert torch.equal(found, hs.SA(beta=1.0)(x, weights=weights, mask=mask))
    many = torch.vmap(lambda x, v: hs.SA(beta=1.0, value=v)(x))(x, value)
    assert torch.allclose(many[3], hs.SA(beta=1.0, value=value[3])(x[3]), rtol=0, atol=1e-6)


def test_checks_that_can_look_still_do():
    field = hs.SA(beta=1.0)
    for transform in (torch.func.jacfwd, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with pytest.raises(hs.HelmscopeError, match="token of norm 2"):
            transform(field)(2 * torch.eye(3))
    with pytest.raises(hs.HelmscopeError, match="dimension d=1"):
        torch.vmap(field)(torch.ones(5, 6, 1))
