"""What depends on the version of a package, in one place: from which version or below which, and why.

Code that acts on a difference imports it, so a search for its name finds all of it. One that no allowed version
has any more is removed with what it does.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import takewhile

Release = tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """Something that some versions of a package do."""

    package: str
    why: str
    since: Release = (0,)
    below: Release = (1000,)

    @property
    def is_here(self) -> bool:
        """Whether the installed version does it; a package that is not installed does nothing."""
        return self.since <= installed_release(self.package) < self.below


READS_BACK_WITHOUT_BARRIER = Difference(
    "torch",
    "Inductor's kernels do not wait for other warps before they load what these have stored (pull request 190519)",
    below=(2, 14),
)
KEEPS_SUMS_OF_GRADIENTS_APART = Difference(
    "torch",
    "FSDP2 moves the gradients of each backward out of `grad`, into sums in the dtype of the reduction; later it lets "
    "autograd add to `grad` in that dtype",
    below=(2, 15),
)
IGNORES_GRAD_DTYPES = Difference(
    "torch",
    "FSDP2 casts reduced gradients to the dtype of the parameters, whatever `grad_dtype` these have",
    below=(2, 15),
)
NAMES_LOADS_COPIES = Difference(
    "triton",
    "Gluon's asynchronous loads are called copies from global to shared memory",
    below=(3, 8),
)
REPORTS_LEAKS_AT_EXIT = Difference(
    "triton",
    "its bindings print all objects of theirs that are left at exit, and those that are excluded from garbage "
    "collection are left",
    since=(3, 9),
)


def release(version: str) -> Release:
    """The leading numbers of a version: '0.2.2.dev1+cpu' → (0, 2, 2)."""
    return tuple(int(part) for part in takewhile(str.isdigit, version.split("+")[0].split(".")))


@cache
def installed_release(package: str) -> Release:
    """The leading numbers of an installed package's version; () if it is not installed."""
    try:
        return release(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ()
