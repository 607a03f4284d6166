"""The errors of the package."""

from __future__ import annotations


class HelmscopeError(ValueError):
    """Raised for every bad value; the message is one sentence that names the argument, its value and what is allowed.

    >>> issubclass(HelmscopeError, ValueError)
    True
    """

    __module__ = "helmscope.types"  # so that tracebacks show where to import it from


class MissingExtra(HelmscopeError):
    """Raised when an optional dependency is not installed; the message holds the pip command that installs it.

    >>> str(MissingExtra("plotly", "report"))
    "plotly is not installed, and this needs it: pip install 'helmscope[report]', in a clone '.[report]'"
    """

    __module__ = "helmscope.types"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed, and this needs it: pip install 'helmscope[{extra}]', in a clone '.[{extra}]'"
        )
