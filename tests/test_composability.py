"""An Equilibrium works like any module: each test is one thing that people do with modules."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from cell_conformance import function_of
from opteq import Equilibrium, Status, Stop
from opteq.cells import FunctionCell, OptEq
from problems import Affine, with_norm

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TIGHT = Stop(rtol=1e-13, max_steps=500)
N, D = 3, 2  # features of z and of x


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unrolled(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, n: int = N, steps: int = 120) -> Tensor:
    z = torch.zeros(x.shape[0], n, dtype=x.dtype)
    for _ in range(steps):
        z = f(z, x)
    return z


class TanhLayer:
    """tanh(W z + U x) as an Equilibrium of a module, with its unrolled reference."""

    def __init__(self, seed: int = 0) -> None:
        f = Affine(with_norm(randn(N, N, seed=seed), 0.7), randn(N, D, seed=seed + 1), torch.tanh)
        self.layer = Equilibrium(FunctionCell(f, (N,)), stop=TIGHT, on_failure="raise")

    @staticmethod
    def reference(x: Tensor, W: Tensor, U: Tensor) -> Tensor:
        return unrolled(lambda z, x: torch.tanh(z @ W.T + x @ U.T), x)


class OptEqLayer:
    """W' tanh(W z + U x + b), blended with z, as an Equilibrium of OptEq, with its unrolled reference."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        cell = OptEq(D, N, 4, activation="tanh", alpha=0.8).double()
        with torch.no_grad():
            cell.W.copy_(with_norm(cell.W, 0.8))
        self.layer = Equilibrium(cell, stop=TIGHT, on_failure="raise")

    @staticmethod
    def reference(x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
        return unrolled(lambda z, x: torch.tanh(z @ W.T + x @ U.T + b) @ W, x)


def captured_layer() -> tuple[Equilibrium, Affine]:
    f = TanhLayer().layer.cell.f
    return Equilibrium(FunctionCell(lambda z, x: f(z, x), (N,)), stop=TIGHT, on_failure="raise"), f


both = pytest.mark.parametrize("make", [TanhLayer, OptEqLayer])


def assert_close(found: object, wanted: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def parameter_gradients(layer: nn.Module, loss: Tensor, **options) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(layer.parameters()), **options))


# Modes and repeated use


@both
def test_eval_mode_has_the_gradients_of_train_mode(make):
    layer, x = make().layer, randn(4, D)
    train = parameter_gradients(layer.train(), layer(x).square().sum())
    evaluated = parameter_gradients(layer.eval(), layer(x).square().sum())
    assert_close(evaluated, train, 0.0)


@both
def test_backward_twice_with_retain_graph_gives_the_same_twice(make):
    layer, x = make().layer, randn(4, D)
    loss = layer(x).square().sum()
    first, second = (parameter_gradients(layer, loss, retain_graph=True) for _ in range(2))
    assert_close(first, second, 0.0)


def test_backward_twice_with_retain_graph_gives_the_same_twice_through_captured_tensors():
    layer, f = captured_layer()
    loss = layer(randn(4, D)).square().sum()
    first, second = (parameter_gradients(f, loss, retain_graph=True) for _ in range(2))
    assert_close(first, second, 1e-12)


