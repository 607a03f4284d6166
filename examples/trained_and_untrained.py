"""Do the tokens of a trained model cluster with depth, and those of untrained twins? python trained_and_untrained.py"""

import helmscope as hs

texts = [text[:200] for text in hs.models.story_texts()[:8]]


def similarity(model):
    """Mean inner product of the tokens of a text, by depth in half-layers."""
    path = hs.record(model, texts).trajectory
    return hs.mean_inner_product(path.states, weights=path.weights).mean(-1)


trained = similarity("A")
twins = [similarity(hs.models.untrained_twin("A", seed=seed)) for seed in (1, 2)]
print("depth  trained  untrained twins")
for depth in range(0, len(trained), 4):
    print(f"{depth:5d}  {trained[depth]:7.3f}  " + "  ".join(f"{twin[depth]:.3f}" for twin in twins))
