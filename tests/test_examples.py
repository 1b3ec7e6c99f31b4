"""What the README, the examples and the public names promise."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opteq
from opteq import cells, data, diagnostics, estimators, gradients, models, regularizers, solvers, theory, training
from opteq.theory import certificates

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_the_readme_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert "CONVERGED" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["problem.md", "training.md", "fit.md", "diagnostics.md", "data.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert len(blocks) >= 3


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", "--folder", str(tmp_path / "run")])
    runpy.run_path(str(path), run_name="__main__")
    assert "CERTIFIED" in capsys.readouterr().out


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
        assert name == "jax" or 0 < row["share_of_gemm"] < 1.5  # whose products torch does not see


PUBLIC = {
    opteq: "Equilibrium Cell Map solve Solver Solution Status Stop record ConvergenceWarning ConvergenceError certify",
    solvers: "Picard Anderson Broyden Newton Accelerated ForwardBackward PeacemanRachford SAM",
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


@pytest.fixture(scope="module")
def fresh() -> subprocess.CompletedProcess[str]:
    """A process that says what importing opteq imports, uses a certificate, and asks for a name that is not there."""
    code = "import torch, sys; before = set(sys.modules); import opteq; print(sorted(set(sys.modules) - before)); "
    code += "opteq.theory.certificates.certify; opteq.theory.nothing"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_opteq_imports_no_compiler(fresh):
    """torch._dynamo alone takes seconds to import."""
    found = fresh.stdout
    assert "opteq.solve" in found
    for heavy in ("torch._dynamo", "torch._inductor", "scipy", "rich", "matplotlib", "sklearn"):
        assert f"'{heavy}" not in found


def test_every_erratum_names_a_test_that_exists():
    page = (ROOT / "docs" / "errata.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert len(named) > 25
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_certificates_are_imported_when_they_are_used(fresh):
    assert "module 'opteq.theory' has no attribute 'nothing'" in fresh.stderr