def test_backward_without_retain_graph_frees_the_graph():
    layer = TanhLayer().layer
    loss = layer(randn(4, D)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@both
def test_several_forwards_then_one_backward_add_up(make):
    layer, xs = make().layer, randn(3, 4, D)
    together = parameter_gradients(layer, sum(layer(x).square().sum() for x in xs))
    apart = [parameter_gradients(layer, layer(x).square().sum()) for x in xs]
    assert_close(together, [sum(parts) for parts in zip(*apart, strict=True)], 1e-13)


def test_gradients_accumulate_like_those_of_any_module():
    layer, x = TanhLayer().layer, randn(4, D)
    layer(x).sum().backward()
    once = [p.grad.clone() for p in layer.parameters()]
    layer(x).sum().backward()
    assert_close([p.grad for p in layer.parameters()], [2 * g for g in once], 1e-13)


@pytest.mark.parametrize("wanted", [("x",), ("W",), ("U",), ("x", "U"), ()])
@pytest.mark.parametrize("make", [TanhLayer, OptEqLayer, None])
def test_any_mix_of_tensors_may_need_gradients(make, wanted):
    if make is None:
        layer, owner = captured_layer()
        reference = TanhLayer.reference
    else:
        layer, reference = make().layer, make.reference
        owner = layer.cell.f if make is TanhLayer else layer.cell
    x = randn(4, D).requires_grad_("x" in wanted)
    for name, parameter in owner.named_parameters():
        parameter.requires_grad_(name in wanted)
    z = layer(x)
    expected = reference(x, *owner.parameters())
    assert_close(z, expected)
    assert z.requires_grad == bool(wanted)
    tensors = {"x": x, **dict(owner.named_parameters())}
    chosen = [tensors[name] for name in wanted]
    if chosen:
        assert_close(torch.autograd.grad(z.square().sum(), chosen), torch.autograd.grad(expected.square().sum(), chosen))


@both
def test_inference_mode_and_no_grad_give_the_same_value(make):
    layer, x = make().layer, randn(4, D)
    with torch.inference_mode():
        inferred = layer(x)
        assert inferred.is_inference()
    with torch.no_grad():
        assert_close(layer(x), inferred.clone(), 0.0)
    assert_close(layer(x).detach(), inferred.clone(), 0.0)


@both
def test_non_contiguous_inputs_are_fine(make):
    layer, wide = make().layer, randn(D, 8).requires_grad_()
    x = wide.T[::2]
    assert not x.is_contiguous()
    z0 = randn(N, 4, seed=9).T
    z, plain = layer(x, z0), layer(x.contiguous(), z0.contiguous())
    assert_close(z, plain, 1e-12)
    assert_close(torch.autograd.grad(z.square().sum(), wide), torch.autograd.grad(plain.square().sum(), wide), 1e-11)
    z = layer(x)
    broadcast = torch.ones((), dtype=torch.float64).expand_as(z)
    assert_close(torch.autograd.grad(z, wide, broadcast), torch.autograd.grad(layer(x).sum(), wide), 0.0)


@both
def test_an_empty_batch_is_fine(make):
    layer = make().layer
    x = randn(0, D).requires_grad_()
    z = layer(x)
    assert z.shape == (0, N)
    dx, *rest = torch.autograd.grad(z.sum(), [x, *layer.parameters()])
    assert dx.shape == (0, D)
    assert all((g == 0).all() for g in rest)


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(make, reentrant):
    layer, x = make().layer, randn(4, D).requires_grad_()
    wanted = parameter_gradients(layer, layer(x).square().sum())
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert_close([p.grad for p in layer.parameters()], wanted, 0.0)


@both
def test_a_weight_changed_between_forward_and_backward_is_noticed(make):
    layer = make().layer
    loss = layer(randn(4, D)).sum()
    with torch.no_grad():
        next(layer.parameters()).mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
def test_anomaly_detection_and_hooks_work(make):
    layer, x, seen = make().layer, randn(4, D), []
    layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        layer(x.requires_grad_()).sum().backward()
    assert seen == [(4, N)]


def test_parametrised_weights_get_their_gradients():
    layer, x = TanhLayer().layer, randn(4, D)
    f = layer.cell.f
    nn.utils.parametrizations.weight_norm(f, "W")
    assert "W" not in dict(f.named_parameters())
    found = parameter_gradients(layer, layer(x).square().sum())
    assert_close(found, parameter_gradients(layer, unrolled(f, x).square().sum()))


# Inside other modules


def test_two_equilibria_in_one_sequential():
    torch.manual_seed(0)
    first, second = (OptEq(D, N, 4, activation="tanh").double(), OptEq(N, 2, 4, activation="tanh").double())
    model = nn.Sequential(
        Equilibrium(first, stop=TIGHT, on_failure="raise"),
        nn.Linear(N, N).double(),
        Equilibrium(second, stop=TIGHT, on_failure="raise"),
    )

    def reference(x: Tensor) -> Tensor:
        z = model[1](unrolled(lambda z, x: torch.tanh(z @ first.W.T + x @ first.U.T + first.b) @ first.W, x))
        return unrolled(lambda z, x: torch.tanh(z @ second.W.T + x @ second.U.T + second.b) @ second.W, z, n=2)

    x = randn(4, D)
    assert_close(model(x), reference(x))
    found, wanted = (parameter_gradients(model, f(x).square().sum()) for f in (model, reference))
    assert_close(found, wanted)


class Outer(nn.Module):
    """tanh(A z + B inner(x + C z)): an f that contains an equilibrium."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(0.2 * randn(N, N, seed=5)), nn.Parameter(0.2 * randn(N, N, seed=6))
        self.C = nn.Parameter(0.2 * randn(D, N, seed=7))
        self.inner = TanhLayer(seed=3).layer

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.A.T + self.inner(x + z @ self.C.T) @ self.B.T)


def nested_reference(x: Tensor, A: Tensor, B: Tensor, C: Tensor, W: Tensor, U: Tensor) -> Tensor:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ A.T + TanhLayer.reference(x + z @ C.T, W, U) @ B.T)

    return unrolled(f, x, steps=60)


def test_an_equilibrium_inside_the_f_of_another():
    outer = Outer()
    layer = Equilibrium(FunctionCell(outer, (N,)), stop=Stop(rtol=1e-12), on_failure="raise")
    x = randn(2, D).requires_grad_()
    inputs = [x, *layer.parameters()]
    z, wanted = layer(x), nested_reference(x, *layer.parameters())
    assert_close(z, wanted)
    assert_close(torch.autograd.grad(z.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs), 1e-9)


def test_an_equilibrium_inside_the_f_of_another_by_capture():
    outer = Outer()
    layer = Equilibrium(FunctionCell(lambda z, x: outer(z, x), (N,)), stop=Stop(rtol=1e-12), on_failure="raise")
    x = randn(2, D).requires_grad_()
    inputs = [x, *outer.parameters()]
    z, wanted = layer(x), nested_reference(x, *outer.parameters())
    assert_close(z, wanted)
    assert_close(torch.autograd.grad(z.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs), 1e-9)


def test_second_derivatives_of_nested_equilibria():
    layer = Equilibrium(FunctionCell(Outer(), (N,)), stop=Stop(rtol=1e-12), on_failure="raise")
    parameters = [p.detach() for p in layer.parameters()]

    def curvature(f: Callable[[Tensor], Tensor]) -> Tensor:
        slope = grad(lambda x: f(x).square().sum())
        return grad(lambda x: slope(x).square().sum())(randn(1, D))

    assert_close(curvature(layer), curvature(lambda x: nested_reference(x, *parameters)), 1e-11)


# torch.func


@both
def test_func_grad(make):
    function, parameters = function_of(make().layer)
    inputs = (randn(4, D), *parameters)
    every = tuple(range(len(inputs)))
    found, wanted = (grad(lambda *a, f=f: f(*a).square().sum(), argnums=every)(*inputs) for f in (function, make.reference))
    assert_close(found, wanted)


@both
def test_func_vjp(make):
    function, parameters = function_of(make().layer)
    inputs = (randn(4, D), *parameters)
    cotangent = randn(4, N, seed=4)
    (z, pull), (z_wanted, pull_wanted) = (vjp(f, *inputs) for f in (function, make.reference))
    assert_close(z, z_wanted)
    assert_close(pull(cotangent), pull_wanted(cotangent))


@both
def test_func_jvp(make):
    function, parameters = function_of(make().layer)
    inputs = (randn(4, D), *parameters)
    tangents = tuple(randn(*t.shape, seed=i) for i, t in enumerate(inputs))
    assert_close(jvp(function, inputs, tangents), jvp(make.reference, inputs, tangents))


@both
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_func_jacobians(make, jacobian):
    function, parameters = function_of(make().layer)
    inputs = (randn(2, D), *parameters)
    every = tuple(range(len(inputs)))
    assert_close(jacobian(function, argnums=every)(*inputs), jacrev(make.reference, argnums=every)(*inputs))


@both
def test_func_vmap(make):
    layer, xs = make().layer, randn(5, 4, D)
    assert_close(vmap(layer)(xs), torch.stack([layer(x) for x in xs]), 1e-11)


@both
def test_nested_vmap(make):
    layer, xs = make().layer, randn(2, 3, 4, D)
    assert_close(vmap(vmap(layer))(xs), torch.stack([torch.stack([layer(x) for x in row]) for row in xs]), 1e-11)


@both
def test_vmap_with_other_in_dims_and_out_dims(make):
    layer, xs = make().layer, randn(4, 5, D)
    wanted = torch.stack([layer(xs[:, i]) for i in range(5)])
    assert_close(vmap(layer, in_dims=1)(xs), wanted, 1e-11)
    assert_close(vmap(layer, in_dims=-2, out_dims=2)(xs), wanted.movedim(0, 2), 1e-11)
    assert_close(vmap(layer, in_dims=2)(xs.movedim(1, 2)), wanted, 1e-11)


@both
def test_vmap_over_z0(make):
    layer, x, starts = make().layer, randn(4, D), randn(3, 4, N, seed=8)
    wanted = torch.stack([layer(x, z0) for z0 in starts])
    assert_close(vmap(layer, in_dims=(None, 0))(x, starts), wanted, 1e-11)
    assert_close(vmap(layer, in_dims=(None, 1))(x, starts.movedim(0, 1)), wanted, 1e-11)
    xs = randn(3, 4, D, seed=9)
    assert_close(vmap(layer)(xs, starts), torch.stack([layer(x, z0) for x, z0 in zip(xs, starts, strict=True)]), 1e-11)


@both
def test_vmap_over_nothing_gives_nothing(make):
    assert vmap(make().layer)(randn(0, 4, D)).shape == (0, 4, N)


@both
def test_vmap_of_grad_over_functional_call(make):
    function, parameters = function_of(make().layer)
    xs = randn(5, 4, D)

    def loss(x: Tensor) -> Tensor:
        return function(x, *parameters).square().sum()

    assert_close(vmap(grad(loss))(xs), torch.stack([grad(loss)(x) for x in xs]))


@both
def test_grad_of_vmap(make):
    function, parameters = function_of(make().layer)
    xs = randn(5, 4, D)

    def mapped(W: Tensor) -> Tensor:
        return vmap(lambda x: function(x, W, *parameters[1:]))(xs).square().sum()

    def looped(W: Tensor) -> Tensor:
        return sum(make.reference(x, W, *parameters[1:]).square().sum() for x in xs)

    assert_close(grad(mapped)(parameters[0]), grad(looped)(parameters[0]))


@both
def test_per_sample_parameter_gradients(make):
    layer, x = make().layer, randn(6, D)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(layer, parameters, (sample[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        assert_close({name: g[i] for name, g in found.items()}, grad(loss)(parameters, sample))


@both
def test_ensembles_by_stacked_module_state(make):
    models = [make(seed=seed).layer for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    x = randn(4, D)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(models[0], (parameters, buffers), (x,))

    z = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    assert_close(z, torch.stack([model(x) for model in models]), 1e-11)
    z.square().sum().backward()
    for i, model in enumerate(models):
        for (name, _), g in zip(model.named_parameters(), parameter_gradients(model, model(x).square().sum()), strict=True):
            assert_close(parameters[name].grad[i], g)


HESSIANS = {
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over reverse": lambda f: jacfwd(jacrev(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
}


@both
@pytest.mark.parametrize("mode", list(HESSIANS))
def test_hessians_in_every_mode(make, mode):
    function, parameters = function_of(make().layer)
    x = randn(2, D)

    def loss(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, W: f(x, W, *parameters[1:]).pow(3).sum()

    for argument in (0, 1):

        def one(f: Callable[..., Tensor], argument: int = argument) -> Callable[[Tensor], Tensor]:
            return (lambda v: loss(f)(v, parameters[0])) if argument == 0 else (lambda v: loss(f)(x, v))

        point = (x, parameters[0])[argument]
        assert_close(HESSIANS[mode](one(function))(point), jacrev(jacrev(one(make.reference)))(point), 1e-9)


@pytest.mark.parametrize("mode", list(HESSIANS))
def test_mixed_second_derivatives_in_every_mode(mode):
    function, (W, U) = function_of(TanhLayer().layer)
    x, shift = randn(2, D), torch.zeros(2, dtype=torch.float64)

    def one(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda s: f(x + s[0], W * (1 + s[1]), U * (1 - s[0])).pow(3).sum()

    assert_close(HESSIANS[mode](one(function))(shift), jacrev(jacrev(one(TanhLayer.reference)))(shift), 1e-9)


@both
def test_dual_numbers(make):
    function, parameters = function_of(make().layer)
    inputs = (randn(4, D), *parameters)
    tangents = tuple(randn(*t.shape, seed=i) for i, t in enumerate(inputs))
    with forward_ad.dual_level():
        z, tangent = forward_ad.unpack_dual(function(*(forward_ad.make_dual(a, t) for a, t in zip(inputs, tangents, strict=True))))
    assert_close((z, tangent), jvp(make.reference, inputs, tangents))


@both
def test_dual_numbers_with_a_graph(make):
    """Reverse over forward, in the interface without torch.func."""
    function, parameters = function_of(make().layer)
    x, direction = randn(4, D), randn(4, D, seed=1)

    def slope(f: Callable[..., Tensor], x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction), *parameters).square().sum()).tangent

    def derivative(f: Callable[..., Tensor]) -> Tensor:
        y = x.clone().requires_grad_()
        return torch.autograd.grad(slope(f, y), y)[0]

    assert_close(derivative(function), derivative(make.reference), 1e-9)


@both
def test_vmap_of_jvp_and_of_hessian(make):
    layer, xs = make().layer, randn(3, 2, D)
    found = vmap(lambda x: jvp(layer, (x,), (torch.ones_like(x),))[1])(xs)
    assert_close(found, torch.stack([jvp(layer, (x,), (torch.ones_like(x),))[1] for x in xs]))
    hessian = jacfwd(jacrev(lambda x: layer(x).pow(3).sum()))
    assert_close(vmap(hessian)(xs), torch.stack([hessian(x) for x in xs]), 1e-9)


def test_solutions_of_every_sample_are_told_under_vmap():
    layer, xs = TanhLayer().layer, randn(5, 4, D)
    residual, steps = vmap(lambda x: (lambda s: (s.residual, s.steps))(layer.solve(x)))(xs)
    assert residual.shape == steps.shape == (5, 4)
    assert (residual <= TIGHT.rtol).all()
    assert (steps > 0).all()


# Copies and files


@both
def test_deepcopy_is_independent_and_equal(make):
    layer, x = make().layer, randn(4, D)
    layer(x).sum().backward()
    other = copy.deepcopy(layer)
    assert_close(other(x), layer(x), 0.0)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert not torch.equal(other(x), layer(x))


@both
def test_state_dict_round_trip_through_a_file(make):
    layer, other, x = make(seed=0).layer, make(seed=1).layer, randn(4, D)
    assert not torch.equal(layer(x), other(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    assert_close(other(x), layer(x), 0.0)
    assert list(layer.state_dict()) == [name for name, _ in layer.named_parameters()]


@both
def test_modules_can_be_pickled(make):
    layer, x = make().layer, randn(4, D)
    other = pickle.loads(pickle.dumps(layer))
    assert repr(other) == repr(layer)
    assert_close(other(x), layer(x), 0.0)
    assert_close(parameter_gradients(other, other(x).sum()), parameter_gradients(layer, layer(x).sum()), 0.0)


def test_modules_can_be_moved_to_another_dtype():
    layer, x = OptEqLayer().layer, randn(4, D)
    wanted = layer(x)
    layer.stop = Stop(rtol=1e-6)
    z = layer.float()(x.float())
    assert z.dtype == torch.float32
    assert_close(z.double(), wanted, 1e-5)


def test_modules_in_half_precision_solve_and_differentiate_in_it():
    layer, x = OptEqLayer().layer, randn(4, D)
    wanted = layer(x)
    layer.stop = Stop(rtol=1e-2)
    z = layer.half()(x.half())
    assert z.dtype == torch.float16
    assert_close(z.double(), wanted, 5e-2)
    assert all(g.dtype == torch.float16 and g.isfinite().all() for g in parameter_gradients(layer, z.sum()))


# Autocast


def encoder_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    f = Affine(0.1 * torch.randn(6, 6), 0.3 * torch.randn(6, 8), torch.tanh)
    cell = OptEq(8, 6, 10) if kind == "opteq" else FunctionCell(f, (6,))
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Equilibrium(cell, on_failure="raise"), nn.Linear(6, 2))


@pytest.mark.parametrize("kind", ["opteq", "module"])
def test_autocast_to_float16_solves_in_float32(kind):
    model = encoder_model(kind)
    x = torch.randn(16, 4)
    wanted_gradients = parameter_gradients(model, model(x).square().sum())
    wanted = model[:3](x)
    with torch.autocast("cpu", dtype=torch.float16):
        h = model[:2](x)
        z = model[2](h)
        loss = model[3](z).square().sum()
    assert h.dtype == torch.float16
    assert z.dtype == torch.float32
    assert_close(z, wanted, 5e-3)
    found = parameter_gradients(model, loss)
    for a, b in zip(found, wanted_gradients, strict=True):
        assert a.dtype == torch.float32
        assert a.isfinite().all()
        assert (a - b).norm() < 2e-2 * b.norm()


def test_autocast_does_not_reach_into_the_loop():
    """f is evaluated in the dtype of z0, whatever the caller's autocast: the residual of 1e-6 would be out of float16's reach."""
    model = encoder_model("module")
    seen = set()
    layer = model[2]
    layer.stop = Stop(rtol=1e-6)
    layer.cell.f.sigma = lambda a: (seen.add(a.dtype), torch.tanh(a))[1]
    with torch.autocast("cpu", dtype=torch.float16):
        z = layer(torch.randn(5, 8))
        z.sum().backward()
    assert seen == {torch.float32}


# Memory


def live_tensors() -> int:
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def training_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["tanh", "opteq", "captured", "no convergence"])
def test_training_leaves_no_tensors_and_no_reference_cycles_behind(kind):
    x = randn(4, D)
    layer, owner = captured_layer() if kind == "captured" else ((OptEqLayer if kind == "opteq" else TanhLayer)().layer, None)
    if kind == "no convergence":
        layer.stop, layer.on_failure = Stop(rtol=1e-13, max_steps=2), "ignore"
    optimizer = torch.optim.SGD((owner or layer).parameters(), lr=1e-3)
    for _ in range(5):
        training_step(layer, x, optimizer)
    gc.collect()
    gc.freeze()  # count only what comes from here on; left so, as what there was before the first test
    gc.disable()  # so that whatever hangs in a cycle stays and is counted
    try:
        counts = []
        for step in range(20):
            training_step(layer, x, optimizer)
            if step % 4 == 3:
                counts.append(live_tensors())
    finally:
        gc.enable()
    assert set(counts) == {counts[0]}


def test_nothing_of_a_solve_is_stored_on_the_module():
    layer, x = OptEqLayer().layer, randn(4, D)
    before = {name: dict(vars(module)) for name, module in layer.named_modules()}
    layer(x).sum()
    after = {name: dict(vars(module)) for name, module in layer.named_modules()}
    assert all(before[name].keys() == after[name].keys() for name in before)
    assert all(before[name][key] is after[name][key] for name in before for key in before[name])


# Threads


def test_two_threads_at_once_give_the_results_of_one_after_the_other():
    models = [TanhLayer(seed=0).layer, OptEqLayer(seed=1).layer]
    xs = [randn(6, D, seed=seed) for seed in range(2)]

    def work(i: int) -> list[Tensor]:
        results = []
        for _ in range(4):
            x = xs[i].clone().requires_grad_()
            z = models[i](x)
            results += [z.detach(), *torch.autograd.grad(z.square().sum(), [x, *models[i].parameters()])]
            results.append(grad(lambda x: models[i](x).sum())(xs[i]))
        return results

    wanted = [work(0), work(1)]
    found: list[list[Tensor] | None] = [None, None]
    together = threading.Barrier(2, timeout=60)

    def run(i: int) -> None:
        together.wait()
        found[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(found, wanted, 1e-13)


def test_two_threads_may_share_one_layer():
    layer = OptEqLayer().layer
    xs = randn(2, 6, D)
    wanted = [layer(x).detach() for x in xs]
    found: dict[int, Tensor] = {}
    together = threading.Barrier(2, timeout=60)

    def run(i: int) -> None:
        together.wait()
        for _ in range(20):
            found[i] = layer(xs[i]).detach()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close([found[0], found[1]], wanted, 1e-13)


# Training


@both
def test_a_few_steps_of_training_follow_the_unrolled_network(make):
    """Ten steps of Adam on the layer and on its unrolled reference end at the same parameters."""
    layer = make().layer
    twin = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x, y = randn(8, D), randn(8, N, seed=3)
    optimizers = [torch.optim.Adam(ps, lr=1e-2) for ps in (list(layer.parameters()), twin)]
    for _ in range(10):
        for optimizer, z in zip(optimizers, (layer(x), make.reference(x, *twin)), strict=True):
            optimizer.zero_grad()
            (z - y).square().mean().backward()
            optimizer.step()
    assert_close([p.detach() for p in layer.parameters()], [p.detach() for p in twin], 1e-8)
    assert layer.solve(x).status is Status.CONVERGED
