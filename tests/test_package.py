"""What the package says of itself agrees, and what is built holds what it should and nothing else."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import opteq

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = {
    re.sub(r"[-_.]+", "-", name).lower(): version
    for name, version in (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
}


def test_the_citation_has_what_its_format_requires():
    yaml = pytest.importorskip("yaml")  # by way of dask, not by a promise of its own
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert found["version"] == opteq.__version__
    assert found["license"] == PROJECT["project"]["license"]
    assert all(isinstance(found[name], str) and found[name] for name in ("message", "title", "abstract"))
    assert found["type"] in ("software", "dataset")
    assert [author["name"] for author in found["authors"]] == [author["name"] for author in PROJECT["project"]["authors"]]
    assert all(isinstance(word, str) for word in found["keywords"])


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert versions[0][0] == opteq.__version__
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE))
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_the_extras_are_there_and_importing_needs_none():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"train", "report", "bench", "dask", "dev", "package"} <= set(extras)
    required = {re.match(r"[\w-]+", requirement).group() for requirement in PROJECT["project"]["dependencies"]}
    assert required == {"numpy", "scipy", "torch"}


def test_every_requirement_has_its_exact_version_in_the_constraints():
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(each for extra in extras for each in extra)]
    names = {re.match(r"[\w.-]+", requirement).group().lower() for requirement in requirements} - {"opteq"}
    assert names - set(PINNED) == set()


def test_the_sdist_has_what_builds_and_tests_the_package_and_no_pictures_of_results():
    target = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]
    wanted = {"/src", "/tests", "/LICENSE", "/README.md", "/CHANGELOG.md", "/CITATION.cff", "/constraints.txt"}
    assert wanted <= set(target["include"])
    assert all((ROOT / name.strip("/").split("*")[0]).exists() for name in target["include"])
    assert any(fnmatch("/docs/figures/opteq_theorems.png", pattern) for pattern in target["exclude"])
    assert not any(fnmatch("/results/opteq_table3/figure.png", pattern) for pattern in target["include"])
    assert (ROOT / "src" / "opteq" / "py.typed").is_file()
