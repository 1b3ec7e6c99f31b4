"""fit: what it computes, step by step, against independent computations; what it refuses; what it guards against."""

import io
import math
import re
import sys
import warnings
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opteq import ConvergenceError, Equilibrium, Stop
from opteq.cells import ConvOptEq, DeepOptEq, FunctionCell, GaussianDEQ, Monotone, OptEq, ScaledReLU, StackedOptEq
from opteq.equilibrium import observe
from opteq.gradients import Implicit, Unrolled
from opteq.linear import GMRES
from opteq.models import Classifier, Readout
from opteq.regularizers import L2
from opteq.runs import Run, RunError, RunWarning
from opteq.solvers import SAM, Picard
from opteq.theory.certificates import Monitor
from opteq.training import Callback, DivergenceError, Objective, TensorBoard, TrainConfig, evaluate, fit, set_mode, step_size
from opteq.training.batches import Plan
from opteq.training.display import Bar, Lines, display, summary
from opteq.training.extras import JacobianPenalty, WarmStart
from opteq.training.norms import Norms
from opteq.training.objective import Score
from opteq.training.watch import Watch

SGD = TrainConfig(epochs=2, batch_size=10, optimizer="sgd", momentum=0.0, lr=0.1, schedule="constant", norms="off")


def data(n: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def make_model(dtype: torch.dtype = torch.float32, **options) -> nn.Sequential:
    torch.manual_seed(0)
    layer = Equilibrium(OptEq(5, 6, 7, **options), stop=Stop(rtol=1e-6))
    return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(6, 2)).to(dtype)


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


class Collect(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows, self.steps, self.told = [], [], []

    def begin(self, config, total) -> None:
        self.told.append(("begin", total))

    def step(self, step: int) -> None:
        self.steps.append(step)

    def row(self, row) -> None:
        self.rows.append(dict(row))

    def end(self, result) -> None:
        self.told.append(("end", result.steps))

    def close(self) -> None:
        self.told.append("close")


# ---------------------------------------------------------------- what a step is


def by_hand(model: nn.Module, x: Tensor, y: Tensor, order: list[Tensor], lr: float) -> None:
    for rows in order:
        loss = cross_entropy(model(x[rows]), y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= lr * grad


def test_fit_is_gradient_descent_on_batches_that_cover_each_epoch_once():
    x, y = data(25)
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                seen.append(torch.stack([(x == row).all(1).nonzero()[0, 0] for row in given]))
            return given

    model, copy = make_model(), make_model()
    fit(nn.Sequential(Spy(), model), (x, y), None, SGD, verbose=False)
    assert [len(rows) for rows in seen] == [10, 10, 5, 10, 10, 5]
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(25))
    assert first.tolist() != second.tolist()
    by_hand(copy, x, y, seen, SGD.lr)
    torch.testing.assert_close(weights(model), weights(copy), rtol=1e-5, atol=1e-6)


def test_drop_last_leaves_out_the_small_batch_of_each_epoch():
    result = fit(make_model(), data(25), None, replace(SGD, drop_last=True), verbose=False)
    assert result.steps == 4


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizer_clipping_decay_and_smoothing_are_pytorch_s(name):
    x, y = data(10)
    config = replace(SGD, optimizer=name, epochs=6, momentum=0.9, weight_decay=0.01, clip=0.05, label_smoothing=0.1, lr=0.02)
    model, copy = make_model(torch.float64), make_model(torch.float64)
    fit(model, (x, y), None, config, verbose=False)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = kind(copy.parameters(), lr=0.02, weight_decay=0.01, **options)
    for _ in range(6):
        optimizer.zero_grad()
        cross_entropy(copy(x.double()), y, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(copy.parameters(), 0.05)
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(copy), rtol=1e-6, atol=1e-8)


def test_the_average_of_weights_is_what_the_model_ends_with():
    x, y = data(10)
    config = replace(SGD, epochs=4, ema=0.8)
    model, copy = make_model(torch.float64), make_model(torch.float64)
    averages: list[Tensor] = []
    for _ in range(4):
        by_hand(copy, x.double(), y, [torch.arange(10)], SGD.lr)
        now = weights(copy)
        averages = now if not averages else [0.8 * a + 0.2 * w for a, w in zip(averages, now, strict=True)]
    result = fit(model, (x, y), (x, y), config, verbose=False)
    torch.testing.assert_close(weights(model), averages, rtol=1e-6, atol=1e-8)
    assert result.scores["valid_loss"] == pytest.approx(cross_entropy(model(x.double()), y).item(), rel=1e-6)


def test_floating_targets_are_regression_and_any_loss_may_be_given():
    x, _ = data(10)
    y = x[:, :2].clone()
    one, two = make_model(), make_model()
    fit(one, (x, y), None, SGD, verbose=False)
    fit(two, (x, y), None, SGD, loss=lambda output, y: (output - y).square().mean(), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))
    result = fit(one, (x, y), (x, y), replace(SGD, epochs=60), verbose=False)
    assert result.scores["valid_loss"] < 0.5 * result.history[0]["loss"]
    assert "valid_accuracy" not in result.scores


def test_figures_are_means_over_the_samples_since_the_row_before():
    x, y = data(25)
    seen: list[tuple[float, int]] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = cross_entropy(output, y)
        if torch.is_grad_enabled():
            seen.append((value.item(), len(y)))
        return value

    result = fit(make_model(), (x, y), None, replace(SGD, log_every=2), loss=loss, verbose=False)
    assert [count for _, count in seen] == [10, 10, 5] * 2

    def mean(first: int, last: int) -> float:
        return sum(value * count for value, count in seen[first:last]) / sum(count for _, count in seen[first:last])

    rows = {kind: [row for row in result.history if row["kind"] == kind] for kind in ("step", "epoch")}
    assert [row["step"] for row in rows["step"]] == [2, 3, 4, 6]
    assert [row["loss"] for row in rows["step"]] == pytest.approx([mean(0, 2), mean(2, 3), mean(3, 4), mean(4, 6)])
    assert [row["train_loss"] for row in rows["epoch"]] == pytest.approx([mean(0, 3), mean(3, 6)])
    assert result.scores["train_loss"] == rows["epoch"][1]["train_loss"]


def test_a_run_without_a_folder_and_one_with_it_are_the_same(tmp_path):
    one, two = make_model(), make_model()
    first = fit(one, data(), data(), SGD, verbose=False)
    second = fit(two, data(), data(), SGD, folder=tmp_path / "run", verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))
    assert first.scores == second.scores
    assert Run.read(tmp_path / "run").metrics() == second.history


def test_training_does_not_touch_the_caller_s_random_numbers():
    model = nn.Sequential(nn.Dropout(0.5), make_model())
    state = torch.get_rng_state()
    fit(model, data(), None, SGD, verbose=False)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- schedules


def torch_schedule(config: TrainConfig, per_epoch: int, make) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule, found = make(optimizer), []
    for _ in range(config.epochs * per_epoch):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        ("step", lambda o: torch.optim.lr_scheduler.StepLR(o, 2 * 7, 0.7)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5 * 7)),
        ("poly", lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5 * 7, 0.9)),
        ("onecycle", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, 5 * 7, final_div_factor=1e5 / 25)),
    ],
)
def test_schedules_are_pytorch_s(name, make):
    config = TrainConfig(epochs=5, lr=0.3, schedule=name, decay_every=2)
    found = [step_size(config, step, 7) for step in range(35)]
    assert found == pytest.approx(torch_schedule(config, 7, make), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "cosine", "poly"])
