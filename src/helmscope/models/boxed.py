"""The models in the box, trained for this package: no network, no download.

    A, B    GPT-2 of 12 layers of width 192, the same stories and tokenizer, different seeds
    tied    ALBERT: one post-norm block called 24 times, full attention, filling gaps in the same stories

Their cards lie beside their weights; ``training/`` in the repository made them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.types import known_name

if TYPE_CHECKING:
    import xarray as xr

BOX = Path(__file__).parent / "box"
MODELS = ("A", "B", "tied")
FIRST = MODELS[0]


def box_folder(model: str) -> Path:
    """The folder of a model in the box, in the layout of transformers, with its card README.md.

    >>> sorted(path.name for path in box_folder("A").iterdir())[:2]
    ['README.md', 'config.json']
    """
    return BOX / known_name("model", str(model), MODELS)


def is_boxed(model: object) -> bool:
    """Whether a name is that of a model in the box. Path("A") is a folder, though its text is "A".

    >>> is_boxed("A"), is_boxed(Path("A"))
    (True, False)
    """
    return isinstance(model, str) and model in MODELS


def local_folder(model: str | Path) -> Path | None:
    """The folder that a name stands for, in the box or on this machine; None for a model on the Hub.

    >>> local_folder("A") == box_folder("A"), local_folder("no/such-model")
    (True, None)
    """
    folder = box_folder(str(model)) if is_boxed(model) else Path(model)
    try:
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # a name that no file could have
        return None


def box_texts() -> list[str]:
    """128 texts of 128 tokens each, no more than four with the same first token.

    Every one begins at a random sentence start of a story that no model in the box was trained on. The stories were
    sampled from stories15M of llama2.c (MIT), which was trained on TinyStories (Eldan and Li 2023, arXiv:2305.07759);
    they are free under the license of this package.

    >>> len(box_texts())
    128
    """
    found: list[str] = json.loads((BOX / "texts.json").read_text(encoding="utf-8"))
    return found


def training_history(model: str) -> xr.Dataset:
    """How the dynamics of a model in the box arose: at twelve training steps, spaced evenly in their logarithm,
    coherence and alignment of the MLPs' weights, gate sparsity, radius, attention entropy and clustering by layer, on
    the texts in the box; and the losses.

    >>> dict(training_history("tied").sizes)["layer"]
    24
    """
    import xarray as xr

    with xr.open_dataset(BOX / "training.nc", group=known_name("model", str(model), MODELS), engine="h5netcdf") as file:
        return file.load()
