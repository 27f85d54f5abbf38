"""How much sizing remembers of what it has worked out."""

from typing import Final

MOST_REMEMBERED: Final = 512
"""Answers that each function keeps, the last asked: a plan takes some twenty, and the operator does not grow for ever.

A model's config, of at most a megabyte, comes to half a megabyte: 512 of them leave room under the chart's limit.
"""