@pytest.mark.parametrize(("warmup", "steps", "below"), [(1.5, 15, 16), (0.25, 3, 3)])  # 2.5 steps end with the third
def test_warmup_grows_linearly_to_the_step_size(name, warmup, steps, below):
    config = TrainConfig(epochs=5, lr=0.3, schedule=name, warmup=warmup)
    found = [step_size(config, step, 10) for step in range(50)]
    assert found[:steps] == pytest.approx([0.3 * (k + 1) / below for k in range(steps)])
    assert found[steps] == pytest.approx(0.3)
    assert all(a >= b for a, b in pairwise(found[steps:]))


# ---------------------------------------------------------------- modes and options


def test_the_three_modes_of_algorithm_1():
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Equilibrium(DeepOptEq([OptEq(4, 5, 6)], regularizer=L2(), gamma=0.2)), nn.Linear(5, 2))

    implicit, unrolled, sam = (model() for _ in range(3))
    for made, mode in ((implicit, "implicit"), (unrolled, "unrolled"), (sam, "sam")):
        fit(made, data(), None, replace(SGD, mode=mode, unroll=3), verbose=False)
    assert isinstance(implicit[0].gradient, Implicit)
    assert unrolled[0].gradient == Unrolled(3)
    assert unrolled[0].solver is None
    assert unrolled[0].cell.regularizer is not None
    assert sam[0].gradient == Unrolled(3)
    assert isinstance(sam[0].solver, SAM)
    assert sam[0].cell.regularizer is None
    found = [weights(made)[0] for made in (implicit, unrolled, sam)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    again = sam[0].solver
    set_mode(sam, "sam", 4)
    assert sam[0].solver is again
    with pytest.raises(ValueError, match="mode='sam' needs a DeepOptEq with a regularizer"):
        set_mode(make_model(), "sam", 3)
    with pytest.raises(ValueError, match="the model has none"):
        set_mode(nn.Linear(2, 2), "implicit", 3)
    with pytest.raises(ValueError, match="'mode' parameter of set_mode must be one of 'own', 'implicit', 'unrolled', 'sam'"):
        set_mode(make_model(), "implict", 3)


def test_warm_starts_begin_where_the_sample_ended_and_save_steps():
    cold, warm = make_model(), make_model()
    config = replace(SGD, epochs=6, lr=1e-4)
    without = fit(cold, data(), None, config, verbose=False).history
    result = fit(warm, data(), None, replace(config, warm_start=True), verbose=False).history
    assert without[0]["solver_steps"] == result[0]["solver_steps"]
    last = [[row for row in rows if row["kind"] == "epoch"][-1]["solver_steps"] for rows in (without, result)]
    assert last[1] < last[0]


def test_a_warm_start_hands_each_sample_its_own_state():
    model = make_model()
    warm, starts = WarmStart(model, 30), []
    model[1].solve = lambda x, z0=None, real=model[1].solve: (starts.append(z0), real(x, z0))[1]
    x, _ = data()
    with torch.no_grad():
        with warm.of(torch.tensor([3, 5])):
            z = model[1](model[0](x[[3, 5]]))
        with warm.of(torch.tensor([5, 9])):
            model[1](model[0](x[[5, 9]]))
    assert starts[0] is None
    assert torch.equal(starts[1], torch.stack([z[1], torch.zeros(6)]))
    assert torch.equal(warm.states[3], z[0])
    assert not model[1]._forward_hooks
    with pytest.raises(ValueError, match=r"a model with one Equilibrium\. Got one with 0"):
        WarmStart(nn.Linear(2, 2), 3)


def test_the_jacobian_penalty_estimates_the_frobenius_norm():
    model = make_model(torch.float64)
    x = data()[0][:3].double()
    penalty = JacobianPenalty(model)
    with penalty.watching():
        model(x)
    inputs = model[0](x)
    solved = model[1].solve(inputs)
    fn = model[1].cell.bind(inputs)
    dense = torch.autograd.functional.jacobian(lambda z: fn(z).sum(0), solved.z)  # [6, 3, 6]
    wanted = float(dense.square().sum() / (3 * 6))
    torch.manual_seed(0)
    draws = torch.stack([penalty.value().detach() for _ in range(3000)])
    assert float(draws.mean()) == pytest.approx(wanted, rel=0.05)
    penalty.value().backward()
    assert model[1].cell.W.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="the model has no Equilibrium"):
        JacobianPenalty(nn.Linear(2, 2))


@pytest.mark.parametrize("option", [{"jacobian": 0.1}, {"warm_start": True}])
def test_options_that_look_at_equilibria_work_in_a_classifier_and_say_where_they_do_not(option):
    torch.manual_seed(0)
    model = Classifier(nn.Linear(4, 5), OptEq(5, 6, 7), nn.Linear(6, 2))
    assert fit(model, data(), None, replace(SGD, **option), verbose=False).steps == 6

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = Equilibrium(OptEq(4, 6, 7)), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer.solve(x).z)

    with pytest.raises(ValueError, match="needs a model that calls its Equilibrium"):
        fit(Around(), data(), None, replace(SGD, **option), verbose=False)


@pytest.mark.parametrize("option", [{"jacobian": 0.1}, {"warm_start": True}])
def test_options_that_look_at_equilibria_see_an_input_that_is_given_by_name(option):
    class ByName(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[1](x=self[0](x)))

    plain = make_model()
    named = ByName(*make_model())
    for model in (plain, named):
        fit(model, data(), None, replace(SGD, **option), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(named), strict=True))


def test_the_jacobian_penalty_shrinks_the_jacobian():
    plain, held = make_model(), make_model()
    config = replace(SGD, epochs=10)
    fit(plain, data(), None, config, verbose=False)
    fit(held, data(), None, replace(config, jacobian=100.0), verbose=False)
    assert torch.linalg.matrix_norm(held[1].cell.W, 2) < 0.75 * torch.linalg.matrix_norm(plain[1].cell.W, 2)


def test_learnable_alphas_are_among_the_metrics():
    torch.manual_seed(0)
    cell = DeepOptEq([OptEq(4, 5, 6, alpha=0.8), OptEq(4, 5, 6, alpha=0.5)], learn_alpha=True)
    result = fit(nn.Sequential(Equilibrium(cell), nn.Linear(5, 2)), data(), None, SGD, verbose=False)
    epochs = [row for row in result.history if row["kind"] == "epoch"]
    assert epochs[-1]["alpha"] == {f"0.cell.cells.{at}": float(layer.alpha.detach()) for at, layer in enumerate(cell.layers)}
    assert epochs[0]["alpha"] != epochs[1]["alpha"]


@pytest.mark.parametrize("constrained", [False, True])
def test_norms_are_among_the_metrics_of_every_epoch(constrained):
    model = make_model(constrained=constrained)
    result = fit(model, data(), None, replace(SGD, norms="warn", epochs=6), verbose=False)
    epochs = [row for row in result.history if row["kind"] == "epoch"]
    exact = float(torch.linalg.matrix_norm(model[1].cell.W.detach(), 2))
    assert epochs[-1]["norms"] == {"1.cell": pytest.approx(exact, rel=1e-5 if constrained else 0.05)}
    assert epochs[-1]["norms"]["1.cell"] <= exact * (1 + 1e-5)
    assert epochs[0]["norms"] != epochs[-1]["norms"]
    quiet = fit(make_model(constrained=constrained), data(), None, SGD, verbose=False)
    assert not any("norms" in row for row in quiet.history), "nobody looked"


