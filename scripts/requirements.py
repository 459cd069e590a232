"""Print the package's direct dependencies, one a line, and those of the dependency groups named as arguments.

pip can install a project's dependencies only together with the project; the Makefile installs them while the
Rust core is still being compiled.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, groups: list[str]) -> list[str]:
    """Requirement strings of `pyproject`: the run-time ones, then each group's. KeyError if there is no such group."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    found: list[str] = list(table["project"]["dependencies"])
    for group in groups:
        found += table["dependency-groups"][group]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).parents[1] / "pyproject.toml", sys.argv[1:])))
