"""Figure 3 of source 001 by Monte Carlo: the share of pairs that have met, against an independent program's numbers.

SA, n = 32, delta = 1e-3; the reference has 8,192 realisations and RK4 of step 0.05.
"""

import pytest

import helmscope as hs

TIMES = (5.0, 6.0, 7.0, 8.0, 10.0, 15.0)
REFERENCE = {  # (d, beta): (probability, standard error) at each time
    (2, 1.0): (
        (0.1403, 0.0011),
        (0.2734, 0.0019),
        (0.4517, 0.0026),
        (0.6250, 0.0028),
        (0.8397, 0.0024),
        (0.9689, 0.0013),
    ),
    (2, 4.0): (
        (0.2386, 0.0009),
        (0.3227, 0.0010),
        (0.3793, 0.0010),
        (0.4151, 0.0010),
        (0.4499, 0.0011),
        (0.4856, 0.0011),
    ),
    (32, 1.0): ((0.0592, 0.0010), (0.9987, 0.0001), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)),
    (32, 4.0): ((0.0, 0.0), (0.0222, 0.0004), (0.4671, 0.0031), (0.9334, 0.0016), (0.9984, 0.0003), (1.0, 0.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "beta"), REFERENCE)
def test_the_share_of_pairs_that_have_met(dim: int, beta: float) -> None:
    start = hs.Uniform(n=32, dim=dim).sample(batch=512, seed=1)
    run = hs.integrate(hs.SA(beta=beta), start, TIMES, stepper=hs.DormandPrince(tol=1e-7))
    seen = hs.clustering_probability(run, delta=1e-3)
    for k, (probability, error) in enumerate(REFERENCE[dim, beta]):
        ours, own = float(seen.probability[k]), float(seen.probability_stderr[k])
        # four combined standard errors, and the last digit that the reference prints
        assert abs(ours - probability) <= 4 * (own**2 + error**2) ** 0.5 + 1e-4, (TIMES[k], ours, own)
