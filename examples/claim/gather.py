"""The experiment of the claim tokens-gather, as explained in docs/claims.md."""

import helmscope as hs


@hs.claims.experiment("tokens-gather")
def gather(case: hs.claims.Case) -> hs.claims.Finding:
    """The order parameter of random starts at t = 10; the null is that of the starts themselves."""
    x = hs.Uniform(n=16, dim=3).sample(batch=case.count(128, quick=32), seed=case.seed_for(0))
    order = hs.order_parameter(hs.integrate(hs.SA(beta=1.0), x, times=[0, 5, 10]).states)
    end, null = (hs.claims.Replicates(order[k], of="starts", scale=hs.stats.LogScale()) for k in (-1, 0))
    data = hs.claims.curve("order", order.T, {"time": [0, 5, 10]}, label="order parameter")
    return hs.claims.Finding(evidence=end, null=hs.claims.Check("order of the starts", null), data=data)
