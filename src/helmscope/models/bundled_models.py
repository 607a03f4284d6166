"""The bundled models: small models trained for this package and installed with it, so that nothing is downloaded.

    A, B    GPT-2, 12 layers of width 192; trained on the same stories with the same tokenizer, different seeds
    tied    ALBERT: one post-norm block called 24 times, full attention; trained to fill gaps in the same stories

Their model cards are stored next to their weights; ``training/`` in the repository trained them. A sibling of A (same
recipe, another seed) was measured during its training; its measurements are installed, its weights are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.types import as_measurement, check_name

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from numpy.typing import NDArray

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
MODELS = ("A", "B", "tied")
FIRST = MODELS[0]


def bundled_folder(model: str) -> Path:
    """The folder of a bundled model, in the layout of transformers, with its model card README.md.

    ``model`` is "A", "B" or "tied"; any other name raises ``HelmscopeError``.

    >>> sorted(path.name for path in bundled_folder("A").iterdir())[:2]
    ['README.md', 'config.json']
    """
    return BUNDLED_FOLDER / check_name("model", str(model), MODELS)


def is_bundled(model: object) -> bool:
    """Whether ``model`` is the name of a bundled model; ``Path("A")`` is a folder, not a name.

    >>> is_bundled("A"), is_bundled(Path("A"))
    (True, False)
    """
    return isinstance(model, str) and model in MODELS


def local_folder(model: str | Path) -> Path | None:
    """The folder of a bundled model or on this machine; None for a model on the Hub.

    >>> local_folder("A") == bundled_folder("A"), local_folder("no/such-model")
    (True, None)
    """
    folder = bundled_folder(str(model)) if is_bundled(model) else Path(model)
    try:
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # not a valid file name
        return None


def story_texts() -> list[str]:
    """The bundled texts: 128 texts of 128 tokens each, at most four of which share their first token.

    Each begins at a random sentence start of a story that no bundled model was trained on. The stories were
    sampled from stories15M of llama2.c (MIT), which was trained on TinyStories (Eldan and Li 2023, arXiv:2305.07759);
    they come under the license of this package.

    >>> len(story_texts())
    128
    """
    texts: list[str] = json.loads((BUNDLED_FOLDER / "texts.json").read_text(encoding="utf-8"))
    return texts


def held_out_texts() -> list[str]:
    """The held-out texts: 128 others of 128 tokens each, on which published verdicts are based.

    They were drawn once from the validation windows, with at least 32 distinct first tokens in each half. Regions and
    experiments are developed on ``story_texts``, so that none was chosen by looking at these.

    >>> len(held_out_texts()), set(held_out_texts()) & set(story_texts())
    (128, set())
    """
    texts: list[str] = json.loads((BUNDLED_FOLDER / "held_out.json").read_text(encoding="utf-8"))
    return texts


def validation_contexts() -> NDArray[np.int64]:
    """Token ids (768, 128) of further stories, contexts in which words occur: the validation windows in two halves of
    128 tokens each, without the windows from which a held-out text was taken.

    >>> validation_contexts().shape
    (768, 128)
    """
    import numpy as np
    from tokenizers import Tokenizer

    windows = np.load(BUNDLED_FOLDER / "validation.npy").astype(np.int64)
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / FIRST / "tokenizer.json"))
    # the first token of a text may be encoded differently without the space before it
    held_out = {tuple(tokenizer.encode(text).ids[1:]) for text in held_out_texts()}
    length = len(next(iter(held_out)))
    used = [
        any(tuple(row[k : k + length]) in held_out for k in range(len(row) - length + 1)) for row in windows.tolist()
    ]
    kept = windows[~np.array(used)]
    return np.ascontiguousarray(np.concatenate([kept[:, :128], kept[:, 128:256]]))


def training_history(model: str) -> xr.Dataset:
    """Measurements of a bundled model during its training, at twelve steps evenly spaced in their logarithm.

    The Dataset has coherence and alignment of the MLPs' weights, gate sparsity, radius, attention entropy and
    clustering per layer, on the bundled texts, and the losses. In model tied the weights are those of the one block
    that all layers call, along ``block``. ``model`` is "A", "B" or "tied"; any other name
    raises ``HelmscopeError``.

    >>> dict(training_history("tied").sizes)["layer"]
    24
    """
    import xarray as xr

    with xr.open_dataset(
        BUNDLED_FOLDER / "training.nc", group=check_name("model", str(model), MODELS), engine="h5netcdf"
    ) as file:
        return as_measurement(file.load())


def ablated_training_history() -> xr.Dataset:
    """What attention and MLPs do to the tokens while a model is trained: measurements of a sibling of model A (same
    recipe, another seed) at sixteen steps of its training.

    The sibling is trained whole. At each step it is measured in four arms, by ablation: the whole model, attention
    alone (every MLP writes 0), MLP alone (attention writes 0), and neither. ``training_history`` has models A, B and
    tied, whole only.

    By arm, depth (every half-layer) and prompt (64 bundled texts), on the theory's sphere and without the first
    token: ``aligned_pair_share``, the share of inner products above 0.8, 0.9 and 0.99, and their mean,
    ``mean_inner_product``, over pairs of different token ids at least 16 positions apart; ``participation_ratio`` and
    ``effective_rank``; ``collapse_residual_frobenius``, the relative distance to the mean token. By arm:
    ``validation_loss``. Of the whole model, by layer and prompt: ``antisymmetric_share`` (the antisymmetric share of
    the MLP's Jacobian), ``gate_sparsity`` (pre-activations below 0) and ``closed_gate_share`` (GELU derivatives below
    0.1); by layer ``coherence_max``, ``coherence_mean`` and ``neuron_alignment_mean`` of the MLP's weights. Most values
    are rounded, to their attribute ``rounded_to``. The attributes of the Dataset have the seed, the final loss,
    versions and definitions.

    >>> history = ablated_training_history()
    >>> at_the_end = history.aligned_pair_share.sel(step=8000, level=0.9).isel(depth=-1).mean("prompt")
    >>> bool(at_the_end.sel(arm="attention alone") > 100 * at_the_end.sel(arm="whole model"))
    True
    """
    import xarray as xr

    with xr.open_dataset(BUNDLED_FOLDER / "sibling.nc", engine="h5netcdf") as file:
        return as_measurement(file.load())
