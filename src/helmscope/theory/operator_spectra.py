"""Closed forms of how operators on tokens change the spectrum of what they act on: averaging, lazy averaging, softmax
of noise, and retrieval at random ([Additive transport], Section 9.3; none of them is printed there).

For an operator A on T tokens that is applied k times to X = I, with the singular values s_1 >= ... >= s_T of A^k,

    retention  =  |A^k|_* / |I|_*  =  (s_1 + ... + s_T) / T,        condition  =  s_1 / s_T.

A retention of 1 does not make an isometry: diag(1.5, 0.5) has it, with condition 3. Both are 1 for orthogonal A, whose
retention is 1 for any X, since the nuclear norm does not change under orthogonal maps.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gamma

from helmscope.types import HelmscopeError, check_integer, check_real

TERMS = 4096  # of the law of the number of queries, whose tail has the rate 2 / k
MOST_APPLICATIONS = 64  # the tail beyond TERMS is then below e^-128


def averaging_retention(tokens: int) -> float:
    """Retention 1/T of A = 11^T / T, which is its own power: the same for all k. Its condition is infinite for T > 1.

    >>> averaging_retention(4)
    0.25
    """
    return 1 / check_integer("tokens", tokens, at_least=1)


def lazy_averaging_retention(tokens: int, laziness: float, *, applications: int = 1) -> float:
    """Retention (1 + (T - 1) (1 - l)^k) / T of A = (1 - l) I + l 11^T / T, 0 <= l <= 1.

    >>> lazy_averaging_retention(4, 0.5)
    0.625
    """
    tokens, kept = check_integer("tokens", tokens, at_least=1), _kept(laziness, applications)
    return (1 + (tokens - 1) * kept) / tokens


def lazy_averaging_condition_number(laziness: float, *, applications: int = 1) -> float:
    """Condition (1 - l)^-k of A = (1 - l) I + l 11^T / T for T > 1; infinite for l = 1.

    >>> lazy_averaging_condition_number(0.5)
    2.0
    """
    kept = _kept(laziness, applications)
    return 1 / kept if kept > 0 else math.inf


def _kept(laziness: float, applications: int) -> float:
    share = check_real("laziness", laziness, at_least=0)
    if share > 1:
        raise HelmscopeError(f"laziness is {share:g}, but it must be between 0 and 1")
    return float((1 - share) ** check_integer("applications", applications, at_least=1))


def softmax_retention(tokens: int, *, applications: int = 1) -> float:
    """Retention, to leading order in T, of A = softmax(G) by rows with independent standard normal G:

        k = 1:  (8 / (3 pi)) sqrt((e - 1) / T),      k = 2:  (1 + (3/4) (e - 1)) / T,      k > 2:  1 / T.

    A is 11^T / T plus noise of variance (e - 1) / T^2 per entry. The first has one singular value, near 1. Those of the
    k-th power of the noise follow the Fuss-Catalan law, whose mean adds

        ((e - 1) / T)^{k/2} Gamma((k + 3) / 2) / (Gamma(3/2) Gamma(k/2 + 2))

    to the retention; of the two terms the one of leading order is kept. The law of powers: Alexeev, Goetze &
    Tikhomirov, Asymptotic distribution of singular values of powers of random matrices, Lithuanian Math. J. 50 (2010).

    >>> round(softmax_retention(512), 5)
    0.04917
    """
    tokens = check_integer("tokens", tokens, at_least=1)
    k = check_integer("applications", applications, at_least=1)
    noise = ((math.e - 1) / tokens) ** (k / 2) * gamma((k + 3) / 2) / (gamma(1.5) * gamma(k / 2 + 2))
    return float(noise if k == 1 else noise + 1 / tokens if k == 2 else 1 / tokens)


def softmax_condition_number_quantile(tokens: int, level: float) -> float:
    """The quantile at ``level`` of the condition number of A = softmax(G), to leading order in T:

        kappa = T^{3/2} / (sqrt(e - 1) xi),    P(xi <= x) = 1 - exp(-x - x^2 / 2),

    that is kappa_q = T^{3/2} / (sqrt(e - 1) (sqrt(1 - 2 ln q) - 1)), where xi/T is the smallest singular value of the
    noise (Edelman, Eigenvalues and condition numbers of random matrices, SIAM J. Matrix Anal. Appl. 9, 1988). The law
    has no mean: single values of kappa say nothing, its logarithm has quantiles.

    >>> round(softmax_condition_number_quantile(128, 0.5))  # the median
    2028
    """
    tokens, level = check_integer("tokens", tokens, at_least=1), check_real("level", level, above=0)
    if level >= 1:
        raise HelmscopeError(f"level is {level:g}, but it must be above 0 and below 1")
    smallest = math.sqrt(1 - 2 * math.log(level)) - 1
    return float(tokens**1.5 / (math.sqrt(math.e - 1) * smallest))


def retrieval_rank_share(*, applications: int = 1) -> float:
    """Limit of rank(A^k) / T for an A whose rows are unit vectors at random: 1 - t_k with t_0 = 0, t_{j+1} = e^{t_j -
    1}.

    The rank is the number of tokens that are still retrieved; 1 - 1/e for k = 1. Source: Flajolet & Odlyzko, Random
    mapping statistics, EUROCRYPT 1989.

    >>> retrieval_rank_share()
    0.6321205588285577
    """
    lost = 0.0
    for _ in range(check_integer("applications", applications, at_least=1)):
        lost = math.exp(lost - 1)
    return 1 - lost


def retrieval_retention(*, applications: int = 1) -> float:
    """Limit of the retention of an A whose rows are unit vectors at random: E sqrt Z_k, with Z_k the size of the k-th
    generation of a branching process with Poisson(1) offspring, the number of queries that retrieve a token.

    The singular values of A^k are the square roots of these numbers. For k = 1 it is E sqrt(Poisson(1)). Computed from
    the k-fold generating function e^{z - 1}, on the unit circle; k at most 64.

    >>> round(retrieval_retention(), 12)
    0.773192656379
    """
    k = check_integer("applications", applications, at_least=1)
    if k > MOST_APPLICATIONS:
        raise HelmscopeError(f"applications is {k}, but it must be at most {MOST_APPLICATIONS}")
    z = np.exp(2j * np.pi * np.arange(TERMS) / TERMS)
    for _ in range(k):
        z = np.exp(z - 1)
    law = np.fft.fft(z).real / TERMS
    return float((np.sqrt(np.arange(TERMS)) * law).sum())
