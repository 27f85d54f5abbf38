"""Which claims of captures would find a StorageClass."""

from specdecode_operator.cluster.storage_classes import StorageClasses
from tests.support.objects import Body


def storage_class(name: str, *, default: bool = False, mode: str | None = None) -> Body:
    annotations = {"storageclass.kubernetes.io/is-default-class": str(default).lower()}
    return {"metadata": {"name": name, "annotations": annotations}} | ({"volumeBindingMode": mode} if mode else {})


CLASSES = StorageClasses.of([storage_class("b", mode="WaitForFirstConsumer"), storage_class("a", default=True)])


def test_one_that_exists_lacks_nothing() -> None:
    assert CLASSES.missing("b") is None
    assert CLASSES.missing(None) is None


def test_one_that_does_not_is_told_with_those_that_do() -> None:
    assert CLASSES.missing("c") == "there is no StorageClass c (the cluster has a, b)"
    assert StorageClasses.of([]).missing("c") == "there is no StorageClass c (the cluster has none)"


def test_without_a_name_it_is_the_default_that_counts() -> None:
    assert "no default StorageClass" in str(StorageClasses.of([storage_class("a")]).missing(None))


def test_how_a_claim_is_bound() -> None:
    assert CLASSES.binds_at_once("a")
    assert CLASSES.binds_at_once(None)
    assert not CLASSES.binds_at_once("b")
