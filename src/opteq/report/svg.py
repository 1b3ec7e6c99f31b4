"""From matplotlib's SVG to an element of a page: its colours and fonts are the page's, and it has a text for who cannot see it."""

import hashlib
import re
from xml.etree import ElementTree

__all__ = ["COLOURS", "GRID", "INK", "for_page"]

# Stand-ins, for matplotlib knows no variables: the page's style says what they look like in light and in dark.
INK, GRID = "#fe0100", "#fe0200"
COLOURS = tuple(f"#fe03{index:02x}" for index in range(10))
_VARIABLES = {INK: "currentColor", GRID: "var(--rule)"} | {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
_HREF = "{http://www.w3.org/1999/xlink}href"


def for_page(svg: str, described: str) -> str:
    """The element, with `described` as its alternative text; no two figures of a page share an id."""
    prefix = f"f{hashlib.sha256(f'{described}{svg}'.encode(errors='replace')).hexdigest()[:8]}"
    root = ElementTree.fromstring(svg)
    used = _references(root)
    _prune(root)
    for element in root.iter():
        _adapt(element, used, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib.update({"role": "img", "aria-labelledby": f"{prefix}-title"})
    title = ElementTree.Element("title", {"id": f"{prefix}-title"})
    title.text = described
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _references(root: ElementTree.Element) -> set[str]:
    """The ids that are used."""
    links = {element.get(_HREF, "")[1:] for element in root.iter()}
    looks = (element.get("clip-path", "") + element.get("style", "") for element in root.iter())
    return links | {name for look in looks for name in re.findall(r"url\(#([^)]*)\)", look)}


def _prune(parent: ElementTree.Element) -> None:
    """Drop the metadata, and the style, which would apply to the whole page."""
    for child in list(parent):
        if child.tag.endswith(("}metadata", "}style")):
            parent.remove(child)
        else:
            _prune(child)


def _adapt(element: ElementTree.Element, used: set[str], prefix: str) -> None:
    """HTML needs no name spaces; ids get a prefix or, where nothing refers to them, go."""
    element.tag = element.tag.rpartition("}")[2]
    element.text, element.tail = (element.text or "").strip() or None, (element.tail or "").strip() or None
    if (link := element.attrib.pop(_HREF, None)) is not None:
        element.set("href", f"#{prefix}{link[1:]}")
    if (clip := element.get("clip-path")) is not None:
        element.set("clip-path", clip.replace("url(#", f"url(#{prefix}"))
    if (name := element.attrib.pop("id", None)) in used:
        element.set("id", f"{prefix}{name}")
    if (style := element.get("style")) is not None:
        element.set("style", _page_style(style).replace("url(#", f"url(#{prefix}"))
    for name in ("d", "x", "y", "width", "height", "transform"):
        if (numbers := element.get(name)) is not None:
            element.set(name, re.sub(r"(\.\d)\d+", r"\1", " ".join(numbers.split())))  # tenths of a pixel are enough
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]


def _page_style(style: str) -> str:
    style = re.sub(r"font-family:[^;]*;?\s*", "", style)
    return re.sub(r"#fe0[123][0-9a-f]{2}", lambda match: _VARIABLES[match[0]], style)
