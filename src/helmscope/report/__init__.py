"""A self-contained HTML report of claims and their verdicts. Needs the extra ``report``."""