def test_the_norms_of_images_are_those_of_the_convolution():
    torch.manual_seed(0)
    layer = Equilibrium(ConvOptEq(2, 3, 4, constrained=True, padding="circular"))
    norms = Norms(layer).by_layer()
    dense = torch.func.jacrev(lambda z: layer.cell.operator()(z.view(1, 3, 8, 8)).flatten())(torch.zeros(3 * 64)).detach()
    exact = float(torch.linalg.matrix_norm(dense, 2))
    assert list(norms) == ["cell"]
    assert 0.999 * exact <= norms["cell"] <= 1.05 * exact  # for images of every size


def test_a_resumed_run_logs_the_same_norms(tmp_path):
    config = replace(SGD, norms="warn", checkpoint_every=2, epochs=3)

    class Leave(Callback):
        def step(self, step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

    whole = fit(make_model(), data(), None, config, verbose=False)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), data(), None, config, folder=tmp_path / "run", callbacks=[Leave()], verbose=False)
    again = fit(make_model(), data(), None, config, folder=tmp_path / "run", resume=True, verbose=False)
    found = [[row["norms"] for row in result.history if row["kind"] == "epoch"] for result in (whole, again)]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_early_stopping_keeps_the_best_weights():
    x, y = data()
    model, seen = make_model(), {}

    class Spoil(Callback):
        """After the third epoch, every step makes the model worse."""

        def row(self, row) -> None:
            if row["kind"] == "epoch":
                seen[row["epoch"]] = weights(model)
                if row["epoch"] >= 3:
                    with torch.no_grad():
                        model[2].weight.neg_()

    result = fit(model, (x, y), (x, y), replace(SGD, epochs=20, patience=2), callbacks=[Spoil()], verbose=False)
    scores = {row["epoch"]: row["valid_accuracy"] for row in result.history if row["kind"] == "epoch"}
    best = max(scores, key=lambda epoch: (scores[epoch], -epoch))
    assert result.stopped == "patience"
    assert result.epochs == best + 2
    assert result.scores["valid_accuracy"] == scores[best]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), seen[best], strict=True))


def test_half_precision_needs_a_gpu():
    with pytest.raises(ValueError, match="'precision' parameter of fit must be 'float32' or 'bfloat16' without a GPU"):
        fit(make_model(), data(), None, replace(SGD, precision="float16", device="cpu"), verbose=False)


def test_augmentation_moves_images_and_their_label_maps_alike():
    x = torch.rand(8, 1, 6, 6)
    y = (x[:, 0] > 0.5).long()
    seen = []

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([0.5 - x, x - 0.5], 1) * 100 * self.scale

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.append((output.detach(), y))
        return output.square().mean() * 0 + output.sum() * 0

    fit(Judge(), (x, y), None, replace(SGD, crop=2, flip=True, epochs=1), loss=loss, ignore=7, verbose=False)
    output, moved = seen[0]
    inside = moved != 7
    assert int((~inside).sum()) > 0
    assert torch.equal((output.argmax(1) == 1)[inside], moved[inside].bool())


class Sides(nn.Module):
    """Notes the sizes of the images that it is given in training."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(1, 2), []

    def forward(self, x):
        if self.training:
            self.seen.append(tuple(x.shape[2:]))
        return self.linear(x.mean((2, 3)))


def test_images_are_shrunk_in_equal_parts_of_the_training_and_whole_in_the_validation():
    x, y = torch.rand(20, 1, 6, 9), torch.arange(20) % 2
    model = Sides()
    fit(model, (x, y), (x, y), replace(SGD, sizes=(2, 4, 8), epochs=3), verbose=False)
    assert model.seen == [(2, 3)] * 2 + [(4, 6)] * 2 + [(6, 9)] * 2  # never larger than they are
    shrunk, whole = Sides(), Sides()
    whole.load_state_dict(shrunk.state_dict())
    for made, sizes in ((shrunk, (3,)), (whole, ())):  # images of one grey stay what they are
        fit(made, (torch.full((20, 1, 6, 9), 0.5), y), None, replace(SGD, sizes=sizes, epochs=1), verbose=False)
    assert shrunk.seen == [(3, 4)] * 2
    torch.testing.assert_close(shrunk.linear.weight, whole.linear.weight)


def test_a_training_with_sizes_resumes(tmp_path):
    class StopError(Exception):
        pass

    def stop(step):
        if step == 3:
            raise StopError

    x, y = torch.rand(20, 1, 6, 9), torch.arange(20) % 2
    config, models = replace(SGD, sizes=(2, 4, 8), epochs=3, checkpoint_every=1), [Sides(), Sides()]
    models[1].load_state_dict(models[0].state_dict())
    fit(models[0], (x, y), None, config, verbose=False)
    with pytest.raises(StopError):
        fit(models[1], (x, y), None, config, folder=tmp_path / "run", callbacks=[stop], verbose=False)
    fit(models[1], (x, y), None, config, folder=tmp_path / "run", resume=True, verbose=False)
    assert models[1].seen[-3:] == [(4, 6)] + [(6, 9)] * 2
    assert torch.equal(models[0].linear.weight, models[1].linear.weight)


def test_sizes_are_for_images_with_one_label():
    x, y = torch.rand(20, 1, 6, 6), torch.zeros(20, 6, 6, dtype=torch.int64)
    for wrong in ((x, y), (x.flatten(1), y[:, 0, 0])):
        with pytest.raises(ValueError, match="'sizes' parameter of fit must be \\(\\) for data that are not images"):
            fit(nn.Sequential(nn.Conv2d(1, 2, 1)) if wrong[1].ndim > 1 else nn.Linear(36, 2), wrong, None, replace(SGD, sizes=(3,)))
    with pytest.raises(ValueError, match="'warm_start' parameter of TrainConfig must be False with sizes"):
        TrainConfig(sizes=(3,), warm_start=True)
    with pytest.raises(ValueError, match="'sizes' parameter of TrainConfig must be an integer >= 1"):
        TrainConfig(sizes=(3, 0))


@pytest.mark.parametrize(
    ("x", "y", "settings", "words"),
    [
        (torch.rand(20, 36), torch.zeros(20).long(), {"crop": 2}, "'crop' parameter of fit must be 0 for data that are not images"),
        (torch.rand(20, 36), torch.zeros(20).long(), {"flip": True}, "'flip' parameter of fit must be False for data that are not"),
        (torch.rand(20, 2, 6, 6), torch.zeros(20, 2, 6, 6), {"flip": True}, "'flip' parameter of fit must be False"),
        (torch.rand(20, 2, 6, 6), torch.zeros(20, 6, 6).long(), {"crop": 1}, "'ignore' parameter of fit must be given"),
    ],
)
def test_an_augmentation_that_the_data_do_not_allow_is_refused_before_there_is_a_folder(x, y, settings, words, tmp_path):
    model = nn.Conv2d(2, 2, 1) if x.ndim > 2 else nn.Linear(36, 2)
    with pytest.raises(ValueError, match=words):
        fit(model, (x, y), None, replace(SGD, **settings), folder=tmp_path / "run", verbose=False)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- scores


def test_scores_of_label_maps_equal_a_count_by_hand():
    torch.manual_seed(0)
    output, y = torch.randn(4, 3, 5, 5), torch.randint(0, 3, (4, 5, 5))
    y[0, :2] = 9
    objective, score = Objective(ignore=9), Score()
    for rows in (slice(0, 1), slice(1, 4)):
        loss, terms = objective(output[rows], y[rows])
        score.add(objective, output[rows], y[rows], float(loss), terms)
    found, kept, said = score.means(), y != 9, output.argmax(1)
    assert found["loss"] == pytest.approx(float(cross_entropy(output, y, ignore_index=9)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((said == y)[kept].float().mean()))
    ious = [float(((said == c) & (y == c)).sum() / (((said == c) | (y == c)) & kept).sum()) for c in range(3)]
    accuracies = [float(((said == c) & (y == c)).sum() / (y == c).sum()) for c in range(3)]
    assert found["miou"] == pytest.approx(sum(ious) / 3)
    assert found["mean_accuracy"] == pytest.approx(sum(accuracies) / 3)


def test_a_class_that_neither_occurs_nor_is_predicted_does_not_count():
    output = torch.zeros(1, 3, 2, 2)
    output[:, 1] = 1
    y = torch.ones(1, 2, 2, dtype=torch.long)
    score = Score()
    score.add(Objective(), output, y, 0.0, 4.0)
    assert score.means() == {"loss": 0.0, "accuracy": 1.0, "miou": 1.0, "mean_accuracy": 1.0}


def test_labels_that_are_left_out_count_nowhere():
    output, y = torch.randn(10, 3), torch.arange(10) % 3
    y[:4] = 9
    score, objective = Score(), Objective(ignore=9)
    score.add(objective, output, y, *(float(v) for v in objective(output, y)))
    assert score.means()["accuracy"] == pytest.approx((output[4:].argmax(1) == y[4:]).float().mean().item())
    for void in (255, -1):  # of a loss of one's own, which knows its void label
        maps, own = torch.randint(0, 3, (2, 4, 4)), Score()
        maps[0, 0] = void
        own.add(Objective(own=nn.CrossEntropyLoss(ignore_index=void)), torch.randn(2, 3, 4, 4), maps, 0.0, 2.0)
        assert own.judged == 28


def test_a_loss_of_one_s_own_decides_what_is_best():
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 1))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.float())

    result = fit(model, (x, y), (x, y), replace(SGD, epochs=6, patience=2), loss=loss, verbose=False)
    assert result.stopped is None
    assert "valid_accuracy" not in result.scores


def test_a_validation_of_nan_is_never_the_best():
    calls = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = cross_entropy(output, y)
        if torch.is_grad_enabled():
            return value
        calls.append(0)
        return value * (math.nan if len(calls) <= 3 else 1.0)

    result = fit(make_model(), data(), data(), replace(SGD, epochs=4, patience=3), loss=loss, verbose=False)
    assert math.isfinite(result.scores["valid_loss"])


def test_evaluation_leaves_every_module_in_its_own_mode():
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    model[1].eval()
    x, y = data()
    evaluate(model, x, y.to(torch.uint8))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_evaluation_leaves_the_model_in_its_mode_and_does_not_depend_on_the_batches():
    model, (x, y) = nn.Sequential(make_model(), nn.Dropout(0.5)), data()
    found = [evaluate(model, x, y, batch_size=size) for size in (7, 30)]
    assert model.training
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["accuracy"] == pytest.approx(float((model.eval()(x).argmax(1) == y).float().mean()))
    assert found[0]["converged"] == 1.0


# ---------------------------------------------------------------- the guard


class Explode(Callback):
    """Spoils a tensor of the model after a step."""

    def __init__(self, tensor: Tensor, at: int, value: float = math.nan, once: bool = False) -> None:
        self.tensor, self.at, self.value, self.once, self.done = tensor, at, value, once, False

    def step(self, step: int) -> None:
        if step == self.at and not (self.once and self.done):
            self.done = True
            with torch.no_grad():
                self.tensor.fill_(self.value)


class Hook(Callback):
    """From a step on, a module's output is spoilt."""

    def __init__(self, part: nn.Module, at: int) -> None:
        self.part, self.at = part, at

    def step(self, step: int) -> None:
        if step == self.at:
            self.part.register_forward_hook(lambda part, args, output: output * math.nan)


