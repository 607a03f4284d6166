"""From a field and a start to a Simulation: steppers (one file each, each states its order) and ``integrate``."""
