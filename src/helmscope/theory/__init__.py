"""Closed-form theory: random initial states (``starts``), the equiangular flow and its hitting times
(``equiangular``), the lifetime of two clusters (``metastable``), the extreme energies (``energy``) and probabilities
for random initial states (``probability``), all from source 001, "A mathematical perspective on Transformers".
"""