@pytest.mark.parametrize(
    ("path", "what", "text"),
    [
        ("2", "nan_loss", r"the loss is nan; it began in layer '2' \(Linear\), 100%"),
        ("0", "nan_state", r"10 samples met NaN or infinity in layer '1'; it began in layer '0' \(Linear\), 100%"),
    ],
)
def test_a_nan_stops_the_run_at_its_step_with_its_cause_and_nothing_is_lost(tmp_path, path, what, text):
    model = make_model()
    config = replace(SGD, epochs=4, checkpoint_every=2)
    hook = Hook(model.get_submodule(path), 5)
    with pytest.raises(DivergenceError, match=r"step 5 \(epoch 1.67\): " + text) as caught:
        fit(model, data(), None, config, folder=tmp_path / "run", callbacks=[hook], verbose=False)
    assert (caught.value.step, caught.value.trouble.what, caught.value.trouble.layer) == (5, what, path)
    run = Run.read(tmp_path / "run")
    assert run.steps() == [0, 2, 4]
    event = run.metrics()[-1]
    assert (event["kind"], event["what"], event["action"], event["step"]) == ("event", what, "stopped", 5)
    kept = run.load(4).tensors
    assert all(torch.equal(tensor, kept[f"model.{name}"]) for name, tensor in model.state_dict().items())


def test_a_nan_of_the_iteration_itself_is_named_as_such():
    torch.manual_seed(0)
    layer = Equilibrium(FunctionCell(lambda z, x: torch.where(z.abs() > 0.4, math.nan, 0.5 * z + x[:, :3]), (3,)))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(3, 2))
    with pytest.raises(DivergenceError, match=r"samples met NaN or infinity in layer '1'; it began in its own iteration"):
        fit(model, data(), None, SGD, verbose=False)


def test_a_parameter_that_overflows_is_named_at_the_step_that_did_it():
    model = make_model()
    with pytest.raises(DivergenceError, match=r"step 0 .*: parameter '0.weight', .* is not finite") as caught:
        fit(model, data(), None, replace(SGD, lr=3e38), loss=lambda output, y: 1e6 * output.square().mean(), verbose=False)
    assert caught.value.trouble.what == "nan_parameter"
    assert all(tensor.isfinite().all() for tensor in weights(model))


def test_a_gradient_that_is_not_finite_is_named_before_it_does_harm():
    model = make_model()
    before = weights(model)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt((output * 0).square().sum())  # 0, with the derivative 0 / 0

    with pytest.raises(DivergenceError, match=r"NaN or infinity in the gradient of '2\.bias'") as caught:
        fit(model, data(), None, SGD, loss=loss, verbose=False)
    assert caught.value.trouble.what == "nan_gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_samples_that_stop_converging_are_caught_with_layer_and_share():
    model = make_model()
    with pytest.raises(DivergenceError, match=r"step 2 .*: only 0% of the samples converged in layer '1'") as caught:
        fit(model, data(), None, SGD, callbacks=[Explode(model[1].cell.W, 2, 10.0)], verbose=False)
    assert caught.value.trouble.figure == 0.0
    allowed = fit(make_model(), data(), None, replace(SGD, least_converged=0.0), verbose=False)
    assert allowed.steps == 6


def test_a_run_that_diverges_is_rolled_back_and_ends_well(tmp_path):
    x, y = data()
    model = make_model()
    config = replace(SGD, lr=60.0, epochs=8, checkpoint_every=2, on_divergence="rollback", rollbacks=20)
    with pytest.raises(DivergenceError):
        fit(make_model(), (x, y), (x, y), replace(config, on_divergence="stop"), verbose=False)
    result = fit(model, (x, y), (x, y), config, folder=tmp_path / "run", verbose=False)
    events = [row for row in result.history if row["kind"] == "event"]
    assert result.rollbacks == len(events) > 0
    assert {event["action"] for event in events} == {"rolled back"}
    assert all(event["from"] >= event["step"] for event in events)
    assert result.scores["valid_accuracy"] >= 0.9
    rates = [row["lr"] for row in result.history if row["kind"] == "step"]
    assert rates[-1] == pytest.approx(60.0 * 0.5**result.rollbacks)
    steps = [row["step"] for row in result.history if row["kind"] == "step"]
    assert steps == sorted(set(steps))


