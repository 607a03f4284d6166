"""The experiments, one file a claim; each registers itself by the claim's id and is found without a list."""
