"""Right-hand sides: a field is a callable that gives every token its tangent velocity."""
