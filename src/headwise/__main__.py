"""`python -m headwise`: the command line."""

from headwise.cli import main

main()
