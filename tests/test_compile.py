"""torch.compile(model) equals model: the loop depends on data and runs as it is, the rest is compiled."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from opteq import ConvergenceWarning, Equilibrium, Stop
from opteq.cells import FunctionCell, OptEq
from opteq.gradients import Gradient, Implicit, Phantom, Unrolled
from problems import Affine

# At a graph break PyTorch looks at the .grad of inner tensors; it hides its own warning, but not from "warnings are errors".
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

# inductor needs a C++ compiler for the CPU
INDUCTOR = ["inductor"] if any(map(shutil.which, ("g++", "c++", "clang"))) else []


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path, monkeypatch) -> Iterator[None]:
    """No compiled code from other tests, no cache, no pool of compiling processes, no search for vector instructions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)  # none; each that is looked for is compiled
    torch._dynamo.reset()
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()


def opteq_cell() -> OptEq:
    return OptEq(4, 5, 6, activation="tanh")


def module_cell() -> FunctionCell:
    return FunctionCell(Affine(0.2 * torch.randn(5, 5), torch.randn(5, 4), torch.tanh), (5,))


def lambda_cell() -> FunctionCell:
    W, U = (0.2 * torch.randn(5, 5)).double().requires_grad_(), torch.randn(5, 4).double().requires_grad_()
    cell = FunctionCell(lambda z, x: torch.tanh(z @ W.T + x @ U.T), (5,))
    cell.captured = (W, U)  # so that the test can ask for their gradients
    return cell


class Model(nn.Module):
    def __init__(self, layer: Equilibrium) -> None:
        super().__init__()
        self.encoder, self.layer, self.head = nn.Linear(3, 4), layer, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(self.layer(torch.tanh(self.encoder(x)).sin()))).square()


def model_of(make, gradient: Gradient | None = None) -> Model:
    torch.manual_seed(0)
    return Model(Equilibrium(make(), stop=Stop(rtol=1e-12), gradient=gradient, on_failure="raise")).double()


def value_and_gradients(model: nn.Module, owner: Model, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    inputs = [x, *owner.parameters(), *getattr(owner.layer.cell, "captured", ())]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


CELLS = (opteq_cell, module_cell, lambda_cell)


# What is compiled, before the layer and after it, is the same for every cell: one of them is enough for inductor.
@pytest.mark.parametrize(
    ("make", "backend"), [*((make, "aot_eager") for make in CELLS), *((opteq_cell, backend) for backend in INDUCTOR)]
)
def test_a_compiled_model_equals_the_eager_one_in_value_and_gradient(make, backend):
    model = model_of(make)
    compiled = torch.compile(model, backend=backend)
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for batch in (x, 2 * x):  # compiled, then from the cache
        found, wanted = value_and_gradients(compiled, model, batch), value_and_gradients(model, model, batch)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    assert graphs["unique_graphs"] - before == 2  # before the layer and after it, both compiled once
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), Unrolled(4)])
def test_every_gradient_strategy_compiles(gradient):
    model = model_of(opteq_cell, gradient)
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)
    found = value_and_gradients(torch.compile(model, backend="aot_eager"), model, x)
    torch.testing.assert_close(found, value_and_gradients(model, model, x), rtol=1e-10, atol=1e-11)


def test_a_compiled_equilibrium_alone_trains_like_the_eager_one():
    torch.manual_seed(0)
    eager, twin = (Equilibrium(opteq_cell().double(), stop=Stop(rtol=1e-12), on_failure="raise") for _ in range(2))
    twin.load_state_dict(eager.state_dict())
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    for model, owner in ((eager, eager), (torch.compile(twin, backend="aot_eager"), twin)):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(list(twin.parameters()), list(eager.parameters()), rtol=1e-10, atol=1e-11)


def test_a_compiled_sequential_equals_the_eager_one():
    torch.manual_seed(0)
    layer = Equilibrium(opteq_cell(), stop=Stop(rtol=1e-12), on_failure="raise")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer, nn.Linear(5, 2)).double()
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)
    found, wanted = torch.compile(model, backend="aot_eager")(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    gradients = (torch.autograd.grad(z.square().sum(), list(model.parameters())) for z in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_a_compiled_model_takes_batches_of_other_sizes():
    model = model_of(opteq_cell)
    compiled = torch.compile(model, backend="aot_eager")
    for size in (6, 2, 9):
        x = torch.linspace(-1, 1, 3 * size, dtype=torch.float64).reshape(size, 3)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-11)


def test_a_compiled_model_still_tells_its_failures():
    model = model_of(opteq_cell)
    model.layer.stop, model.layer.on_failure = Stop(rtol=1e-12, max_steps=1), "warn"
    with pytest.warns(ConvergenceWarning, match="forward solve: 6 of 6 samples did not converge"):
        torch.compile(model, backend="aot_eager")(torch.ones(6, 3, dtype=torch.float64))
