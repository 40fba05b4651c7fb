"""`python -m redraft.cli`."""

from redraft.cli.command import main

main()
