"""Verdicts as one HTML file that needs nothing else. Needs the extra ``report``."""
