"""The library transformers: an extra that may be missing, and talks a lot while it loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helmscope.types import MissingExtra


def transformers_library() -> Any:
    """The package, or the sentence that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "models") from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers draws no progress bar and reports nothing of a load: it is judged here. Then as before."""
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
