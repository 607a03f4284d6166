"""Checks of plain arguments: each returns the converted value or raises a ``HelmscopeError`` naming the argument."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence

from helmscope.types.errors import HelmscopeError
from helmscope.types.similar import close_names, containing_names, similar_names

FEW_NAMES = 16  # up to this many allowed names are listed, even if one is close
NEAREST = 5  # of more names, this many are listed
SIMILAR = 0.4  # share of equal letters from which a name is listed


def check_real(name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """``value`` as a finite float within its bound; raises a ``HelmscopeError`` that names the argument otherwise.

    >>> check_real("beta", 4)
    4.0
    """
    bound = f" >= {at_least:g}" if at_least > -math.inf else f" > {above:g}" if above > -math.inf else ""
    try:
        number = math.nan if _is_not_numeric(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < at_least or number <= above:
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a finite number{bound}")
    return number


def check_integer(name: str, value: object, *, at_least: int, below: int = 2**63) -> int:
    """``value`` as an int in [``at_least``, ``below``); raises a ``HelmscopeError`` that names the argument otherwise.

    ``below`` must be a power of 2; the default 2^63 is the limit for sizes of tensors.

    >>> check_integer("n", 32, at_least=1)
    32
    """
    try:
        number = int(value)  # type: ignore[call-overload]
        exact = not _is_not_numeric(value) and bool(number == value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number, exact = 0, False
    if not exact or number < at_least:
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a whole number >= {at_least}")
    if number >= below:
        power = below.bit_length() - 1
        raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a whole number below 2^{power} = {below}")
    return int(number)


def check_seed(value: object) -> int:
    """``value`` as a seed, 0 to 2^32 - 1; raises ``HelmscopeError`` otherwise.

    >>> check_seed(7)
    7
    """
    return check_integer("seed", value, at_least=0, below=2**32)


def check_memory(arguments: str, count: int) -> None:
    """Raise ``HelmscopeError`` if this machine's memory cannot hold ``count`` 8-byte numbers; ``arguments``, such
    as "n is 10", names the arguments that determine the count and begins the error message.

    >>> check_memory("n is 10^9 and dim is 10^9", 10**18)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: n is 10^9 and dim is 10^9, but that makes 8e+09 GB, and this machine has ... GB
    """
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * count > most:
        needed, there = (f"{size / 1e9:.3g} GB" for size in (8 * count, most))
        raise HelmscopeError(f"{arguments}, but that makes {needed}, and this machine has {there}")


def _is_not_numeric(value: object) -> bool:
    """Whether a value is a bool of Python, NumPy or torch, or text: float() accepts these, but they are mistakes."""
    return isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", ""))


def check_times(times: object) -> list[float]:
    """``times`` as a list of floats; raises ``HelmscopeError`` unless there is at least one and they are finite,
    nonnegative and strictly increasing.

    >>> check_times([1, 5, 10])
    [1.0, 5.0, 10.0]
    """
    values = times.tolist() if hasattr(times, "tolist") else times
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise HelmscopeError(
            f"times is {short_repr(times)}, but it must be a sequence of at least one time, such as [1, 5, 10]"
        )
    checked = [check_real(f"times[{i}]", t, at_least=0) for i, t in enumerate(values)]
    for i in range(1, len(checked)):
        if checked[i] <= checked[i - 1]:
            raise HelmscopeError(f"times[{i}] is {checked[i]:g} after {checked[i - 1]:g}, but times must increase")
    return checked


def check_name(kind: str, name: str, allowed: Iterable[str], *, listed_by: str = "") -> str:
    """``name`` if it is allowed; raises ``HelmscopeError`` otherwise.

    The error suggests the closest allowed name. It lists all allowed names if there are few, and otherwise, unless one
    is close, up to five that are similar, and says how many there are, or which command ``listed_by`` prints them.

    >>> check_name("field", "sa", ["sa", "usa"])
    'sa'
    >>> check_name("field", "ssa", ["sa", "usa"])
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown field 'ssa': did you mean 'sa'? Allowed: sa, usa
    """
    names = sorted(allowed)
    if name in names:
        return name
    few = len(names) <= FEW_NAMES
    containing, close = containing_names(name, names), close_names(name, names)
    if few or len(containing) == 1:
        close = similar_names(name, names)
    listing = ", ".join(names)
    if close:
        hint = f": did you mean '{close[0]}'?{f' Allowed: {listing}' if few else ''}"
    elif few:
        hint = f"; allowed: {listing}"
    else:
        similar = similar_names(name, names, cutoff=SIMILAR, count=NEAREST)
        hint = f"; similar: {', '.join(similar)}" if similar else ""
        hint += f" ({listed_by} prints all {len(names)})" if listed_by else ""
        hint = hint or f"; {len(names)} are allowed"
    raise HelmscopeError(f"unknown {kind} '{name}'{hint}")


def pluralized(number: int, noun: str) -> str:
    """A count with its noun in the singular or the plural.

    >>> pluralized(1, "text"), pluralized(2, "text"), pluralized(1024, "system")
    ('1 text', '2 texts', '1,024 systems')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_repr(value: object) -> str:
    """``value`` as error messages print it: its repr on one line, cut to 80 characters.

    >>> short_repr([1.0, 2.0]), short_repr(10**5000)
    ('[1.0, 2.0]', 'a whole number of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 14_000:  # Python does not print ints of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def type_with_article(value: object) -> str:
    """The name of a value's type with its indefinite article, for error messages.

    >>> type_with_article(3), type_with_article("text"), type_with_article(None)
    ('an int', 'a str', 'a NoneType')
    """
    name = type(value).__name__
    # by sound: vowels other than u (a Unit), ndarray, and acronyms such as MLP or RK4
    return f"{'an' if re.match('[AEIOaeio]|nd|[FHLMNRSX][A-Z]', name) else 'a'} {name}"


def record_first(model: object) -> str:
    """What to do with the name of a model where a recording is expected, as the end of a message; "" for anything else.

    >>> record_first("A"), record_first(3)
    (": record a model first, hs.record('A')", '')
    """
    return f": record a model first, hs.record({short_repr(model)})" if isinstance(model, str) else ""
