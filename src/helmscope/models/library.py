"""Access to the transformers library, an optional dependency, and a way to silence its output."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helmscope.types import MissingExtra


def transformers_library() -> Any:
    """The transformers package; raises ``MissingExtra`` if it is not installed."""
    imported = sys.modules.get("transformers")
    if imported is not None:
        return imported
    with warnings.catch_warnings():
        # in a notebook without ipywidgets, tqdm warns about a bar that is not drawn
        warnings.filterwarnings("ignore", message="IProgress not found")
        try:
            importlib.import_module("tqdm.auto")  # transformers may import it later, outside of this filter
            import transformers
        except ImportError as error:
            raise MissingExtra("transformers", "models") from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: within it, transformers shows no progress bars and logs errors only.

    What it would report about a load is checked and raised here instead.
    """
    logging = transformers_library().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
