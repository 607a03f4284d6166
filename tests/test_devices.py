"""Everything runs where its tensors lie, in both dtypes, and gives there what float64 on the CPU gives.

A machine with a GPU runs each case on it too.
"""

from collections.abc import Callable

import pytest
import torch

import helmscope as hs

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PLACES = [(device, dtype) for device in DEVICES for dtype in (torch.float32, torch.float64)]
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5}  # one evaluation
FLOW_BOUND = {torch.float64: 1e-9, torch.float32: 3e-4}  # a run: float32 has local error 1e-5 a step

GENERATOR = torch.Generator().manual_seed(5)
X = hs.Uniform(n=6, dim=3).sample(batch=4, seed=1)
WEIGHTS = torch.rand(4, 6, generator=GENERATOR, dtype=torch.float64) + 0.5
MASK = torch.tensor([True, True, True, True, True, False])
MATRIX = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
BIAS = torch.randn(6, 6, generator=GENERATOR, dtype=torch.float64)

FIELDS = {
    "sa": hs.SA(2.0),
    "usa": hs.USA(2.0),
    "general": hs.SA(2.0, query_key=MATRIX, value=MATRIX.mT.contiguous(), bias=BIAS, causal=True),
}
STEPPERS = [
    *(hs.DormandPrince(), hs.solve.ProjectedEuler(0.1), hs.solve.Heun(0.1), hs.RK4(0.1), hs.solve.GeodesicEuler(0.1)),
    *(hs.solve.GeodesicHeun(0.1), hs.solve.GeodesicRK4(0.1), hs.Layer(0.5), hs.solve.UnprojectedEuler(0.1)),
]
OBSERVABLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "energy": lambda x: hs.interaction_energy(x, beta=2.0),
    "log energy": lambda x: hs.observe.log_interaction_energy(x, beta=2.0),
    "energy rate": lambda x: hs.observe.interaction_energy_rate(x, FIELDS["general"]),
    "printed energy": lambda x: hs.observe.gaussian_energy_as_printed(x, beta=2.0),
    "mean inner product": hs.mean_inner_product,
    "clustering fraction": lambda x: hs.observe.close_pair_share(x, delta=0.3),
    "cluster count": lambda x: hs.cluster_count(x, max_angle=0.5),
    "merge heights": lambda x: hs.observe.merge_tree(x).height,
    "order": hs.order_parameter,
    "effective rank": hs.observe.effective_rank,
    "residual": hs.observe.collapse_residual_composite,
    "angle": lambda x: hs.sphere.angle(x, x.flip(-2)),
    "log": lambda x: hs.sphere.log(x, x.flip(-2)),
    "transport": lambda x: hs.sphere.parallel_transport(x, x.roll(1, -2), hs.sphere.project(x, x.flip(-1))),
    "basis": hs.sphere.tangent_basis,
    "laplacian": lambda x: hs.geometry.surface.laplacian(lambda y: torch.sin(y[..., 0]) * y[..., 1], x),
    "harmonics": lambda x: hs.geometry.harmonics.spherical_harmonics(x, 6),
    "merging": lambda x: hs.fields.merge_tokens(x, 0.6).states,
}


def check_same(got: torch.Tensor, wanted: torch.Tensor, device: str, dtype: torch.dtype, bound: dict = BOUND) -> None:
    assert got.device.type == device
    assert got.dtype in (dtype, torch.long)
    assert (got.cpu().double() - wanted.double()).abs().max() <= bound[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str, device: str, dtype: torch.dtype) -> None:
    field = FIELDS[name]
    wanted = field(X, weights=WEIGHTS, mask=MASK)
    got = field(X.to(device, dtype), weights=WEIGHTS.to(device), mask=MASK.to(device))
    check_same(got, wanted, device, dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_integration(stepper: object, device: str, dtype: torch.dtype) -> None:
    options = {"stepper": stepper, "events": [hs.solve.HittingTime(0.5), hs.solve.ClusterMerge(0.3)], "merge": 1e-4}
    wanted = hs.integrate(FIELDS["usa"], X, [0.0, 1.0, 2.0], **options)
    got = hs.integrate(FIELDS["usa"], X.to(device, dtype), [0.0, 1.0, 2.0], **options)
    check_same(got.states, wanted.states, device, dtype, FLOW_BOUND)
    for mine, reference in zip(got.event_times, wanted.event_times, strict=True):
        assert mine.device.type == device
        assert torch.equal(mine.isnan().cpu(), reference.isnan())
        assert (mine.cpu() - reference).abs().nan_to_num(0.0).max() <= FLOW_BOUND[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", OBSERVABLES)
def test_observables(name: str, device: str, dtype: torch.dtype) -> None:
    check_same(OBSERVABLES[name](X.to(device, dtype)), OBSERVABLES[name](X), device, dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_same_seed_gives_the_same_tokens_everywhere(device: str, dtype: torch.dtype) -> None:
    for start in (hs.Uniform(5, 7), hs.VonMisesFisher(5, 7, kappa=3.0), hs.Orthonormal(5, 7)):
        check_same(
            start.sample(3, seed=2, dtype=dtype, device=device), start.sample(3, seed=2).to(dtype), device, dtype
        )


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_an_overview_is_read_from_any_device(device: str, dtype: torch.dtype) -> None:
    wanted = hs.overview(hs.integrate(FIELDS["sa"], X, [0.0, 1.0]).trajectory, beta=2.0)
    got = hs.overview(hs.integrate(FIELDS["sa"], X.to(device, dtype), [0.0, 1.0]).trajectory, beta=2.0)
    for name in ("interaction_energy", "order_parameter", "cluster_count", "effective_rank"):
        assert abs(got[name].values - wanted[name].values).max() <= FLOW_BOUND[dtype]
