"""The figure that every picture here is drawn on: it shows itself in a notebook, and saves itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from helmscope.plots import style
from helmscope.store.atomic import as_path, write_bytes
from helmscope.types import HelmscopeError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Base
else:
    try:
        from matplotlib.figure import Figure as Base
    except ImportError:
        raise MissingExtra("matplotlib", "report") from None


class Figure(Base):
    """A matplotlib figure that belongs to no window and to no pyplot, so that a notebook shows it exactly once.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from helmscope.plots.style import new_figure
    >>> figure, (panel,) = new_figure(1, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     figure.save(Path(folder, "picture.pdf"))
    ...     Path(folder, "picture.pdf").read_bytes()[:4]
    b'%PDF'
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the figure as PNG, SVG or PDF, whichever ``path`` ends in, whole or not at all.

        The same figure gives the same bytes: no file holds a date. Any other ending is refused.
        """
        target = as_path("path", path)
        # looked up when they are needed, so that a test can put another one in their place
        encoders: dict[str, Callable[[Base], bytes]] = {".png": style.png, ".svg": style.svg, ".pdf": style.pdf}
        encode = encoders.get(target.suffix.lower())
        if encode is None:
            raise HelmscopeError(f"path is '{target}', but a picture is saved as one of {', '.join(encoders)}")
        write_bytes(target, encode(self))

    def _repr_png_(self) -> bytes:
        return style.png(self)
