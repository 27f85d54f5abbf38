"""Build what pods on a development cluster run: `python -m devcluster.images WHAT`.

Prints the path of what was made (an image archive or a directory) on standard output.
"""

import argparse
import sys

from devcluster.host.errors import exit_status
from devcluster.images.engine_environment import install_engine_environment
from devcluster.images.engine_image import build_engine_image
from devcluster.images.operator_image import build_operator_image
from devcluster.images.trainer_image import build_trainer_image, install_trainer_packages

MAKERS = {
    "operator": build_operator_image,
    "engine-cpu": build_engine_image,
    "engine-env": install_engine_environment,
    "trainer-cpu": build_trainer_image,
    "trainer-packages": install_trainer_packages,
}


def main() -> int:
    """Make what the command line names and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.images", description=__doc__)
    parser.add_argument("what", choices=MAKERS, nargs="+")
    wanted = parser.parse_args().what
    return exit_status(lambda: [print(MAKERS[what]()) for what in wanted])


if __name__ == "__main__":
    sys.exit(main())
