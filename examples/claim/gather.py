"""The experiment of the claim tokens-gather, as explained in docs/claims.md."""

import helmscope as hs


@hs.claims.experiment("tokens-gather")
def gather(case: hs.claims.TrialCase) -> hs.claims.Finding:
    """How many of the random starts have gathered by t = 10; the control is the starts themselves."""
    x = hs.Uniform(n=16, dim=3).sample(batch=case.count(128, quick=32), seed=case.seed_for(0))
    order = hs.order_parameter(hs.integrate(hs.SA(beta=1.0), x, times=[0, 5, 10]).states)
    gathered = (order >= case.constant("level")).sum(-1).tolist()
    start, _, end = (hs.claims.Count(count, len(x), of="starts") for count in gathered)
    data = hs.claims.curve("order", order.T, {"time": [0, 5, 10]}, label="order parameter")
    return hs.claims.Finding(evidence=end, controls={"the starts": start}, data=data)
