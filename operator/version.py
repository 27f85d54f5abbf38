"""Version of the operator, the CLI and the images, kept in one place."""

__version__ = "0.1.0"
