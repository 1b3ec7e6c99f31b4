"""Several threads, forked workers, deterministic algorithms: the same numbers, bit by bit, as one after the other."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from stress_cases import Case, make_case
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import survivor
from opteq import Cell, Equilibrium, Stop, record
from opteq.cells import GaussianDEQ, OptEq
from opteq.diagnostics import data_loss, landscape
from opteq.equilibrium import observe
from opteq.solve import Map
from opteq.training import fit
from test_distributed import CONFIG, convolutional, images, in_each, without_times

pytestmark = pytest.mark.stress


def at_once(*works: Callable[[], object]) -> list[object]:
    """What each gives, in a thread of its own, all begun together; the first error is raised."""
    gate, found, errors = threading.Barrier(len(works)), [None] * len(works), []

    def one(place: int, work: Callable[[], object]) -> None:
        gate.wait()
        try:
            found[place] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def everything(case: Case) -> list[Tensor]:
    """z, its status and the gradients of one solve."""
    x = case.x.detach().clone().requires_grad_()
    seen: list[str] = []
    with record() as log, observe(lambda layer, solution, phase: seen.append(phase)):
        found = replace(case, x=x, mode="grad").run()
        inputs = [x, *(p for p in case.cell.parameters() if p.requires_grad)]
        if found.z.requires_grad:
            parts = torch.autograd.grad(found.z.sum(), inputs, materialize_grads=True, allow_unused=True)
        else:
            parts = ()
    if not case.direct:
        assert {"forward", "unrolled"} & set(seen)
        assert len(log) == len(seen)  # of this thread only
    return [found.z.detach(), found.codes, found.residual.detach(), found.steps, *parts]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(one, other, strict=True))


def test_two_threads_that_solve_and_differentiate_at_once_find_what_each_finds_alone(amount, tally):
    cases = [make_case(seed, batch=5) for seed in range(2000, 2000 + amount(8, 400))]
    wanted = [everything(case) for case in cases]
    halves = [range(0, len(cases), 2), range(1, len(cases), 2)]
    found = at_once(*(lambda rows=rows: {i: everything(cases[i]) for i in rows} for rows in halves))
    for i, parts in (found[0] | found[1]).items():
        assert same(parts, wanted[i]), cases[i]
    tally("solves in two threads at once", len(cases))


def test_one_layer_serves_two_threads(amount, tally):
    torch.manual_seed(0)
    layer, xs = Equilibrium(OptEq(3, 5, 6, constrained=True), stop=Stop(rtol=1e-5)), torch.randn(2, amount(8, 200), 4, 3)

    def work(inputs: Tensor) -> list[Tensor]:
        return [layer(x).detach() for x in inputs]

    wanted = [work(part) for part in xs]
    found = at_once(partial(work, xs[0]), partial(work, xs[1]))
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    tally("solves in two threads at once", 2 * xs.shape[1])


class Masked(Cell):
    """A cell that draws a dropout mask in `bind`, as Cell says one should."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout, self.state_shape = GaussianDEQ(3, 4), nn.Dropout(0.5), (4,)

    def bind(self, x: Tensor) -> Map:
        return self.inner.bind(self.dropout(x))


def test_one_layer_with_dropout_in_bind_serves_two_threads():
    layer, inside, leave = Equilibrium(Masked(), on_failure="ignore"), threading.Event(), threading.Event()

    def pause(solver_layer: Equilibrium, solution: object, phase: str) -> None:
        inside.set()
        leave.wait(30)

    def slow() -> None:
        with observe(pause):  # called before the layer is done with its solve
            layer(torch.randn(2, 3))

    def quick() -> None:
        inside.wait(30)
        try:
            layer(torch.randn(2, 3))
        finally:
            leave.set()

    at_once(slow, quick)


INPUTS = torch.linspace(-1, 1, 12).reshape(4, 3)


def losses(model: nn.Module) -> Tensor:
    """A landscape of a model with a constrained weight."""
    return landscape(model, data_loss(INPUTS, torch.ones(4, 2)), steps=4, dims=1).loss


def constrained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Equilibrium(OptEq(3, 2, 3, activation="tanh", constrained=True), stop=Stop(rtol=1e-6)))


def while_another_computes(work: Callable[[], Tensor]) -> Tensor:
    """What the work gives while another thread is within a data_loss of its own."""
    busy, done = threading.Event(), threading.Event()

    def slow(output: Tensor, y: Tensor) -> Tensor:
        busy.set()
        done.wait(60)
        return output.sum()

    def here() -> Tensor:
        busy.wait(60)
        try:
            return work()
        finally:
            done.set()

    return at_once(lambda: data_loss(INPUTS, torch.ones(4, 2), slow)(constrained(1)), here)[1]


def test_a_landscape_is_the_same_while_another_thread_computes_a_loss():
    wanted = losses(constrained(0))
    torch.testing.assert_close(while_another_computes(lambda: losses(constrained(0))), wanted)


def test_a_layer_has_its_new_weights_while_another_thread_computes_a_loss():
    def halved() -> Tensor:
        model = constrained(0)
        with torch.no_grad():
            model(INPUTS)
            model[0].cell.parametrizations.W.original.mul_(0.5)
            return model(INPUTS)

    torch.testing.assert_close(while_another_computes(halved), halved())


class Solved(Dataset):
    """Samples that are equilibria, solved where they are asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.layer = torch.randn(24, 3), Equilibrium(OptEq(3, 5, 6), stop=Stop(rtol=1e-5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        x = self.x[i : i + 1].clone().requires_grad_()
        z = self.layer(x)
        return torch.cat([z.detach()[0], torch.autograd.grad(z.sum(), x)[0][0]])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_workers_of_a_loader_solve_as_their_parent_does(tally):
    data = Solved()
    wanted = torch.stack([data[i] for i in range(len(data))])
    found = torch.cat(list(DataLoader(data, 5, num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(found, wanted)
    tally("solves in forked workers", len(data))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_training_twice_under_deterministic_algorithms_is_bit_identical(tmp_path, tally):
    config = replace(survivor.CONFIG, epochs=1)
    for name in ("one", "two"):
        fit(survivor.make_model(), survivor.data(), survivor.data(), config, folder=tmp_path / name, verbose=False)
    assert survivor.outcome(tmp_path / "one") == survivor.outcome(tmp_path / "two")
    tally("trainings compared bit by bit", 2)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_training_twice_on_two_processes_is_bit_identical(tmp_path: Path, tally):
    config, found = replace(CONFIG, epochs=1, jacobian=0.0), []
    for name in ("one", "two"):
        folder, meeting = tmp_path / name, tmp_path / f"meet {name}"
        meeting.mkdir()

        def train(rank: int, folder: Path = folder) -> None:
            fit(convolutional(), images(), images(), config, folder=folder, verbose=False)

        assert in_each(train, meeting) == [0, 0]
        found.append(((folder / "model.safetensors").read_bytes(), without_times(folder)))
    assert found[0] == found[1]
    tally("trainings compared bit by bit", 2)
