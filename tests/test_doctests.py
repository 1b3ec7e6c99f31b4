"""Every public name has an example that runs and prints what it shows, and its place on the page of the API."""

import doctest
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

API = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
PARTS = "solvers gradients cells regularizers models theory theory.certificates diagnostics data training estimators"
MODULES = ["opteq", *(f"opteq.{part}" for part in PARTS.split())]
BLOCKS = re.findall(r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*?)\])?", API, re.MULTILINE | re.DOTALL)
SHOWN = "".join(re.findall(r"^```python\n(.*?)^```", API, re.MULTILINE | re.DOTALL))  # tests/test_pages.py runs it
PAIRS = [(module, name) for module in MODULES for name in import_module(module).__all__]
PAIRS += [(module, name) for module, members in BLOCKS for name in re.findall(r"\w+", members)]
PUBLIC = {f"{module}.{name}": getattr(import_module(module), name) for module, name in PAIRS}
OBJECTS = {f"{found.__module__}.{found.__qualname__}": found for found in PUBLIC.values()}  # some have two public names


def examples(found: Any, name: str) -> list[doctest.DocTest]:
    """Those of an object, and of its methods."""
    tests = doctest.DocTestFinder().find(found, name, module=inspect.getmodule(inspect.unwrap(found)), globs={})
    return [test for test in tests if test.examples]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder and a random seed of its own; what torch is set to stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTEQ_DATA", raising=False)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_examples_run_and_print_what_they_show(name, alone):
    for test in examples(OBJECTS[name], name):
        report: list[str] = []
        torch.manual_seed(0)
        failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert not failed, "".join(report)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    """In its own docstring, not only in those of its methods, and with something to see in it; or on the page of the API."""
    module, _, last = name.rpartition(".")
    if module not in MODULES and re.search(rf"\b{last}\b", SHOWN):
        return
    tests = examples(PUBLIC[name], name)
    assert name in [test.name for test in tests], f"{name} has no example in its docstring"
    assert any(example.want for test in tests for example in test.examples), f"the example of {name} shows nothing"


def test_every_public_name_has_its_place_on_the_page_of_the_api():
    """Under its package; a function whose file has the same name (opteq.solve), by that file, which else would be shown instead."""
    listed = [name for name, members in BLOCKS if not members]
    listed += [f"{module}.{name}" for module, members in BLOCKS for name in re.findall(r"\w+", members)]
    places = {f"{name}.{name.rpartition('.')[2]}" if name in sys.modules else name for name in PUBLIC}
    assert places - set(listed) == set()
    assert len(listed) == len(set(listed))
    assert [name for name in listed if name.rpartition(".")[0] in MODULES and name not in {*places, *sys.modules}] == []
