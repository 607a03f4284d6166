"""The errors of the package."""

from __future__ import annotations


class HelmscopeError(ValueError):
    """Every refusal of bad input: one sentence that names the argument, the value and what is allowed.

    >>> issubclass(HelmscopeError, ValueError)
    True
    """

    __module__ = "helmscope.types"  # the name that tracebacks show is the one to import it by


class MissingExtra(HelmscopeError):
    """An optional dependency is not installed; the sentence holds the pip line that brings it.

    >>> str(MissingExtra("plotly", "report"))
    "plotly is not installed, and this needs it: pip install 'helmscope[report]', in a clone '.[report]'"
    """

    __module__ = "helmscope.types"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed, and this needs it: pip install 'helmscope[{extra}]', in a clone '.[{extra}]'"
        )
