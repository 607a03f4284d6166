"""What is known in closed form: how tokens start (``starts``), the equiangular flow and its hitting times
(``equiangular``), how long two clusters last (``metastable``), the extreme energies (``energy``) and the chances of a
random start (``probability``). All of it is source 001, "A mathematical perspective on Transformers".
"""
