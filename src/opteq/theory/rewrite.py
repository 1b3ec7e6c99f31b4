"""Feed-forward networks rewritten as equilibrium networks."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from opteq.activations import Activation, find_activation, leaky_relu, soft_threshold, softplus
from opteq.cells.deep import DeepOptEq
from opteq.cells.optimization import OptEq
from opteq.checks import check_finite, check_floating, check_shape, invalid
from opteq.equilibrium import Equilibrium

__all__ = ["UnitLayers", "WeightTied", "from_feedforward", "solve_factor", "unit_layers", "weight_tied"]

_Module = TypeVar("_Module", bound=nn.Module)

_IDENTITY: Final = find_activation("rewrite", "identity")


class _Layer(NamedTuple):
    """z -> sigma(A z + c)."""

    A: Tensor
    c: Tensor
    activation: Activation


def from_feedforward(net: nn.Sequential) -> nn.Sequential:
    """y = A_L sigma_{L-1}(... sigma_1(A_1 x + c_1) ...) + c_L as y = W_{L+1} z + c_L, z = f_L o ... o f_1 (z), with W_1 = 0.

    Any chain of nn.Linear, ReLU, Tanh, LeakyReLU, Sigmoid, Softplus, Softshrink and Identity becomes
    Sequential(Equilibrium(DeepOptEq), Linear) with the same output: f_1 = 0 makes the composition independent of z, U_2 = A_1
    lets x in, and W_l W_{l-1}' = A_{l-1} for l > 2. So the equilibrium is found by one evaluation, and another confirms it.
    x is [batch, in_features]. The state has max(n_k + n_{k+1}) features, n_k the widths of the hidden layers.

    The layers are not constrained: ||W_l|| > 1 for l > 2, unless A is 0, so in general these are no proximal operators, and the
    theory of convex problems is silent on them. W_1 = 0 stays 0 in training, since its gradient is 0. The new module owns its
    parameters, of the dtype and on the device of the net's. Softplus differs by up to 2e-9 / beta beyond its threshold.

    Optimization induced equilibrium networks, Lemma 2. There the biases are columns of A, by a 1 that is appended to x; that needs
    sigma(1) = 1, which tanh has not: an erratum. Here they are the b_l.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from opteq.theory import from_feedforward
        >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 4)
        >>> torch.allclose(from_feedforward(net)(x), net(x), atol=1e-5)
        True
    """
    hidden, last = _split(_layers("from_feedforward", net))
    features = _state_size([len(layer.c) for layer in hidden])
    A = hidden[0].A
    W = torch.eye(len(A), features, dtype=A.dtype, device=A.device)
    nothing = A.new_zeros(1, A.shape[1])
    cells = [_cell(W.new_zeros(1, features), nothing, W.new_zeros(1), _IDENTITY), _cell(W, A, *hidden[0][1:])]
    for layer in hidden[1:]:
        W = solve_factor(layer.A, W)
        cells.append(_cell(W, nothing.repeat(len(W), 1), *layer[1:]))
    return nn.Sequential(Equilibrium(DeepOptEq(cells)), _head(last, W))


class UnitLayers(nn.Module):
    """z_1 = W_0' x, z_{k+1} = W_k' sigma_k(W_k z_k + b_k), y = W_{L+1} z_{L+1} + c.

    `lift`: W_0'. `cells`: the unit layers, each applied once, to z and x. `head`: W_{L+1} and c.
    Optimization induced equilibrium networks, Lemma 1.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from opteq.theory import unit_layers
        >>> units = unit_layers(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)))
        >>> len(units.cells), units(torch.randn(5, 4)).shape
        (2, torch.Size([5, 2]))
    """

    def __init__(self, lift: nn.Linear, cells: Sequence[OptEq], head: nn.Linear) -> None:
        super().__init__()
        self.lift, self.cells, self.head = lift, nn.ModuleList(cells), head

    def forward(self, x: Tensor) -> Tensor:
        """The output y for x, [batch, in_features]."""
        z = self.lift(x)
        for cell in self.cells:
            assert isinstance(cell, OptEq)
            z = cell.bind(x)(z)
        y: Tensor = self.head(z)
        return y


def unit_layers(net: nn.Sequential) -> UnitLayers:
    """y = A_L sigma_{L-1}(... sigma_1(A_1 x + c_1) ...) + c_L as a chain of unit layers z -> W_k' sigma_k(W_k z + c_k).

    W_k W_{k-1}' = A_k, and W_0 has orthonormal rows. Takes the networks that `from_feedforward` takes, and makes parameters of
    its own in the same way; again ||W_k|| > 1. The U of the cells is 0: it is there to be trained.
    Optimization induced equilibrium networks, Lemma 1.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from opteq.theory import unit_layers
        >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)
        >>> torch.allclose(unit_layers(net)(x), net(x), atol=1e-5)
        True
    """
    hidden, last = _split(_layers("unit_layers", net))
    A = hidden[0].A
    inputs = A.shape[1]
    features = _state_size([inputs, *(len(layer.c) for layer in hidden)])
    W = torch.eye(inputs, features, dtype=A.dtype, device=A.device)
    lift, cells = _linear(W.T.contiguous(), None), []
    for layer in hidden:
        W = solve_factor(layer.A, W)
        cells.append(_cell(W, W.new_zeros(len(W), inputs), *layer[1:]))
    return UnitLayers(lift, cells, _head(last, W))


class WeightTied(nn.Module):
    """z <- sigma~(W_z z + W_x x + b), from z = 0, as many steps as z has blocks; y is the last block.

    `widths` and `activations`: the size of each block and what sigma~ does to it.
    Monotone DEQs and their neural tangent kernel, Theorem B.0.1.

    Examples:
        >>> from torch import nn
        >>> from opteq.theory import weight_tied
        >>> tied = weight_tied(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> tied.W_z.shape, tied.widths
        (torch.Size([10, 10]), (8, 2))
    """

    def __init__(self, W_z: Tensor, W_x: Tensor, b: Tensor, widths: Sequence[int], activations: Sequence[Activation]) -> None:
        super().__init__()
        if len(widths) != len(activations) or sum(widths) != len(b):
            expected = f"{len(activations)} integers with the sum {len(b)}"
            raise ValueError(invalid(self, "widths", expected, list(widths)))
        self.W_z, self.W_x, self.b = nn.Parameter(W_z), nn.Parameter(W_x), nn.Parameter(b)
        self.widths, self.activations = tuple(widths), tuple(activations)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """sigma~(W_z z + W_x x + b)."""
        blocks = (linear(z, self.W_z) + linear(x, self.W_x, self.b)).split(self.widths, dim=-1)
        return torch.cat([sigma(block) for sigma, block in zip(self.activations, blocks, strict=True)], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """The output y for x, [batch, in_features]."""
        check_shape(self, "x", x, self.W_x.shape[1:])
        z = x.new_zeros(len(x), len(self.b))
        for _ in self.widths:
            z = self.step(z, x)
        return z[:, -self.widths[-1] :]

    def extra_repr(self) -> str:
        names = ", ".join(sigma.name for sigma in self.activations)
        return f"in_features={self.W_x.shape[1]}, widths={self.widths}, activations=({names})"


def weight_tied(net: nn.Sequential) -> WeightTied:
    """z_k = sigma_k(A_k z_{k-1} + c_k), k = 1 ... L, as L steps of one map on (z_1, ..., z_L): A_2 ... A_L below W_z's diagonal.

    x enters the first block only. After k steps the first k blocks have their final values, so that after L steps z is an
    equilibrium. Takes the networks that `from_feedforward` takes. W_z is dense, [sum n_k, sum n_k], and trained as a whole:
    the zeros around its blocks do not stay zeros.
    Monotone DEQs and their neural tangent kernel, Theorem B.0.1.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from opteq.theory import weight_tied
        >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)
        >>> torch.allclose(weight_tied(net)(x), net(x), atol=1e-5)
        True
    """
    layers = _layers("weight_tied", net)
    widths = [len(layer.c) for layer in layers]
    b = torch.cat([layer.c for layer in layers])
    W_x, W_z = b.new_zeros(len(b), layers[0].A.shape[1]), b.new_zeros(len(b), len(b))
    W_x[: widths[0]] = layers[0].A
    row, column = widths[0], 0
    for layer in layers[1:]:
        rows, columns = layer.A.shape
        W_z[row : row + rows, column : column + columns] = layer.A
        row, column = row + rows, column + columns
    return WeightTied(W_z, W_x, b, widths, [layer.activation for layer in layers])


def solve_factor(A: Tensor, W: Tensor, *, full_rank: bool = True) -> Tensor:
    """V = A (W')^+ + N with V W' = A, for a W [n, m] of full row rank; N W' = 0, N N' = I.

    A is [n', n], V [n', m]. The first term is the solution of least norm; N gives V full row rank, whatever the rank of A, and
    needs m >= n + n'; `full_rank=False` leaves it out. All singular values of V lie between 1 and
    sqrt(1 + (||A|| / sigma_min(W))^2), so that in a chain of such factors they neither grow nor vanish with the depth.
    Computed in float64 and rounded to the dtype of A. Optimization induced equilibrium networks, Lemma 4.

    Examples:
        >>> import torch
        >>> from opteq.theory import solve_factor
        >>> A, W = torch.randn(2, 3), torch.randn(3, 6)
        >>> V = solve_factor(A, W)
        >>> V.shape, torch.allclose(V @ W.T, A, atol=1e-4)
        (torch.Size([2, 6]), True)
    """
    for name, matrix in (("A", A), ("W", W)):
        check_floating("solve_factor", name, matrix)
        if matrix.ndim != 2:
            raise ValueError(invalid("solve_factor", name, "a matrix", list(matrix.shape)))
    (rows, n), (found, m) = A.shape, W.shape
    if found != n or m < n + rows * full_rank:
        raise ValueError(invalid("solve_factor", "W", f"of shape [{n}, m], m >= {n + rows * full_rank}", list(W.shape)))
    Q, R = torch.linalg.qr(_precise(W).T, mode="complete")  # W' = Q_1 R, and the rows of Q_2' are orthogonal to those of W
    rank = int(torch.linalg.matrix_rank(R[:n]))
    if rank < n:
        raise ValueError(invalid("solve_factor", "W", f"of full row rank, {n}", f"rank {rank}"))
    V: Tensor = torch.linalg.solve_triangular(R[:n], _precise(A), upper=True, left=False) @ Q[:, :n].T
    if full_rank:
        V = V + Q[:, n : n + rows].T
    return V.to(A.device, A.dtype).contiguous()


def _precise(matrix: Tensor) -> Tensor:
    """In float64, on the CPU: not every device has float64."""
    return matrix.detach().cpu().double()


def _split(layers: list[_Layer]) -> tuple[list[_Layer], _Layer]:
    """The hidden layers and the affine map that comes last: the identity where the network ends with an activation."""
    *hidden, last = layers
    if hidden and last.activation is _IDENTITY:
        return hidden, last
    return layers, _unchanged(len(last.c), last.c)


def _state_size(widths: list[int]) -> int:
    """The least m for `solve_factor` along the chain: max(n_k + n_{k+1})."""
    return max((a + b for a, b in pairwise(widths)), default=widths[0])


def _unchanged(width: int, like: Tensor) -> _Layer:
    """z -> z."""
    return _Layer(torch.eye(width, dtype=like.dtype, device=like.device), like.new_zeros(width), _IDENTITY)


def _cell(W: Tensor, U: Tensor, b: Tensor, activation: Activation) -> OptEq:
    hidden, features = W.shape
    with torch.device("meta"):  # what is drawn here is replaced: this takes no memory, and none of the caller's random numbers
        cell = OptEq(U.shape[1], features, hidden, activation=activation)
    return _filled(cell, W=W, U=U, b=b)


def _head(last: _Layer, W: Tensor) -> nn.Linear:
    """z -> V z + c with V W' = A; nothing comes after it, so V need not have full rank."""
    return _linear(solve_factor(last.A, W, full_rank=False), last.c)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return _filled(module, weight=weight) if bias is None else _filled(module, weight=weight, bias=bias)


def _filled(module: _Module, **values: Tensor) -> _Module:
    for name, value in values.items():
        setattr(module, name, nn.Parameter(value))
    return module


def _layers(owner: str, net: nn.Sequential) -> list[_Layer]:
    """(A_k, c_k, sigma_k) with z_k = sigma_k(A_k z_{k-1} + c_k), as copies; two activations in a row have A = I between them."""
    modules = list(_modules(owner, net))
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(invalid(owner, "net", "an nn.Sequential with at least one nn.Linear", net))
    _check_alike(owner, linears)
    layers: list[_Layer] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            layers.append(_affine(owner, module, len(layers[-1].c) if layers else module.in_features))
            continue
        sigma = _ACTIVATIONS[type(module)](module)
        if not layers or layers[-1].activation is not _IDENTITY:
            width = len(layers[-1].c) if layers else linears[0].in_features
            layers.append(_unchanged(width, linears[0].weight.detach()))
        layers[-1] = layers[-1]._replace(activation=sigma)
    return layers


def _affine(owner: str, module: nn.Linear, width: int) -> _Layer:
    if module.in_features != width:
        raise ValueError(invalid(owner, "net", f"a chain: {width} in_features after {width} out_features", module))
    check_finite(module, module.named_parameters())
    A = module.weight.detach().clone(memory_format=torch.contiguous_format)
    return _Layer(A, A.new_zeros(len(A)) if module.bias is None else module.bias.detach().clone(), _IDENTITY)


def _check_alike(owner: str, linears: list[nn.Linear]) -> None:
    found = {f"{module.weight.dtype} on {module.weight.device}" for module in linears}
    if len(found) > 1:
        raise ValueError(invalid(owner, "net", "of one dtype, on one device", sorted(found)))


def _modules(owner: str, net: object) -> Iterator[nn.Module]:
    """The parts of the network in order; the types must match exactly, since a subclass may compute something else."""
    if not isinstance(net, nn.Sequential) or type(net).forward is not nn.Sequential.forward:
        raise TypeError(invalid(owner, "net", "an nn.Sequential", net))
    for module in net:
        if isinstance(module, nn.Sequential):
            yield from _modules(owner, module)
        elif type(module) is nn.Linear or type(module) in _ACTIVATIONS:
            yield module
        elif type(module) is not nn.Identity:
            names = ", ".join(kind.__name__ for kind in (nn.Linear, nn.Identity, *_ACTIVATIONS))
            expected = f"made of {names}: {type(module).__name__} {_reason(module)}"
            raise TypeError(invalid(owner, "net", expected, module))


def _reason(module: nn.Module) -> str:
    """Why the module has no place in the network."""
    if isinstance(module, (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)):
        return "is not monotone (Assumption 1), so that its layer is the gradient of no convex function"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "redraws its mask at every call; take it out, which is what eval() does"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "couples the batch in training; fold it into an nn.Linear (torch.nn.utils.fusion.fuse_linear_bn_eval)"
    if isinstance(module, nn.Linear):
        return "may not compute what an nn.Linear does; put its weight and bias into one"
    return "is none of these"


def _leaky(module: nn.LeakyReLU) -> Activation:
    return leaky_relu(module.negative_slope) if module.negative_slope != 0 else find_activation("rewrite", "relu")


def _softplus(module: nn.Softplus) -> Activation:
    if module.threshold < 20:
        raise ValueError(invalid(module, "threshold", ">= 20: at a lower one its jump is too large to leave out", module.threshold))
    return softplus(module.beta)


def _softshrink(module: nn.Softshrink) -> Activation:
    return soft_threshold(module.lambd) if module.lambd != 0 else _IDENTITY


_ACTIVATIONS: Final[dict[type[nn.Module], Callable[[Any], Activation]]] = {
    nn.ReLU: lambda module: find_activation("rewrite", "relu"),
    nn.Tanh: lambda module: find_activation("rewrite", "tanh"),
    nn.Sigmoid: lambda module: find_activation("rewrite", "sigmoid"),
    nn.LeakyReLU: _leaky,
    nn.Softplus: _softplus,
    nn.Softshrink: _softshrink,
}
