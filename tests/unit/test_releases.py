"""An upgrade of the operator restarts no engine of which CHANGELOG does not say so."""

import copy
import re

import pytest

from tests.support.golden import EXAMPLES, ROOT, ours_in
from tests.support.objects import Body
from tests.support.releases import RESTARTS, announced, made_now, releases, restarting_fields, snapshot, taken_now

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
OBJECTS = [
    pytest.param(release, entry, id=f"{release} {entry['object']['metadata']['name']}")
    for release in releases()
    for entry in snapshot(release)
]


def test_snapshots_of_earlier_releases_exist() -> None:
    assert OBJECTS


@pytest.mark.parametrize(("release", "before"), OBJECTS)
def test_children_of_an_earlier_release_keep_their_names(release: str, before: Body) -> None:
    """Except for Jobs that read or download models: their names end with a digest of the script that they run.

    An upgrade starts none of them again, because what they found is stored.
    """
    now = made_now(before, snapshot(release))["children"]
    assert {_without_digest(name) for name in before["children"]} <= {_without_digest(name) for name in now}


def _without_digest(name: str) -> str:
    return re.sub(r"^(Job/.*-(?:model|facts))-[0-9a-f]{4}$", r"\1", name)


@pytest.mark.parametrize(("release", "before"), OBJECTS)
def test_upgrade_restarts_engines_only_where_the_changelog_says_so(release: str, before: Body) -> None:
    fields = restarting_fields(before, made_now(before, snapshot(release)))
    known = announced(CHANGELOG, release)
    silent = sorted(field for field in fields if not any(pattern.fullmatch(field) for pattern in known))
    assert silent == [], f"undo it, or say in CHANGELOG, under {RESTARTS}, whose engines restart and why"


@pytest.mark.parametrize(("name", "file"), [("llama-70b", "llama-70b"), ("llama-70b-bursts", "capture-llama-70b")])
def test_object_with_stored_defaults_renders_like_the_example(name: str, file: str) -> None:
    """Or a snapshot would tell differences that an upgrade does not make."""
    today = taken_now()
    entry = next(each for each in today if each["object"]["metadata"]["name"] == name)
    assert (
        entry["object"]["spec"]
        != next(body for body in ours_in(EXAMPLES / f"{file}.yaml") if body["metadata"]["name"] == name)["spec"]
    )
    assert made_now(entry, today) == entry


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda pod: pod["spec"]["containers"][0].update(image="another"), "spec.containers[engine].image"),
        (lambda pod: pod["metadata"]["annotations"].update(new="x" * 1000), "metadata.annotations.new"),
        (lambda pod: pod["spec"].pop("volumes"), "spec.volumes"),
    ],
)
def test_changed_pod_template_is_reported_by_field(change: object, field: str) -> None:
    before = next(entry for entry in taken_now() if entry["podTemplates"])
    after = copy.deepcopy(before)
    for template in after["podTemplates"].values():
        assert callable(change)
        change(template["serving"])
    assert restarting_fields(before, after) == {field}


def test_only_restarts_announced_after_a_release_count_for_it() -> None:
    changelog = f"""## [Unreleased]
{RESTARTS}
- All: `spec.containers[*].image`.
### Added
- `spec.volumes`
## [0.2.0]
{RESTARTS}
- `metadata.annotations.one`
## [0.1.0]
{RESTARTS}
- `metadata.annotations.other`
"""
    fields = ("spec.containers[engine].image", "spec.volumes", "metadata.annotations.one", "metadata.annotations.other")

    def told(release: str) -> list[bool]:
        return [any(each.fullmatch(field) for each in announced(changelog, release)) for field in fields]

    assert told("0.2.0") == [True, False, False, False]
    assert told("0.1.0") == [True, False, True, False]
    assert told("0.1.0-dev") == [True, False, True, True]
