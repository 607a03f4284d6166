"""``python -m helmscope``: the command line."""

from helmscope.cli import main

main()
