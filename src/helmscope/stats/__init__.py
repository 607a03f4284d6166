"""Statistics: numbers in, ``Interval`` out. Intervals, scales, paired tests, jackknife, Holm, rulings, power; no torch.

Replicates are prompts or seeds, never tokens of one prompt. An interval is computed on the scale where replicates are
closest to normal (``Log`` for positive quantities, ``FisherZ`` for cosines) and mapped back, so what it covers is the
mean on that scale: the geometric mean under ``Log``, tanh E artanh c under ``FisherZ``. ``Bounded`` cuts the interval
of a quantity that has known bounds, such as a share. Student t is the default; ``bootstrap_t`` is for skewed replicates
that no scale makes symmetric.
"""
