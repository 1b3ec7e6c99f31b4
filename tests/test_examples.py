"""What the README, the examples and the public names promise."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import opteq
from opteq import cells, gradients, models, regularizers, solvers, theory
from opteq.theory import certificates

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_the_readme_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert "CONVERGED" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["problem.md", "training.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert len(blocks) >= 3


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert "CONVERGED" in capsys.readouterr().out


def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/run.py", "--rounds", "1", "--threads", "1", "--json", tmp_path / "figures.json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert "Anderson" in done.stdout
    assert '"ratio"' in (tmp_path / "figures.json").read_text()


PUBLIC = {
    opteq: "Equilibrium Cell Map solve Solver Solution Status Stop record ConvergenceWarning ConvergenceError certify",
    solvers: "Picard Anderson Broyden Newton Accelerated ForwardBackward PeacemanRachford SAM",
    gradients: "Implicit Unrolled Phantom JacobianFree gradient_error",
    cells: "FunctionCell OptEq ConvOptEq DepthwiseOptEq DeepOptEq WideOptEq StackedOptEq AffineOptEq MultivariateOptEq "
    "GaussianDEQ ScaledReLU Monotone MonotoneConv MonotoneMultiTier Residual Multiscale",
    models: "Readout",
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


def test_importing_opteq_imports_no_compiler():
    """torch._dynamo alone takes seconds to import."""
    code = "import torch, sys; before = set(sys.modules); import opteq; print(sorted(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "opteq.solve" in found
    for heavy in ("torch._dynamo", "torch._inductor", "scipy", "rich", "matplotlib", "sklearn"):
        assert f"'{heavy}" not in found


def test_every_erratum_names_a_test_that_exists():
    page = (ROOT / "docs" / "errata.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert len(named) > 25
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_certificates_are_imported_when_they_are_used():
    code = "import opteq; opteq.theory.certificates.certify; opteq.theory.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "module 'opteq.theory' has no attribute 'nothing'" in done.stderr
