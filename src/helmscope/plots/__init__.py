"""Objects and Measurements as figures, in one style. Needs the extra ``report``."""
