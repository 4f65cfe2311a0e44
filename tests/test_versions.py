"""What depends on the version of a package: decided by the installed one."""

from collections.abc import Callable, Iterator
from importlib import metadata

import pytest

from titan_moe import versions
from titan_moe.versions import Difference, installed_release, release


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the version of the package `some`, the only one."""

    def find(package: str, version: str) -> str:
        if package != "some":
            raise metadata.PackageNotFoundError(package)
        return version

    installed_release.cache_clear()
    yield lambda version: monkeypatch.setattr(metadata, "version", lambda package: find(package, version))
    installed_release.cache_clear()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("0.2.3.dev1+cpu", (0, 2, 3)), ("3.10", (3, 10)), ("2.15.0rc1", (2, 15))],
)
def test_release_is_the_leading_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize(("version", "is_here"), [("3.7.1", False), ("3.8.0", True), ("3.9.2", True), ("3.10", False)])
def test_a_difference_is_that_of_the_installed_version(
    install: Callable[[str], None], version: str, is_here: bool
) -> None:
    install(version)
    assert Difference("some", "a reason", since=(3, 8), below=(3, 10)).is_here is is_here
    assert not Difference("other", "a reason").is_here, "a package that is not installed has none"


def test_every_difference_has_a_bound_and_a_reason() -> None:
    differences = [value for value in vars(versions).values() if isinstance(value, Difference)]
    assert differences
    for each in differences:
        assert each.why and (each.since, each.below) != (Difference.since, Difference.below)
