"""Two claims whose truth is planted: normal replicates on either side of the bound."""

import helmscope as hs


def trial(case: hs.claims.TrialCase, mean: float) -> hs.claims.Finding:
    x = mean + case.normal(case.count(128, quick=32), index=0)
    null = hs.claims.Replicates(case.normal(len(x), index=1) - 2)
    data = hs.claims.curve("value", x[:, None], {"mean": [mean]}, label="value of a replicate")
    return hs.claims.Finding(evidence=hs.claims.Replicates(x), controls={"mean -2": null}, data=data)


@hs.claims.experiment("planted-true")
def planted_true(case: hs.claims.TrialCase) -> hs.claims.Finding:
    return trial(case, 0.6)


@hs.claims.experiment("planted-false")
def planted_false(case: hs.claims.TrialCase) -> hs.claims.Finding:
    return trial(case, -0.6)
