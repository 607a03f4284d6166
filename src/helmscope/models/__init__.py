"""Real transformers: load, record, find the residual topology, certify, continue."""
