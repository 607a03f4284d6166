"""What can be read off tokens and systems: pure functions, one quantity one file.

Functions of tokens take (*batch, n, d) and reduce the last two axes; ``track`` turns them into Measurements over time.
"""
