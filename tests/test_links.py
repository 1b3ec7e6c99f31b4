"""The links of README, CONTRIBUTING and the documentation lead to files and headings that are there. Nothing is fetched."""

import re
import unicodedata
from functools import cache
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*.md")), *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r'\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"]*")?\s*\)|(?:href|src)="([^"]*)"')


def targets(text: str) -> list[str]:
    prose = SPAN.sub("", FENCE.sub("", text))
    return [first or second for first, second in LINK.findall(prose)]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Of the headings: those that the site and code hosts make alike, and explicit ones."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("\\", "")
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        plain = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        site, host = re.sub(r"[-\s]+", "-", plain), plain.replace(" ", "-")
        if site == host:
            found.add(site)
    return frozenset(found)


def is_name(dotted: str) -> bool:
    """Whether the API can have an entry for it: mkdocstrings makes anchors of full names."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def trouble(page: Path, target: str) -> str | None:
    """What is wrong with a link of a page."""
    parts = urlsplit(target)
    if parts.scheme == "mailto":
        return None if "@" in parts.path else "no address"
    if parts.scheme or parts.netloc:
        return None if parts.scheme in {"http", "https"} and "." in parts.netloc else "not the form of an address"
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target or not path.exists():
        return "no such file"
    if page.parent.name == "docs" and path.parent != page.parent and "docs" not in path.parts:
        return "not in the site"
    if path.name == "api.md" and parts.fragment.startswith("opteq."):
        return None if is_name(parts.fragment) else "no such name"
    return "no such heading" if parts.fragment and parts.fragment not in anchors(path) else None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    found = {target: trouble(page, target) for target in targets(page.read_text(encoding="utf-8"))}
    assert {target: why for target, why in found.items() if why} == {}


def test_every_page_is_in_the_navigation():
    """benchmarks.md, which is generated, may not be there yet."""
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"benchmarks.md"} == set(listed) - {"benchmarks.md"}


def test_broken_links_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    other, page = tmp_path / "docs/other.md", tmp_path / "docs/page.md"
    other.write_text("# One `two`, three\n\n```text\n# not a heading\n```\n\n## A - b\n")
    page.write_text("[a](other.md#one-two-three) `[b](gone.md)` ![c](c.png) <img src='d'>\n```text\n[e](gone.md)\n```\n")
    assert targets(page.read_text()) == ["other.md#one-two-three", "c.png"]
    assert trouble(page, "other.md") is trouble(page, "other.md#one-two-three") is None
    assert trouble(page, "https://example.org/a") is trouble(page, "mailto:a@example.org") is None
    for wrong in (
        "gone.md",
        "other.md#two",
        "other.md#a-b",
        "other.md#not-a-heading",
        "https://nothing",
        "ftp://a.b",
        "",
        "mailto:a",
    ):
        assert trouble(page, wrong)
    (tmp_path / "outside.md").touch()
    assert trouble(page, "../outside.md") == "not in the site"
    assert is_name("opteq.solve.Stop.rtol")
    assert not is_name("opteq.solve.Nothing")
