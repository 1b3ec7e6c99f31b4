"""The pages for users: every Python block runs, in order, and prints what the page shows."""

import ast
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?%?(?![\w])")
PAGES = sorted(path.name for path in DOCS.glob("*.md") if "\n```python" in path.read_text(encoding="utf-8"))


def agree(shown: str, printed: str) -> bool:
    """The same words; numbers within a tenth, or 2 evaluations: another processor rounds otherwise, and takes another step."""
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    numbers = [[float(found.rstrip("%")) for found in NUMBER.findall(text)] for text in (shown, printed)]
    if words[0] != words[1] or len(numbers[0]) != len(numbers[1]):
        return False
    return all(math.isclose(a, b, rel_tol=0.1, abs_tol=2 if a > 2 and a == int(a) else 0) for a, b in zip(*numbers, strict=True))


def shows(shown: str, printed: str) -> bool:
    """They agree; a line `...` stands for any lines."""
    lines, begin = printed.splitlines(), 0
    parts = [part.splitlines() for part in re.split(r"^\.\.\.$\n?", shown, flags=re.MULTILINE)]
    if len(parts) == 1:
        return agree(shown, printed)
    for number, part in enumerate(parts):
        places = range(begin, len(lines) - len(part) + 1) if number else [0]
        if number == len(parts) - 1 and part:
            places = range(len(lines) - len(part), len(lines) - len(part) + 1)
        found = next((at for at in places if at >= begin and agree("\n".join(part), "\n".join(lines[at : at + len(part)]))), None)
        if found is None:
            return False
        begin = found + len(part)
    return True


def outputs(page, capsys):
    """(shown, printed) of every block of output. A block with a title is a file, which the commands of the page may run."""
    names: dict[str, object] = {}
    printed, files = "", set()
    for kind, info, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        title = re.search(r'title="([\w.]+)"', info)
        if kind == "python" and title:
            Path(title[1]).write_text(text, encoding="utf-8")
            files.add(title[1])
        elif kind == "python":
            exec(compile(text, page, "exec"), names)
            printed = capsys.readouterr().out
        elif kind == "text":
            yield text, printed
        elif kind == "console" and any(word in files for word in text.split()):
            command, _, shown = text.removeprefix("$ ").partition("\n")
            yield shown, run(command)


def run(command: str) -> str:
    """What `python FILE` or `torchrun OPTIONS FILE` prints."""
    program, *rest = command.split()
    prefix = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *prefix, *rest], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_and_prints_what_it_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shown, printed in outputs(page, capsys):
        assert shows(shown, printed), f"{page} shows\n{shown}\nbut this was printed:\n{printed}"


