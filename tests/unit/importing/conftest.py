"""Tests of migration ask the command line, too."""

from tests.unit.cli.conftest import specdecode, write

__all__ = ["specdecode", "write"]