def test_a_rolled_back_run_resumes_with_its_smaller_step(tmp_path):
    config = replace(SGD, lr=60.0, epochs=4, checkpoint_every=2, on_divergence="rollback", rollbacks=20)

    class Leave(Callback):
        def step(self, step: int) -> None:
            if step == 9:
                raise KeyboardInterrupt

    whole, killed = make_model(), make_model()
    fit(whole, data(), None, config, folder=tmp_path / "whole", verbose=False)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, data(), None, config, folder=tmp_path / "killed", callbacks=[Leave()], verbose=False)
    again = make_model()
    result = fit(again, data(), None, config, folder=tmp_path / "killed", resume=True, verbose=False)
    assert result.rollbacks > 0
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


def test_rolling_back_ends_when_it_does_not_help():
    model = make_model()
    spoil = Explode(model[1].cell.W, 2, 10.0)
    config = replace(SGD, on_divergence="rollback", rollbacks=2)
    with pytest.raises(DivergenceError, match="after 2 roll-backs"):
        fit(model, data(), None, config, callbacks=[spoil], verbose=False)
    once = Explode(model[1].cell.W, 2, 10.0, once=True)
    assert fit(model, data(), None, config, callbacks=[once], verbose=False).rollbacks == 1


def test_a_norm_that_leaves_the_well_posed_region_is_told_once_or_stops():
    model, told = make_model(), Collect()
    grow = Explode(model[1].cell.W, 2, 0.3)  # norm 0.3 sqrt(42) = 1.94
    config = replace(SGD, least_converged=0.0, norms="warn", lr=1e-6)
    fit(model, data(), None, config, callbacks=[grow, told], verbose=False)
    events = [row for row in told.rows if row["kind"] == "event"]
    assert [(row["what"], row["layer"], row["step"], row["action"]) for row in events] == [("norm", "1.cell", 3, "warned")]
    assert "passed mu = 1 in layer '1.cell'" in events[0]["message"]
    assert events[0]["figure"] <= 0.3 * math.sqrt(42) + 1e-4
    model = make_model()
    with pytest.raises(DivergenceError, match=r"\|\|W\|\|\^2 L >= 3\.\d+ passed mu = 1 in layer '1.cell'"):
        fit(model, data(), None, replace(config, norms="stop"), callbacks=[Explode(model[1].cell.W, 2, 0.3)], verbose=False)


def test_a_resumed_run_does_not_tell_of_the_same_norm_again(tmp_path):
    config, model = replace(SGD, least_converged=0.0, norms="warn", lr=1e-6, checkpoint_every=1), make_model()

    class Leave(Callback):
        def step(self, step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

    grow = Explode(model[1].cell.W, 2, 0.3)
    with pytest.raises(KeyboardInterrupt):
        fit(model, data(), None, config, folder=tmp_path / "run", callbacks=[grow, Leave()], verbose=False)
    result = fit(make_model(), data(), None, config, folder=tmp_path / "run", resume=True, verbose=False)
    assert [row["step"] for row in result.history if row["kind"] == "event"] == [3]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (GaussianDEQ(3, 5), r"\|\|W\|\| >= 1\.5 passed 1"),
        (ScaledReLU(3, 5, gamma=0.5), r"gamma \|\|A\|\| >= 1\.5 passed 1"),
        (OptEq(3, 5, 5, mu=2.0), r"\|\|W\|\|\^2 L >= 2\.25 passed mu = 2"),
    ],
)
def test_each_family_has_its_own_limit(cell, text):
    weight = cell.A if isinstance(cell, ScaledReLU) else cell.W
    factor = 3.0 if isinstance(cell, ScaledReLU) else 1.5
    with torch.no_grad():
        weight.copy_(torch.eye(5) * 0.9)
    norms = Norms(nn.Sequential(Equilibrium(cell)))
    assert norms.step({}) == []
    with torch.no_grad():
        weight.copy_(torch.eye(5) * factor)
    (found,) = norms.step({})
    assert torch.tensor(found.figure).item() == pytest.approx(factor)
    assert re.search(text, found.message)
    assert norms.step({}) == [], "told once"


def test_the_norm_of_a_convolution_is_followed_on_the_size_of_its_images():
    torch.manual_seed(0)
    layer = Equilibrium(ConvOptEq(2, 3, 4))
    watch, norms = Watch.of(layer), Norms(layer)
    assert norms.step(watch.shapes) == [], "no image has been seen yet"
    with observe(watch):
        layer(torch.randn(2, 2, 5, 6))
    for _ in range(200):
        norms.step(watch.shapes)
    W = layer.cell.operator()
    columns = [W(e.reshape(1, 3, 5, 6)).flatten() for e in torch.eye(90)]
    exact = torch.linalg.matrix_norm(torch.stack(columns, 1), 2).item()
    with torch.no_grad():
        layer.cell.W /= 0.999 * exact
    norms.step(watch.shapes)
    found = norms.step(watch.shapes) or norms.passed
    assert found, "1 / 0.999 is above the limit of 1"


def test_each_convolution_is_watched_on_the_images_of_its_own_layer():
    """Names that begin alike, states with one more axis, and a model that is itself the layer."""
    parts = [nn.Identity() for _ in range(11)]
    parts[1], parts[10] = Equilibrium(ConvOptEq(2, 3, 4)), Equilibrium(ConvOptEq(3, 5, 4))
    model = nn.Sequential(*parts)
    stacked = Equilibrium(StackedOptEq([ConvOptEq(2, 3, 4), ConvOptEq(2, 3, 4)]))
    for made, sizes in (
        (model, {"1.cell": (3, 4, 6), "10.cell": (5, 4, 6)}),
        (stacked, {"cell.cells.0": (3, 4, 6), "cell.cells.1": (3, 4, 6)}),
    ):
        watch, norms = Watch.of(made), Norms(made)
        with observe(watch), torch.no_grad():
            made(torch.randn(2, 2, 4, 6))
        norms.step(watch.shapes)
        assert {name: tuple(v.shape[1:]) for name, v in norms.vectors.items()} == sizes


def test_two_weights_that_pass_at_once_are_both_told_and_a_weight_at_its_limit_is_not():
    cells = [OptEq(3, 4, 4), OptEq(3, 4, 4)]
    norms = Norms(nn.Sequential(Equilibrium(DeepOptEq(cells))))
    with torch.no_grad():
        for cell in cells:
            cell.W.copy_(torch.linalg.qr(torch.randn(4, 4)).Q)
        assert norms.step({}) == []
        for cell in cells:
            cell.W.mul_(1.01)
    assert [trouble.layer for trouble in norms.step({})] == ["0.cell.cells.0", "0.cell.cells.1"]


def test_layers_that_share_a_cell_are_told_apart():
    torch.manual_seed(0)
    cell = OptEq(4, 4, 5)
    model = nn.Sequential(Equilibrium(cell, Picard(), Stop(rtol=1e-9, max_steps=1), on_failure="ignore"), Equilibrium(cell))
    watch = Watch.of(model)
    with observe(watch), torch.no_grad():
        model(torch.randn(6, 4))
    assert [(name, health.converged) for name, health in watch.layers.items()] == [("0", 0.0), ("1", 6.0)]


