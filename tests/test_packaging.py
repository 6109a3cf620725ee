"""The wheel holds what an installed user needs, and nothing that he does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_it_holds_the_package_its_types_and_the_demo(unpacked: Path) -> None:
    assert (unpacked / "sidequest_langchain" / "py.typed").is_file()
    assert {path.name.split("-")[0] for path in unpacked.iterdir()} == {"sidequest_langchain"}
    here = {p.name for p in (ROOT / "examples" / "tree_of_thoughts").glob("*.py")}
    there = unpacked / "sidequest_langchain" / "examples" / "tree_of_thoughts"
    assert {p.name for p in there.glob("*.py")} == here


def test_it_holds_what_was_learned_of_the_default_model(unpacked: Path) -> None:
    from sidequest_langchain.models import DEFAULT_MODEL

    code = (
        "from sidequest_langchain.policy.importance import DATA, predictor_for; "
        f"print(DATA); print(predictor_for('auto', {DEFAULT_MODEL!r}).n_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )
    folder, n_bytes = done.stdout.split()
    assert Path(folder).is_relative_to(unpacked)
    assert 1000 < int(n_bytes) < 10_000


def test_the_demo_is_imported_from_the_wheel_itself(unpacked: Path) -> None:
    code = "import sidequest_langchain.examples.tree_of_thoughts as demo; print(demo.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_the_demo_is_imported_from_the_checkout_where_there_is_one() -> None:
    import sidequest_langchain.examples.tree_of_thoughts as demo

    assert Path(demo.__file__).parents[1] == ROOT / "examples"


def test_what_the_loader_accepts_covers_what_is_installed_by_default() -> None:
    from sidequest_langchain.models.versions import SUPPORTED_TRANSFORMERS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    lowest = min(s.version for s in wanted["transformers"] if s.operator == ">=")
    assert lowest in SUPPORTED_TRANSFORMERS
    assert {s.operator for s in wanted["transformers"]} == {">=", "<"}


def test_the_constraints_pin_one_version_that_the_requirements_allow() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {pin.name.lower().replace("_", "-"): pin.specifier for pin in pins}
    assert len(versions) == len(pins)
    assert versions["torch"] == SpecifierSet("==2.13.0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        wanted = Requirement(text)
        if wanted.name == project["name"]:
            continue
        (pin,) = versions[wanted.name]
        assert pin.operator == "=="
        assert pin.version in wanted.specifier, text
