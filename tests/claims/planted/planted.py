"""Two claims whose truth is planted: normal replicates on either side of the bound."""

import helmscope as hs


def trial(case: hs.Case, mean: float) -> hs.Finding:
    x = mean + case.normal(case.count(128, quick=32), stream=0)
    null = hs.Check("mean -2", hs.Replicates(case.normal(len(x), stream=1) - 2))
    data = hs.curve("value", x[:, None], {"mean": [mean]}, label="value of a replicate")
    return hs.Finding(evidence=hs.Replicates(x), null=null, data=data)


@hs.experiment("planted-true")
def planted_true(case: hs.Case) -> hs.Finding:
    return trial(case, 0.6)


@hs.experiment("planted-false")
def planted_false(case: hs.Case) -> hs.Finding:
    return trial(case, -0.6)