def test_a_weight_of_zero_is_no_trouble_and_is_watched_when_it_grows():
    cell = OptEq(3, 4, 4)
    norms = Norms(nn.Sequential(Equilibrium(cell)))
    with torch.no_grad():
        cell.W.zero_()
        assert [norms.step({}) for _ in range(3)] == [[], [], []]
        cell.W.copy_(2 * torch.eye(4))
    assert [trouble.figure for trouble in norms.step({})] == [pytest.approx(2.0)]


def test_constrained_and_monotone_layers_are_not_watched():
    assert not Norms(nn.Sequential(Equilibrium(OptEq(2, 3, 3, constrained=True)), Equilibrium(Monotone(3, 3)))).weights


class Stubborn(nn.Module):
    """f(z, x) = z + 1 where x begins with a number above 5: no solution."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 5, z + 1, 0.3 * torch.tanh(z) + x[:, :3])


def stubborn_model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    layer = Equilibrium(FunctionCell(Stubborn(), (3,)), stop=Stop(max_steps=20), **options)
    return nn.Sequential(layer, nn.Linear(3, 2))


def test_one_sample_that_never_converges_does_not_stop_a_training_even_alone_in_its_batch():
    x, y = data(31)
    x[:, 0] = x[:, 0].clamp(-2, 2)
    x[3, 0] = 9.0
    alone = Collect()
    result = fit(stubborn_model(), (x, y), None, replace(SGD, epochs=10), callbacks=[alone], verbose=False)
    assert result.steps == 40  # in 10 epochs of 31 samples in batches of 10, some sample is alone in each
    assert all(0.9 <= row["converged"] < 1 for row in alone.rows if row["kind"] == "epoch")
    x[:20, 0] = 9.0
    with pytest.raises(DivergenceError, match="of the samples converged in layer '0'"):
        fit(stubborn_model(), (x, y), None, replace(SGD, epochs=10), verbose=False)


def test_a_resumed_run_remembers_a_batch_too_small_to_judge_by(tmp_path):
    config = replace(SGD, least_converged=0.85, checkpoint_every=1)
    plan, calls, (x, y) = Plan(11, 10, config.seed, drop_last=False), [], data(11)
    (alone,) = plan.rows(1).tolist()
    assert alone in plan.rows(2)  # 9 of 10 converge in that batch, and 9 of 11 with the one before
    x[:, 0] = x[:, 0].clamp(-2, 2)
    x[alone, 0] = 9.0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return cross_entropy(output, y)

    with pytest.raises(KeyboardInterrupt):
        fit(stubborn_model(), (x, y), None, config, loss=loss, folder=tmp_path / "run", verbose=False)
    with pytest.raises(DivergenceError, match=r"step 2 .*: only 82% of the samples converged"):
        fit(stubborn_model(), (x, y), None, config, loss=loss, folder=tmp_path / "run", resume=True, verbose=False)


def test_layers_that_raise_are_under_the_guard_too():
    x, y = data()
    x[:, 0] = 9.0
    config = replace(SGD, on_divergence="rollback", rollbacks=2)
    model = stubborn_model(on_failure="raise")
    with pytest.raises(ConvergenceError):  # from the start: nothing to go back to
        fit(model, (x, y), None, config, verbose=False)
    good = data()
    model, calls = make_model(), []
    model[1].on_failure = "raise"

    class Once(Callback):
        def step(self, step: int) -> None:
            if step == 3 and not calls:
                calls.append(step)
                with torch.no_grad():
                    model[1].cell.W.fill_(10.0)

    result = fit(model, good, None, config, callbacks=[Once()], verbose=False)
    assert (result.steps, result.rollbacks) == (6, 1)
    model = make_model()
    model[1].on_failure, model[1].gradient = "raise", Implicit(Stop(rtol=1e-15, max_steps=1), GMRES())
    with pytest.raises(DivergenceError, match="after 2 roll-backs: Equilibrium, backward solve"):
        fit(model, good, None, config, verbose=False)


def test_a_monitor_goes_back_with_a_roll_back():
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    readout = Readout(GaussianDEQ(4, 30).double())
    monitor = Monitor(readout, x, y, step=0.01, kernel=False)
    config = replace(SGD, batch_size=6, epochs=5, lr=0.01, on_divergence="rollback", checkpoint_every=1)
    spoil = Explode(readout.a, 3, math.inf, once=True)
    result = fit(readout, (x, y), None, config, callbacks=[monitor, spoil], verbose=False)
    assert result.rollbacks == 1
    assert [record.k for record in monitor.records] == [0, 1, 2, 3, 4, 5]
    assert [row["k"] for row in result.history if row["kind"] == "monitor"] == [1, 2, 3, 4, 5]


def test_after_stopping_the_model_never_has_weights_that_are_known_to_be_bad():
    model = make_model()

    class Overflow(Callback):
        """The weights stay finite, the loss does not; the checkpoint of step 2 has such weights."""

        def step(self, step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    model[2].weight[0], model[2].weight[1] = 3e38, -3e38

    with pytest.raises(DivergenceError, match="The model has the weights of step 1 again"):
        fit(model, data(), None, replace(SGD, checkpoint_every=1), callbacks=[Overflow()], verbose=False)
    assert model(data()[0]).isfinite().all()


def test_a_nan_in_data_that_is_read_late_is_named_as_such():
    class Lazy:
        shape, dtype = (30, 4), torch.float32

        def __len__(self) -> int:
            return 30

        def __getitem__(self, rows: Tensor) -> Tensor:
            found = data()[0][rows]
            found[rows == 7] = math.nan
            return found

    with pytest.raises(DivergenceError, match="it began in the batch itself: look at the data"):
        fit(nn.Linear(4, 2), (Lazy(), data()[1]), None, SGD, verbose=False)


def test_a_model_that_cannot_be_copied_still_stops_in_order():
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)  # a tensor of the graph cannot be copied
            return self.kept * (math.nan if torch.is_grad_enabled() else 1.0)

    with pytest.raises(DivergenceError, match="it began in a place that could not be found"):
        fit(Keeps(4, 2), data(), None, SGD, verbose=False)


# ---------------------------------------------------------------- what is refused


def test_bad_samples_are_refused_before_the_first_step():
    model, (x, y) = make_model(), data()
    cases = [
        (((x, y[:5]),), "as many targets y"),
        (((x[:0], y[:0]),), "not none"),
        (((x.double() * math.nan, y),), "finite. Got 'NaN or infinity in sample 0'"),
        (((x, y + 1),), r"labels in 0..1, the classes of the model's output. Got '1..2'"),
        (((x, y - 1),), r"labels in 0..1.*Got '-1..0'"),
        (((x[:, :3], y),), r"The model cannot take the samples of 'train', of shape \[3\]"),
        (((x, y), (x[:, :3], y)), r"The model cannot take the samples of 'valid', of shape \[3\]"),
        (((x, x[:, 0]),), r"output has the shape of y"),
        (((x, x[:, :2] * math.nan),), r"'y' parameter of fit must be finite"),
        (((x, y[:, None].expand(-1, 3)),), r"one whose output is \[batch, classes, 3\]"),
    ]
    before = weights(model)
    for given, text in cases:
        with pytest.raises(ValueError, match=text):
            fit(model, *given, config=SGD, verbose=False)
    with pytest.raises(TypeError, match="floating-point x"):
        fit(model, (x.long(), y), None, SGD, verbose=False)
    for pair in ((x.numpy(), y), (x, y.numpy()), x, None, 3, [(x, y)]):
        with pytest.raises(TypeError, match=r"'train' parameter of fit must be a Split or a pair \(x, y\) of tensors"):
            fit(model, pair, None, SGD, verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_bad_calls_are_refused():
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(x)}

    with pytest.raises(TypeError, match=r"one whose output is a tensor\. Got 'dict'"):
        fit(Two(4, 2), data(), verbose=False)
    for device in ("cuda:7", "warp"):
        with pytest.raises(ValueError, match=f"'device' parameter of fit must be a device of this machine.*{device}"):
            fit(make_model(), data(), None, replace(SGD, device=device), verbose=False)
    with pytest.raises(ValueError, match="one with parameters to train"):
        fit(nn.Flatten(), data(), verbose=False)
    with pytest.raises(ValueError, match="'valid' parameter of fit must be given, for patience"):
        fit(make_model(), data(), None, replace(SGD, patience=2), verbose=False)
    with pytest.raises(ValueError, match="'folder' parameter of fit must be given, to resume"):
        fit(make_model(), data(), None, SGD, resume=True, verbose=False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", torch.relu, "a torch.nn.Module"),
        ("config", {"lr": 0.1}, "a TrainConfig"),
        ("loss", "mse", "a function of"),
        ("about", ["digits"], "a dict"),
        ("callbacks", print, "a list of Callbacks"),
        ("callbacks", [3], "a list of Callbacks"),
    ],
)
def test_an_argument_of_another_type_is_named(name, value, words):
    with pytest.raises(TypeError, match=f"'{name}' parameter of fit must be {words}"):
        fit(**{"model": make_model(), "train": data(), "config": SGD, "verbose": False, name: value})


@pytest.mark.parametrize("name", ["train", "fingerprint"])
def test_what_is_said_about_a_run_leaves_its_own_configuration_alone(name, tmp_path):
    with pytest.raises(ValueError, match=f"'about' parameter of fit must be without.*{name}"):
        fit(make_model(), data(), None, SGD, folder=tmp_path / "run", about={name: "mine"}, verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_is_one_number():
    def of_each(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y, reduction="none")

    for loss, got in ((of_each, r"\[10\]"), (lambda output, y: None, "NoneType"), (lambda output, y: 1.0, "float")):
        with pytest.raises(TypeError, match=rf"'loss' parameter of fit must be .* one number.* Got '?{got}'? instead"):
            fit(make_model(), data(), None, SGD, loss=loss, verbose=False)


def test_label_smoothing_is_for_classes():
    with pytest.raises(ValueError, match="'label_smoothing' parameter of fit must be 0 for real targets"):
        fit(make_model(), (data()[0], torch.zeros(30, 2)), None, replace(SGD, label_smoothing=0.1), verbose=False)
    models = [make_model(), make_model()]
    for model, smoothing in zip(models, (0.0, 0.1), strict=True):  # a loss of one's own is taken as it is
        fit(model, data(), None, replace(SGD, label_smoothing=smoothing), loss=cross_entropy, verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(*map(weights, models), strict=True))


def test_scores_are_of_as_many_targets_as_samples():
    model, (x, y) = make_model(), data()
    for samples, targets in ((x, y[:5]), (x[:5], y)):
        with pytest.raises(ValueError, match=f"'y' parameter of evaluate must be {len(samples)} targets, one for each sample"):
            evaluate(model, samples, targets)
    with pytest.raises(ValueError, match="'batch_size' parameter of evaluate must be an integer >= 1"):
        evaluate(model, x, y, batch_size=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 10**30),
        ("seed", 2**31),
        ("batch_size", 2.5),
        ("optimizer", "lion"),
        ("lr", 0.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("schedule", "linear"),
        ("mode", "magic"),
        ("clip", 0.0),
        ("ema", 1.0),
        ("label_smoothing", 1.0),
        ("precision", "float8"),
        ("patience", 0),
        ("shrink", 1.0),
        ("least_converged", 1.5),
        ("on_divergence", "pray"),
        ("norms", "maybe"),
        ("seed", -1),
        ("warm_start", 1),
        ("decay", 0.0),
        ("checkpoint_every", 0),
    ],
)
def test_every_setting_is_checked_by_name(name, value):
    with pytest.raises((ValueError, TypeError), match=f"The '{name}' parameter of TrainConfig must be"):
        TrainConfig(**{name: value})


def test_every_setting_has_a_type_that_json_knows():
    known = (int, float, str, bool, type(None), tuple)  # a tuple becomes a list
    assert all(isinstance(getattr(TrainConfig(), field.name), known) for field in fields(TrainConfig))


# ---------------------------------------------------------------- run folders


def test_a_second_run_in_a_folder_is_refused_and_so_is_resuming_nothing(tmp_path):
    fit(make_model(), data(), None, SGD, folder=tmp_path / "run", verbose=False)
    with pytest.raises(RunError, match="already holds a run"):
        fit(make_model(), data(), None, SGD, folder=tmp_path / "run", verbose=False)
    with pytest.raises(RunError, match="holds no run"):
        fit(make_model(), data(), None, SGD, folder=tmp_path / "other", resume=True, verbose=False)


def test_resuming_with_other_settings_data_or_model_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    fit(make_model(), data(), None, SGD, folder=folder, about={"model": {"kind": "a"}}, verbose=False)
    about = {"model": {"kind": "a"}}
    changed, frozen = data(), make_model()
    changed[0][17, 2] += 1e-3
    frozen[0].requires_grad_(False)
    cases = [
        ((make_model(), data(), None, replace(SGD, lr=0.2)), about, r"train.lr: 0.1 -> 0.2"),
        ((make_model(), data(20), None, SGD), about, r"fingerprint.train"),
        ((make_model(), changed, None, SGD), about, r"fingerprint.train"),
        ((make_model(), data(), data(), SGD), about, r"fingerprint.valid"),
        ((frozen, data(), None, SGD), about, r"fingerprint.model"),
        ((nn.Linear(4, 2), data(), None, SGD), about, r"fingerprint.model"),
        ((make_model(), data(), None, SGD), {"model": {"kind": "b"}}, r"model.kind: '?\"?a'?\"? -> '?\"?b"),
    ]
    for given, what, text in cases:
        with pytest.raises(RunError, match=text):
            fit(*given, folder=folder, about=what, resume=True, verbose=False)


def test_settings_that_do_not_change_the_result_may_change_on_resuming(tmp_path):
    folder = tmp_path / "run"
    fit(make_model(), data(), None, SGD, folder=folder, verbose=False)
    changed = replace(SGD, log_every=3, keep=2, checkpoint_every=1, on_divergence="rollback", rollbacks=1, shrink=0.3, device="cpu")
    assert fit(make_model(), data(), None, changed, folder=folder, resume=True, verbose=False).steps == 6


def test_a_run_without_a_sound_checkpoint_is_not_begun_anew_by_resuming(tmp_path):
    fit(make_model(), data(), None, SGD, folder=tmp_path / "run", verbose=False)
    for path in (tmp_path / "run" / "checkpoints").glob("*.json"):
        path.write_text("{}")
    with pytest.warns(RunWarning), pytest.raises(RunError, match="no checkpoint that can be used"):
        fit(make_model(), data(), None, SGD, folder=tmp_path / "run", resume=True, verbose=False)


def test_a_finished_run_resumes_to_its_end_at_once(tmp_path):
    model, again = make_model(), make_model()
    first = fit(model, data(), data(), SGD, folder=tmp_path / "run", verbose=False)
    told = Collect()
    second = fit(again, data(), data(), SGD, folder=tmp_path / "run", resume=True, callbacks=[told], verbose=False)
    assert told.steps == []
    assert second.scores == first.scores
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))


# ---------------------------------------------------------------- callbacks and what is shown


def test_callbacks_hear_of_every_step_and_row_and_are_closed(tmp_path):
    told = Collect()
    result = fit(make_model(), data(), data(), SGD, callbacks=[told], verbose=False)
    assert told.steps == [1, 2, 3, 4, 5, 6]
    assert told.rows == result.history
    assert told.told == [("begin", 6), ("end", 6), "close"]
    assert [row["kind"] for row in result.history] == ["step", "epoch", "step", "epoch"]

    class Fail(Collect):
        def step(self, step: int) -> None:
            raise RuntimeError("mine")

    class Short(Callback):
        def step(self, step: int) -> dict[str, float]:
            return {"mine": 1.0}

        def close(self) -> None:
            raise RuntimeError("in closing")

    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="in closing"):
        fit(make_model(), data(), None, SGD, folder=folder, callbacks=[Short()], verbose=True)
    with Run.open(folder) as run:  # the lock is free
        assert [row["step"] for row in run.metrics() if row["kind"] == "callback"] == [1, 2, 3, 4, 5, 6]
    refused = Collect()
    with pytest.raises(RunError):
        fit(make_model(), data(), None, SGD, folder=folder, callbacks=[refused], verbose=False)
    assert refused.told == ["close"]
    failing = Fail()
    with pytest.raises(RuntimeError, match="mine"):
        fit(make_model(), data(), None, SGD, callbacks=[failing], verbose=False)
    assert failing.told == [("begin", 6), "close"]


def test_a_monitor_is_a_callback_and_its_records_are_metrics():
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.randn(6, dtype=torch.float64)
    readout = Readout(GaussianDEQ(4, 30).double())
    monitor = Monitor(readout, x, y, step=0.01, every=2, kernel=False)
    config = replace(SGD, batch_size=6, epochs=4, lr=0.01)
    result = fit(readout, (x, y), None, config, callbacks=[monitor], verbose=False)
    rows = [row for row in result.history if row["kind"] == "monitor"]
    assert [row["k"] for row in rows] == [2, 4]
    assert [record.k for record in monitor.records] == [0, 2, 4]
    counted = []
    fit(readout, (x, y), None, config, callbacks=[counted.append], verbose=False)
    assert counted == [1, 2, 3, 4]


def test_tensorboard_gets_the_same_series(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(make_model(), data(), data(), SGD, callbacks=[TensorBoard(tmp_path / "events")], verbose=False)
        events = EventAccumulator(str(tmp_path / "events")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("epoch/valid_loss")]
    wanted = [(row["step"], row["valid_loss"]) for row in result.history if row["kind"] == "epoch"]
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted])


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EventAccumulator(str(folder)).Reload()


def charts(events) -> dict[str, list[str]]:
    """The lines of each chart of the layout that is shown, the last one."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    layout = Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_a_scalar_for_each_entry_and_the_panels_of_a_report(tmp_path):
    board = TensorBoard(tmp_path / "events")
    assert not (tmp_path / "events").exists(), "made with the first row"
    board.row({"kind": "step", "step": 1, "epoch": 0.5, "loss": 2.0, "backward_steps": None, "flag": True})
    board.row({"kind": "epoch", "step": 2, "epoch": 1, "valid_loss": 1.0, "alpha": [0.5, 0.25], "norms": {"model.0": 0.75}})
    board.row({"kind": "monitor", "step": 2, "k": 2, "norm W": 3.0, "norm [U b]": 4.0, "bound": 5.0})
    board.row({"kind": "event", "step": 2, "what": "norm", "figure": 1.5, "message": "passed"})
    board.close()
    events = read_events(tmp_path / "events")
    values = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert values == {
        "step/loss": [(1, 2.0)],
        "epoch/valid_loss": [(2, 1.0)],
        "epoch/alpha/1": [(2, 0.5)],
        "epoch/alpha/2": [(2, 0.25)],
        "epoch/norms/model.0": [(2, 0.75)],
        "monitor/norm_W": [(2, 3.0)],
        "monitor/norm_U_b_": [(2, 4.0)],
        "monitor/bound": [(2, 5.0)],
        "event/figure": [(2, 1.5)],
    }
    (text,) = events.Tensors("event/norm/text_summary")
    assert text.tensor_proto.string_val[0] == b"passed"
    found = {title: {tag for tag in values for line in lines if re.match(line, tag)} for title, lines in charts(events).items()}
    assert found == {
        "Loss": {"step/loss", "epoch/valid_loss"},
        "Alpha of each layer": {"epoch/alpha/1", "epoch/alpha/2"},
        "Loss and its guaranteed bound": {"monitor/bound"},
        "Spectral norms": {"monitor/norm_W", "monitor/norm_U_b_", "epoch/norms/model.0"},
    }


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[tensorboard\]'"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_in_tensorboard_steps_that_are_made_again_replace_the_old_ones(tmp_path):
    def shown():
        return [(event.step, event.value) for event in read_events(tmp_path / "events").Scalars("step/loss")]

    board = TensorBoard(tmp_path / "events")
    for step in (1, 2, 3, 4):
        board.row({"kind": "step", "step": step, "loss": 1.0})
    board.rewind(2)
    board.row({"kind": "step", "step": 3, "loss": 2.0})
    board.close()
    assert [(event.step, event.value) for event in read_events(tmp_path / "events").Scalars("step/loss")] == [
        (1, 1),
        (2, 1),
        (3, 2),
    ]
    resumed = TensorBoard(tmp_path / "events")  # from a checkpoint at step 1
    resumed.row({"kind": "step", "step": 2, "loss": 3.0})
    resumed.close()
    assert shown() == [(1, 1), (2, 3)]
    TensorBoard(tmp_path / "none").close()
    assert not (tmp_path / "none").exists()


