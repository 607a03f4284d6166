"""Checks of plain arguments: each gives the value in its plain form, or refuses it by name."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence

from helmscope.types.errors import HelmscopeError

MOST_OFFERED = 24  # names in a sentence that already offers one


def real_number(name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """``value`` as a finite float within its bound, or a ``HelmscopeError`` that names the argument.

    >>> real_number("beta", 4)
    4.0
    """
    bound = f" >= {at_least:g}" if at_least > -math.inf else f" > {above:g}" if above > -math.inf else ""
    try:
        number = math.nan if _is_not_numeric(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < at_least or number <= above:
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a finite number{bound}")
    return number


def whole_number(name: str, value: object, *, at_least: int, below: int = 2**63) -> int:
    """``value`` as an int of at least ``at_least`` and below a power of 2, or a ``HelmscopeError`` that names the
    argument; 2^63 is where the sizes of tensors end.

    >>> whole_number("n", 32, at_least=1)
    32
    """
    try:
        number = int(value)  # type: ignore[call-overload]
        exact = not _is_not_numeric(value) and bool(number == value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number, exact = 0, False
    if not exact or number < at_least:
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a whole number >= {at_least}")
    if number >= below:
        power = below.bit_length() - 1
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a whole number below 2^{power} = {below}")
    return int(number)


def seed_number(value: object) -> int:
    """``value`` as a seed, 0 .. 2^32 - 1, or a ``HelmscopeError``.

    >>> seed_number(7)
    7
    """
    return whole_number("seed", value, at_least=0, below=2**32)


def fits_memory(given: str, numbers: int) -> None:
    """Refuse to make so many numbers of 8 bytes if this machine cannot hold them; ``given`` begins the sentence.

    >>> fits_memory("n is 10^9 and dim is 10^9", 10**18)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: n is 10^9 and dim is 10^9, but that makes 8e+09 GB, and this machine has ... GB
    """
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * numbers > most:
        needed, there = (f"{size / 1e9:.3g} GB" for size in (8 * numbers, most))
        raise HelmscopeError(f"{given}, but that makes {needed}, and this machine has {there}")


def _is_not_numeric(value: object) -> bool:
    """True and False, of Python, NumPy or torch, and text: float() takes them, a reader would not."""
    return isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", ""))


def increasing_times(times: object) -> list[float]:
    """``times`` as floats: at least one, finite, not negative, strictly increasing; else a ``HelmscopeError``.

    >>> increasing_times([1, 5, 10])
    [1.0, 5.0, 10.0]
    """
    values = times.tolist() if hasattr(times, "tolist") else times
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise HelmscopeError(
            f"times is {shown(times)}, but it must be a sequence of at least one time, such as [1, 5, 10]"
        )
    checked = [real_number(f"times[{i}]", t, at_least=0) for i, t in enumerate(values)]
    for i in range(1, len(checked)):
        if checked[i] <= checked[i - 1]:
            raise HelmscopeError(f"times[{i}] is {checked[i]:g} after {checked[i - 1]:g}, but times must increase")
    return checked


def known_name(what: str, name: str, allowed: Iterable[str]) -> str:
    """``name`` if it is allowed, or a ``HelmscopeError`` that offers the nearest one, and the others unless they are
    many.

    >>> known_name("field", "sa", ["sa", "usa"])
    'sa'
    """
    names = sorted(allowed)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else "there is no such name."
    if near and len(names) > MOST_OFFERED:
        raise HelmscopeError(f"unknown {what} '{name}': {hint}")
    raise HelmscopeError(f"unknown {what} '{name}': {hint} Allowed: {', '.join(names)}")


def counted(count: int, noun: str) -> str:
    """A number of things, in the singular or the plural.

    >>> counted(1, "text"), counted(2048, "text")
    ('1 text', '2048 texts')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shown(value: object) -> str:
    """``value`` as an error shows it: its repr on one line, cut to 80 characters.

    >>> shown([1.0, 2.0]), shown(10**5000)
    ('[1.0, 2.0]', 'a whole number of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 14_000:  # Python writes out no int of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
