"""Edits of a model's forward pass, which leave the model itself unchanged."""
