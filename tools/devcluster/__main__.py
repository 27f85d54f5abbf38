"""The command line: `python -m devcluster …`."""

import argparse
import sys

from devcluster import cli
from devcluster.host.errors import ClusterError


def main() -> int:
    """Run one command and return its exit status."""
    arguments: argparse.Namespace = cli.parser().parse_args()
    try:
        arguments.run(arguments)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again, or down to remove what there is", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
