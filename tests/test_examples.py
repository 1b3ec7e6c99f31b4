"""What the README, the examples and the public names promise."""

import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch

import opteq
from opteq import cells, data, diagnostics, estimators, gradients, models, regularizers, solvers, theory, training
from opteq.theory import certificates
from processes import finish, import_optimizers, in_child

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_the_readme_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert "CONVERGED" in capsys.readouterr().out


def test_the_demonstration_runs(capsys, monkeypatch, tmp_path):
    path = ROOT / "examples" / "demo.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", "--folder", str(tmp_path / "run")])
    runpy.run_path(str(path), run_name="__main__")
    assert "CERTIFIED" in capsys.readouterr().out


# What `main` of each example returns, and what of it must be true; chance gives an accuracy of 0.1 on the ten digits.
EXAMPLES = {
    "certificate": lambda r: not r["before"] and r["certified"] and r["kept"] and r["caught"] and r["loss"] < r["promised"] < 1,
    "classification": lambda r: r["accuracy"] > 0.7 and r["converged"] == 1 and r["moved"] < 1e-4 and r["same"] > 0.99,
    "custom_cell": lambda r: r["gradients"] and r["at the equilibrium"] == 1 and r["after 4 steps"] == 0.5,
    "distributed": lambda r: r["accuracy"] > 0.5,
    "inverse_problem": lambda r: r["error"] < 0.03 < 0.2 < r["before"] and 0.5 < r["misfit"] < 1.5 and r["gradient"] < 1e-4,
    "segmentation": lambda r: r["miou"] > 0.6 and r["converged"] == 1,
    "sklearn_pipeline": lambda r: r["score"] > 0.8 and r["same"] == 1,
    "tangent_kernel": lambda r: 2 * r["wide"] < r["narrow"] < 0.3 and r["new"] < 0.1,
}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_as_it_says(name, capsys):
    path = ROOT / "examples" / f"{name}.py"
    found = runpy.run_path(str(path))["main"](["--quick"])
    assert EXAMPLES[name](found), found
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_every_example_is_run_and_listed():
    page, folder = (ROOT / "examples" / "README.md").read_text(), ROOT / "examples"
    assert {path.stem for path in folder.glob("*.py")} == {"demo", *EXAMPLES}
    for path in (*folder.glob("*.py"), *NOTEBOOKS):
        assert f"[{path.name}]({path.name})" in page


def test_two_processes_train_as_one(tmp_path, monkeypatch):
    """The example on two processes, told so as torchrun does, which test_pages.py starts; a line of the first process says how far
    its weights are from those of one process.
    """
    path = ROOT / "examples" / "distributed.py"
    with socket.create_server(("127.0.0.1", 0)) as free:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])

    def run(rank: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        with (tmp_path / f"{rank}.txt").open("w") as file, redirect_stdout(file):
            runpy.run_path(str(path), run_name="__main__")

    import_optimizers()
    assert [finish(pid) for pid in [in_child(partial(run, rank)) for rank in range(2)]] == [0, 0]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert "2 processes" in first
    assert not second
    (difference,) = re.findall(r"differ by (\S+) of themselves", first)
    assert float(difference) < 1e-6


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, monkeypatch):
    """Its cells one after the other, without a kernel: they use no commands of IPython. They end with assertions."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    names = {"__name__": "__main__"}
    cells = code_cells(path)
    for place, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {place + 1}", "exec"), names)
    assert "assert " in "".join(cells[-1]["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_holds_its_outputs(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert path.stat().st_size < 300_000


def test_there_are_four_notebooks():
    assert len(NOTEBOOKS) == 4


@pytest.mark.filterwarnings("ignore")  # other libraries warn when they are imported
def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    path = ROOT / "benchmarks/run.py"
    arguments = ["opteq-forward", "overhead", "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(path.parent)  # as Python does for a script
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert "Anderson" in capsys.readouterr().out
    (race,) = json.loads((tmp_path / "figures.json").read_text())["threads"]["1"]["races"]
    for name, row in race["contestants"].items():  # torchdeq and JAX are among them only where they are installed
        assert row["residual"] <= 1e-4
        assert name == "jax" or 0 < row["share_of_gemm"] < math.inf  # whose products torch does not see


PUBLIC = {
    opteq: "Equilibrium Cell Map solve Solver Solution Status Stop record ConvergenceWarning ConvergenceError certify",
    solvers: "Picard Anderson Broyden Newton Accelerated ForwardBackward PeacemanRachford SAM MixedPrecision",
    gradients: "Implicit Unrolled Phantom JacobianFree gradient_error",
    cells: "FunctionCell OptEq ConvOptEq DepthwiseOptEq DeepOptEq WideOptEq StackedOptEq AffineOptEq MultivariateOptEq "
    "GaussianDEQ ScaledReLU Monotone MonotoneConv MonotoneMultiTier Residual Multiscale",
    models: "Readout Classifier Segmenter FeedForward NeuralODE opteq_small opteq_mid mdeq_small",
    data: "load",
    diagnostics: "landscape",
    estimators: "EquilibriumClassifier EquilibriumRegressor",
    training: "fit TrainConfig",
    regularizers: "L2 L1 Incay Decorrelation HSIC",
    theory: "objective envelope inclusion_residual recover_problem from_feedforward unit_layers weight_tied is_prox "
    "gradient_flow predicted_loss empirical_ntk population_kernel tangent_limit kernel_regression lipschitz_bound error_bound",
    certificates: "Condition Certificate certify certified_init check Monitor",
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_public_names_are_there_and_documented(module, names):
    for name in names.split():
        assert name in module.__all__
        assert getattr(module, name).__doc__


def test_importing_opteq_imports_no_compiler_and_certificates_when_they_are_used():
    """In a process of its own. torch._dynamo alone takes seconds to import."""
    code = "import torch, sys; before = set(sys.modules); import opteq; print(sorted(set(sys.modules) - before)); "
    code += "opteq.theory.certificates.certify; opteq.theory.nothing"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "opteq.solve" in found.stdout
    for heavy in ("torch._dynamo", "torch._inductor", "scipy", "rich", "matplotlib", "sklearn"):
        assert f"'{heavy}" not in found.stdout
    assert "module 'opteq.theory' has no attribute 'nothing'" in found.stderr


def test_every_erratum_names_a_test_that_exists():
    page = (ROOT / "docs" / "errata.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert len(named) > 25
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
