"""The charts of a release: those of the checkout with its image and its registry, the same bytes each time."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from devcluster import chart
from devcluster.host.errors import ClusterError
from devcluster.release.programs import run
from devcluster.release.record import Release

_EPOCH: Final = 315532800
"""Seconds since 1970 that stand for the time of everything: 1980, as in Containerfile, the first year of zip files."""


def package(release: Release, folder: Path) -> None:
    """Write the charts of a release into a folder."""
    with TemporaryDirectory(prefix="specdecode-charts-") as copies:
        for source in (chart.CHART, chart.CRDS):
            copy = Path(shutil.copytree(source, Path(copies) / source.name))
            for name, released in RELEASED[source.name].items():
                (copy / name).write_text(released((copy / name).read_text(), release))
            run("helm", "package", str(copy), f"--destination={folder}", SOURCE_DATE_EPOCH=str(_EPOCH))
            # Helm takes it for the time when the chart was made, and writes that with what it pushes.
            os.utime(folder / release.chart(source.name), (_EPOCH, _EPOCH))


def with_image(values: str, release: Release) -> str:
    """Return the chart's values with the image of a release, by its digest."""
    lines = {
        '  repository: ""\n': f"  repository: {release.repository}\n",
        '  digest: ""\n': f"  digest: {release.digest}\n",
    }
    return _replaced(values, lines)


def with_charts(notes: str, release: Release) -> str:
    """Return what Helm tells after an installation, with charts of the registry in place of those of a checkout."""
    # Such a chart has its image; that of a checkout is told where one lies.
    notes = re.sub(r" \\\n +--set image\.repository=.+$", "", notes, flags=re.MULTILINE)
    lines = {
        name: f"oci://{release.registry}/{name} --version {release.version}"
        for name in (f"charts/{source.name}" for source in (chart.CHART, chart.CRDS))
        if name in notes
    }
    return _replaced(notes, lines)


def with_images(metadata: str, release: Release) -> str:
    """Return `Chart.yaml` with the repository and the image of a release. Artifact Hub scans this image."""
    source = f"home: {release.source}\nsources: [{release.source}]\n" if release.source else ""
    image = f"  artifacthub.io/images: |\n    - name: operator\n      image: {release.image}\n"
    return _replaced(metadata, {"annotations:\n": f"{source}annotations:\n{image}"})


RELEASED: Final[Mapping[str, Mapping[str, Callable[[str, Release], str]]]] = {
    chart.CHART.name: {
        "Chart.yaml": with_images,
        "values.yaml": with_image,
        "templates/NOTES.txt": with_charts,
    },
    chart.CRDS.name: {"templates/NOTES.txt": with_charts},
}
"""Files of each chart that are others in a release, and how they come about."""


def _replaced(text: str, changes: Mapping[str, str]) -> str:
    for before, after in changes.items():
        if text.count(before) != 1:
            raise ClusterError(f"charts/: {before.strip()!r} stands {text.count(before)} times in a file, and not once")
        text = text.replace(before, after)
    return text
