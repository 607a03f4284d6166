"""Claims on trial: every statement of the theory as an entry with a region frozen before its first run."""
