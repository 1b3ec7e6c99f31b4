"""No call in the tree can run what a file or an argument says."""

import ast
from pathlib import Path

import pytest

from conformance import ROOT

pytestmark = pytest.mark.stress
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"os.system", "os.popen", "torch.load", "numpy.load", "np.load", "torch.jit.load", "subprocess.getoutput"}
ALLOWED = {("src/opteq/data/pickles.py", "pickle")}  # which names no function: see there


def dotted(node: ast.AST) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def risks(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            found |= {name} & (CALLS | METHODS)
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                found |= {f"{keyword.arg}="} if keyword.arg in ("shell", "allow_pickle") and not off else set()
    return found


def test_the_tree_runs_nothing_that_it_reads(tally):
    paths = [path for part in ("src", "benchmarks", "examples") for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(paths) > 150
    found = {(path.relative_to(ROOT).as_posix(), risk) for path in paths for risk in risks(ast.parse(path.read_text()))}
    assert found == ALLOWED
    tally("modules without eval, exec, pickle or a shell", len(paths))


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from yaml import load", "eval('1')", "exec('x')", "import os\nos.system('x')", "run('x', shell=True)",
     "np.load('x', allow_pickle=flag)", "torch.load('x')", "import joblib.numpy_pickle"],
)  # fmt: skip
def test_each_of_them_would_be_found(code):
    assert risks(ast.parse(code))


def test_what_looks_like_them_is_not():
    assert not risks(ast.parse("model.eval()\nre.compile('x')\nrun(['x'], shell=False)\nself.load(path)"))


def test_no_template_evaluates_text():
    for path in sorted((ROOT / "src").rglob("*.js")):
        assert "eval(" not in path.read_text(encoding="utf-8")
        assert "innerHTML" not in path.read_text(encoding="utf-8"), Path(path).name
