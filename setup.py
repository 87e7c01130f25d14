"""Name the packages: the folders passes/ and runtime/ are zerograph.passes and zerograph.runtime.

In a checkout links say so to Python and to type checkers. Builds do not follow them.
"""

from setuptools import find_packages, setup

PLACES = {"zerograph.passes": "passes", "zerograph.runtime": "runtime"}


def packages() -> list[str]:
    """Return the names of all packages, each once."""
    own = find_packages(
        include=["zerograph", "zerograph.*"], exclude=[f"{name}{rest}" for name in PLACES for rest in ("", ".*")]
    )
    return own + [
        f"zerograph.{name}" for folder in PLACES.values() for name in find_packages(include=[folder, f"{folder}.*"])
    ]


setup(packages=packages(), package_dir=PLACES)
