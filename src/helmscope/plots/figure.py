"""The figure type of all plots, which can be displayed in a notebook and saved to a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
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

FORMATS = (".png", ".svg", ".pdf")


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

        Equal figures give equal bytes, since the files contain no date. Raises HelmscopeError for any other suffix
        and for a folder that does not exist.
        """
        target = check_figure_path("path", path)
        # looked up on each call, so that a test can replace them
        encoders: dict[str, Callable[[Base], bytes]] = {".png": style.png, ".svg": style.svg, ".pdf": style.pdf}
        write_bytes(target, encoders[target.suffix.lower()](self))

    def _repr_png_(self) -> bytes:
        return style.png(self)


def check_figure_path(name: str, path: str | os.PathLike[str]) -> Path:
    """``path`` as a Path; raises HelmscopeError, which names the argument ``name``, unless a figure can be saved under
    this name.

    >>> check_figure_path("plot", "phase.pdf").suffix
    '.pdf'
    """
    target = as_path(name, path)
    if target.suffix.lower() not in FORMATS:
        raise HelmscopeError(f"{name} is '{target}', but it must end in one of {', '.join(FORMATS)}")
    if not target.parent.exists():
        raise HelmscopeError(f"{name} is '{target}', but there is no folder '{target.parent}': create it first")
    return target
