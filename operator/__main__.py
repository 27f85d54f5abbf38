"""`python -m specdecode_operator` is `specdecode`."""

from specdecode_operator.cli.main import main

main()