def test_plain_lines_have_the_figures(capsys):
    fit(make_model(), data(), data(), SGD)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for part in ("epoch 1, step 3/6", "loss ", "accuracy ", "validation accuracy ", "solver steps", "100.0% converged", "s left"):
        assert part in lines[0]


def test_a_terminal_gets_a_bar_with_the_figures():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    bar = display(screen)
    assert isinstance(bar, Bar)
    bar.begin({}, 10)
    bar.step(3)
    bar.row({"kind": "step", "step": 4, "loss": 0.5, "accuracy": 0.25, "solver_steps": 7.0, "converged": 0.5})
    bar.row({"kind": "epoch", "step": 4, "epoch": 1, "valid_accuracy": 0.75})
    bar.row({"kind": "event", "step": 4, "action": "stopped", "message": "why [not]"})
    bar.close()
    text = screen.getvalue()
    for part in ("validation accuracy 75.00%", "why [not]", "4/10"):
        assert part in text
    assert isinstance(display(io.StringIO()), Lines)


def test_long_epochs_speak_once_a_while():
    stream = io.StringIO()
    lines = Lines(stream, every=0.0)
    lines.begin({}, 10)
    lines.step(1)
    lines.row({"kind": "step", "step": 1, "loss": 0.5})
    lines.row({"kind": "event", "step": 1, "action": "warned", "message": "look"})
    lines.row({"kind": "monitor", "step": 1})
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 1/10: loss 0.5, ")
    assert second == "step 1: warned: look"
    assert summary({"loss": None, "accuracy": 0.5}) == "accuracy 50.00%"


def test_lines_come_once_a_minute_and_foretell_the_end_by_the_steps_of_this_run(monkeypatch):
    """Resumed after 100 steps, each of which then takes half a second."""
    now = [1000.0]
    monkeypatch.setattr("opteq.training.display.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin({}, 500)
    for step in range(101, 401):
        now[0] += 0.5
        lines.step(step)
        lines.row({"kind": "step", "step": step, "loss": 1.0})
    assert stream.getvalue().splitlines() == ["step 220/500: loss 1, 140 s left", "step 340/500: loss 1, 80 s left"]
