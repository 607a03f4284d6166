"""How a sum over tokens is computed. Fields say what to sum; only this room decides how."""
