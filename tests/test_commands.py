"""The commands that the pages show: they run, on small models and few samples, and print what the pages say that they print."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from data_files import write_cifar_binary
from opteq import cli
from test_pages import shows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
SMALL = {"--channels": "4", "--hidden": "4", "--data.limit": "24", "--data.test-limit": "12", "--train.batch-size": "12"}
SMALL |= {"--train.epochs": "1"}
PROMPT = re.compile(r"^(?:\$ )?(?:torchrun [^\n]*-m )?(opteq [^\n]*)\n((?:(?!\$ |opteq )[^\n]*\n)*)", re.MULTILINE)


def commands(page: Path) -> list[tuple[str, str]]:
    """(command, what the page shows of its output), from the blocks for terminals."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [found for kind, block in blocks if kind in {"", "console"} for found in PROMPT.findall(block)]


def smaller(arguments: list[str]) -> list[str]:
    """The same with other sizes, where something is trained or drawn."""
    sizes = {"--steps": "3"} if arguments[0] == "landscape" else SMALL if arguments[0] == "train" else {}
    if {"--dry-run", "--resume"} & set(arguments):
        return arguments
    for name, size in sizes.items():
        at = arguments.index(name) if name in arguments else len(arguments)
        arguments = [*arguments[:at], name, size, *arguments[at + 2 :]]
    return [*arguments, "--data.no-verify"] if "cifar10" in arguments else arguments  # it is a made one


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny CIFAR-10 and no other data; nothing is opened, and a server ends as soon as it has begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPTEQ_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr("opteq.report.Server.wait", lambda server: None)
    write_cifar_binary(tmp_path / "data" / "cifar-10-batches-bin")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, here, capsys):
    shown_runs = set(re.findall(r"\bruns/digits-deep-\d", " ".join(line for line, _ in commands(page))))
    if "opteq train deep --data.name digits" not in str(commands(page)):  # a page that speaks of runs of another page
        for _ in shown_runs:
            assert cli.main(smaller(["train", "deep"])) == 0
    capsys.readouterr()
    for line, shown in commands(page):
        words, _, file = line.partition(" > ")
        arguments = shlex.split(words)[1:]
        code = cli.main(smaller(arguments))
        captured = capsys.readouterr()
        if file:
            Path(file).write_text(captured.out)
        assert code == (2 if "error:" in shown else 0), captured.err
        if shown and smaller(arguments) == arguments:
            assert shows(shown, captured.err if file or code else captured.out), captured


def test_every_target_that_is_named_is_in_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        assert set(re.findall(r"(?:`|^)make\s+([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= targets


def test_every_extra_that_is_named_can_be_installed():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = (*PAGES, ROOT / "examples" / "README.md")
    named = [found for page in pages for found in re.findall(r"pip install '[\w.]*\[([\w,]+)\]'", page.read_text(encoding="utf-8"))]
    assert named
    assert {extra for found in named for extra in found.split(",")} <= extras
