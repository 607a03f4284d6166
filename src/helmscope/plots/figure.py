"""The figure type of all plots, which can be displayed in a notebook and saved to a file."""

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
    """A matplotlib figure that is not managed by pyplot, so that a notebook displays it exactly once.

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
        """Writes the figure as PNG, SVG or PDF, selected by the suffix of ``path``, atomically.

        Equal figures give equal bytes, since the files contain no date. Raises HelmscopeError for any other suffix.
        """
        target = as_path("path", path)
        # looked up on each call, so that a test can replace them
        encoders: dict[str, Callable[[Base], bytes]] = {".png": style.png, ".svg": style.svg, ".pdf": style.pdf}
        encode = encoders.get(target.suffix.lower())
        if encode is None:
            raise HelmscopeError(f"path is '{target}', but it must end in one of {', '.join(encoders)}")
        write_bytes(target, encode(self))

    def _repr_png_(self) -> bytes:
        return style.png(self)