@pytest.mark.parametrize("page", ["estimators.md", "models.md"])
def test_a_page_of_a_part_shows_it_at_work(page):
    assert [kind for kind, _, _ in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))].count("python") >= 3


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_blocks_say_what_they_are(page):
    """`py` is the code of other libraries, which need not be installed; it has to be Python all the same."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text))
    for kind, _, block in BLOCK.findall(text):
        assert kind in {"python", "text", "console"} or (kind == "py" and page == "migration.md")
        if kind == "py":
            ast.parse(block)


def test_outputs_agree_up_to_rounding_only():
    assert agree("Anderson 47  0.31 CONVERGED", "Anderson  46 0.312 CONVERGED")
    assert not agree("Anderson 47", "Anderson 60")
    assert not agree("Anderson 1 CONVERGED", "Anderson 2 CONVERGED")
    assert not agree("Anderson 47 CONVERGED", "Anderson 47 MAX_STEPS")
    assert not agree("error 1e-06", "error 1e-03")


def test_dots_stand_for_lines():
    printed = "a 1\nb\nc\nd 4\n"
    assert shows("a 1\n...\nd 4\n", printed)
    assert shows("a 1\n...\nc\n...\n", printed)
    assert shows("a 1\nb\nc\nd 4\n", printed)
    assert not shows("a 1\nd 4\n", printed)
    assert not shows("b\n...\n", printed)
    assert not shows("a 1\n...\nc\n", printed)
    assert not shows("a 1\n...\nd 4\n...\nb\n", printed)


def hook(name, function="on_page_content"):
    """A function of a hook, by default what MkDocs calls with the HTML of a page."""
    names: dict[str, object] = {}
    exec(compile((DOCS / "hooks" / name).read_text(encoding="utf-8"), name, "exec"), names)
    return names[function]


def test_escaped_pipes_in_tables_are_pipes():
    content = r"<td><code>\|z\|</code> \|</td><th align='left'><code>a\|b</code></th><p><code>\|</code></p>"
    wanted = r"<td><code>|z|</code> \|</td><th align='left'><code>a|b</code></th><p><code>\|</code></p>"
    assert hook("tables.py")(content) == wanted


def test_names_in_tables_break_at_their_joints_only():
    content = "<td><code>tests/test_solve.py::test_a_name</code> <code>0.5 &lt; z_0</code></td><p><code>opteq.solve</code></p>"
    wanted = "<td><code>tests/<wbr>test_<wbr>solve.py::<wbr>test_a_<wbr>name</code> <code>0.5 &lt; z_0</code></td>"
    assert hook("tables.py")(content) == wanted + "<p><code>opteq.solve</code></p>"


def test_numbers_and_options_stay_on_one_line():
    numbers = ["1e-4", "3 x 32 x 32", "(2.4-2.6)", "1,024 + 16", "-2.1 ± 0.1", "m = 64", "N = 1,000", "1 + 1e-3"]
    wanted = ", ".join(f'<span class="whole">{number}</span>' for number in numbers)
    for tag in ("td", "p"):
        assert hook("lines.py")(f"<{tag}>{', '.join(numbers)}</{tag}>") == f"<{tag}>{wanted}</{tag}>"
    code = "<p><code>opteq train --data.root runs/a-b</code></p>"
    option, folder = '<span class="whole">--data.root</span>', '<span class="whole">runs/a-b</span>'
    assert hook("lines.py")(code) == f"<p><code>opteq train {option} {folder}</code></p>"
    commands = '<div class="language-console highlight"><pre><code>ls a-b</code></pre></div>'
    assert hook("lines.py")(commands) == commands.replace("a-b", '<span class="whole">a-b</span>')
    as_it_is = '<pre><code>1e-4 a-b</code></pre><math><mn>1e-4</mn></math><a href="m = 64">x</a>'
    assert hook("lines.py")(as_it_is) == as_it_is


def test_names_in_code_that_are_too_long_for_a_telephone_break_at_their_joints():
    name = "src/opteq/experiments/opteq_table6_7.py"
    assert hook("lines.py")(f"<p><code>{name}</code> {name}</p>") == (
        f"<p><code>src/<wbr>opteq/<wbr>experiments/<wbr>opteq_<wbr>table6_7.py</code> {name}</p>"
    )
    assert hook("lines.py")("<p><code>opteq.theory.certificates</code></p>") == "<p><code>opteq.theory.certificates</code></p>"


def test_cells_of_a_table_that_would_be_squeezed_are_marked():
    cells = ["a word", "A sentence of more than thirty letters.", "<code>a_name_of_more_than_thirty_letters</code>", "name " * 21]
    found = hook("tables.py")("".join(f"<td>{cell}</td>" for cell in cells) + f"<th>{cells[1]}</th>")
    assert re.findall(r'<t[dh](?: class="(\w+)")?>', found) == ["", "long", "", "longer", ""]


def test_mathematics_in_docstrings_is_neither_html_nor_emphasis(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))  # comes with the extra `docs` only
    text = "z* minimises <U x, z>, as `a*b` and\n    >>> 2 * x\n    <Tensor>\n\nz* < 1."
    wanted = "z\\* minimises &lt;U x, z>, as `a*b` and\n    >>> 2 * x\n    <Tensor>\n\nz\\* < 1."
    assert hook("docstrings.py", "escaped")(text) == wanted


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml", reason="the documentation's tools are installed by `make docs`")
    convert = hook("mathml.py")
    page = SimpleNamespace(file=SimpleNamespace(src_path="page.md"))
    content = r'<p>of <span class="arithmatex">\(z &lt; 1\)</span></p><div class="arithmatex">\[f(z)\]</div><pre>\(z\)</pre>'
    found = convert(content, page=page)
    assert found.startswith('<p>of <span class="formula"><math')
    assert found.endswith(r"</math></div><pre>\(z\)</pre>")
    assert 'display="inline"' in found
    assert 'display="block"' in found
    assert convert(r'<span class="arithmatex">\(z\)</span>, x', page=page).endswith("</math>,</span> x")
    bars = convert(r'<span class="arithmatex">\(\lvert z\rvert\)</span>', page=page)
    assert bars.count('lspace="0"') == 2
    for unknown in (r"\arg z", r"\begin{aligned} a &amp;= b \end{aligned}"):
        with pytest.raises(ValueError, match=r"page\.md"):
            convert(rf'<span class="arithmatex">\({unknown}\)</span>', page=page)


def test_the_figures_of_the_concepts_can_be_drawn_again(tmp_path):
    runpy.run_path(str(DOCS / "figures/make_concepts.py"))["main"](tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in DOCS.glob("figures/concept_*.svg")}
    for path in tmp_path.iterdir():
        assert "prefers-color-scheme:dark" in path.read_text(encoding="utf-8")
