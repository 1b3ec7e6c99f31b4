import copy
import dataclasses
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from torch import Tensor

from opteq.activations import Activation, check_monotone, find_activation, leaky_relu, soft_threshold, softplus
from opteq.cells import OptEq

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

MONOTONE = ["relu", "leaky_relu", "tanh", "sigmoid", "softplus", "identity", "soft_threshold"]
OTHERS = ["gelu", "silu"]
ENTRIES = [find_activation("test", name) for name in MONOTONE + OTHERS]
ENTRIES += [leaky_relu(0.3), leaky_relu(2.0), softplus(3.0), soft_threshold(0.4)]
CONVEX = [a for a in ENTRIES if a.monotone]
PROXIMAL = [a for a in CONVEX if a.lipschitz <= 1]
KINKS = {
    "relu": [0.0],
    "leaky_relu": [0.0],
    "leaky_relu(0.3)": [0.0],
    "leaky_relu(2)": [0.0],
    "soft_threshold": [-1.0, 1.0],
    "soft_threshold(0.4)": [-0.4, 0.4],
}
DOMAIN = {
    "relu": (0.0, math.inf),
    "tanh": (-1.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "softplus": (0.0, math.inf),
    "softplus(3)": (0.0, math.inf),
}
ENDS = [
    ("relu", 0.0, 0.0),
    ("tanh", -1.0, math.log(2)),
    ("tanh", 1.0, math.log(2)),
    ("sigmoid", 0.0, math.log(2)),
    ("sigmoid", 1.0, math.log(2)),
    ("softplus", 0.0, math.pi**2 / 12),
    ("softplus(3)", 0.0, math.pi**2 / 108),
]
BY_NAME = {a.name: a for a in ENTRIES}


def log_one_plus_exp(a: float) -> float:
    return max(a, 0.0) + math.log1p(math.exp(-abs(a)))


PLAIN: dict[str, Callable[[float], float]] = {
    "relu": lambda a: max(a, 0.0),
    "leaky_relu": lambda a: max(a, 0.01 * a),
    "leaky_relu(0.3)": lambda a: max(a, 0.3 * a),
    "leaky_relu(2)": lambda a: min(a, 2 * a),
    "tanh": math.tanh,
    "sigmoid": lambda a: (1 + math.tanh(a / 2)) / 2,
    "softplus": log_one_plus_exp,
    "softplus(3)": lambda a: log_one_plus_exp(3 * a) / 3,
    "identity": lambda a: a,
    "soft_threshold": lambda a: math.copysign(max(abs(a) - 1, 0.0), a),
    "soft_threshold(0.4)": lambda a: math.copysign(max(abs(a) - 0.4, 0.0), a),
    "gelu": lambda a: a * math.erfc(-a / math.sqrt(2)) / 2,
    "silu": lambda a: a * (1 + math.tanh(a / 2)) / 2,
}

every = pytest.mark.parametrize("sigma", ENTRIES, ids=lambda a: a.name)
convex = pytest.mark.parametrize("sigma", CONVEX, ids=lambda a: a.name)
proximal = pytest.mark.parametrize("sigma", PROXIMAL, ids=lambda a: a.name)
vectors = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8).map(lambda v: torch.tensor(v, dtype=torch.float64))


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def spread(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


def away_from_kinks(sigma: Activation, a: Tensor) -> Tensor:
    for kink in KINKS.get(sigma.name, []):
        a = a[(a - kink).abs() > 1e-3]
    return a


def from_function_only(sigma: Activation) -> Activation:
    return Activation("own", sigma.function, lipschitz=sigma.lipschitz, monotone=sigma.monotone)


def assert_near(found: Tensor, expected: Tensor, tol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


@every
def test_function_is_the_formula(sigma: Activation) -> None:
    a = torch.cat([spread(-50, 50, 401), spread(-2, 2, 401)])
    assert_near(sigma(a), doubles(*map(PLAIN[sigma.name], a.tolist())), 1e-14)


@every
def test_derivative_is_the_limit_of_difference_quotients(sigma: Activation) -> None:
    a, h = away_from_kinks(sigma, spread(-6, 6, 1001)), 1e-5
    assert_near(sigma.derivative(a), (sigma(a + h) - sigma(a - h)) / (2 * h), 1e-8)


@pytest.mark.parametrize(
    ("name", "kinks", "slopes"),
    [
        ("relu", [0.0, -0.0], [0.0, 0.0]),
        ("leaky_relu", [0.0, -0.0], [0.01, 0.01]),
        ("leaky_relu(2)", [0.0], [2.0]),
        ("soft_threshold", [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]),
        ("soft_threshold(0.4)", [-0.4, 0.4], [0.0, 0.0]),
    ],
)
def test_derivative_at_kinks(name: str, kinks: list[float], slopes: list[float]) -> None:
    assert BY_NAME[name].derivative(doubles(*kinks)).tolist() == slopes


@every
def test_root_is_the_square_root_of_the_derivative(sigma: Activation) -> None:
    a = spread(-6, 6, 1001)
    assert_near(sigma.root(a) ** 2, sigma.derivative(a).clamp_min(0), 1e-14)


@every
def test_integral_is_the_area_under_sigma(sigma: Activation) -> None:
    a = [-30.0, -4.0, -1.7, -0.9, -0.3, -1e-3, 0.0, 1e-3, 0.2, 0.5, 1.3, 3.0, 12.0, 30.0]
    breaks = KINKS.get(sigma.name, [0.0])
    areas = [quad(PLAIN[sigma.name], 0.0, x, points=breaks, epsabs=1e-13, epsrel=1e-13, limit=200)[0] for x in a]
    assert_near(sigma.integral(doubles(*a)), doubles(*areas), 1e-12)


@every
def test_sigma_is_the_gradient_of_its_integral_and_its_derivative_the_second_one(sigma: Activation) -> None:
    a = torch.cat([away_from_kinks(sigma, spread(-6, 6, 101)), doubles(*([] if sigma.name in KINKS else [0.0]))])
    gradient = torch.func.grad(sigma.integral)
    assert_near(torch.func.vmap(gradient)(a), sigma(a), 1e-12)
    assert_near(torch.func.vmap(torch.func.grad(gradient))(a), sigma.derivative(a), 1e-11)


def supremum(sigma: Activation, s: float, reach: float) -> float:
    def loss(a: float) -> float:
        return float(sigma.integral(doubles(a))) - s * a

    found = minimize_scalar(loss, bounds=(-reach, reach), method="bounded", options={"xatol": 1e-9})
    return -min(found.fun, loss(0.0))


@convex
def test_conjugate_is_the_supremum(sigma: Activation) -> None:
    low, high = DOMAIN.get(sigma.name, (-math.inf, math.inf))
    inside = [s for s in (-7.0, -1.0, -0.6, -0.05, 0.0, 1e-3, 0.3, 0.5, 0.999, 1.0, 4.0) if low <= s <= high]
    expected = [supremum(sigma, s, reach=100 / sigma.strong if sigma.strong else 100.0) for s in inside]
    assert_near(sigma.conjugate(doubles(*inside)), doubles(*expected), 1e-8)
    outside = [s for s in (-1e3, -1.5, -1e-6, 1 + 1e-6, 1.5, 1e3) if not low <= s <= high]
    assert torch.all(sigma.conjugate(doubles(*outside)) == math.inf)
    for s in outside:  # the supremum grows without end
        far = math.copysign(1e9, s - 0.5)
        assert s * far - float(sigma.integral(doubles(far))) > 100


@pytest.mark.parametrize(("name", "s", "value"), ENDS)
def test_conjugate_at_the_ends_of_its_domain(name: str, s: float, value: float) -> None:
    sigma = BY_NAME[name]
    for one in (sigma, from_function_only(sigma)):
        assert one.conjugate(doubles(s)).item() == pytest.approx(value, abs=1e-13)
        beyond = math.nextafter(s, -math.inf if s == DOMAIN[name][0] else math.inf)
        assert one.conjugate(doubles(beyond)).item() == math.inf


@convex
def test_conjugate_of_nan_is_nan(sigma: Activation) -> None:
    for one in (sigma, from_function_only(sigma)):
        assert one.conjugate(doubles(math.nan)).isnan().all()


@convex
@given(a=vectors)
@settings(max_examples=25)
def test_fenchel_equality(sigma: Activation, a: Tensor) -> None:
    s = sigma(a)
    gap = sigma.integral(a) + sigma.conjugate(s) - a * s
    assert torch.all(gap.abs() <= 1e-12 * (1 + (a * s).abs())), gap


@convex
@given(a=vectors, s=st.floats(-10, 10) | st.floats(-1, 1))
@settings(max_examples=25)
def test_fenchel_young_inequality(sigma: Activation, a: Tensor, s: float) -> None:
    gap = sigma.integral(a) + sigma.conjugate(torch.full_like(a, s)) - a * s
    assert torch.all(gap >= -1e-12 * (1 + a**2)), gap


@convex
def test_gradient_of_the_conjugate_is_the_inverse_of_sigma(sigma: Activation) -> None:
    a = away_from_kinks(sigma, spread(-4, 4, 81))
    a = a[sigma.derivative(a) > 0]
    for one in (sigma, from_function_only(sigma)):
        gradient = torch.func.grad(one.conjugate)
        inexact = one is not sigma and sigma.name == "soft_threshold(0.4)"  # a kink inside a panel of the quadrature
        assert_near(torch.func.vmap(gradient)(sigma(a)), a, 1e-2 if inexact else 1e-10)
        if sigma.name not in KINKS:
            assert_near(torch.func.vmap(torch.func.grad(gradient))(sigma(a)) * sigma.derivative(a), torch.ones_like(a), 1e-9)


@proximal
@pytest.mark.parametrize("a", [-3.0, -1.0, -0.2, 0.0, 0.3, 0.7, 2.5])
def test_sigma_is_the_proximal_operator_of_its_penalty(sigma: Activation, a: float) -> None:
    low, high = DOMAIN.get(sigma.name, (-math.inf, math.inf))

    def loss(s: float) -> float:
        return float(sigma.penalty(doubles(s))) + (s - a) ** 2 / 2

    found = minimize_scalar(loss, bounds=(max(low, -5.0), min(high, 5.0)), method="bounded", options={"xatol": 1e-8})
    assert found.x == pytest.approx(float(sigma(doubles(a))), abs=1e-5)


@proximal
def test_penalty_is_convex(sigma: Activation) -> None:
    low, high = DOMAIN.get(sigma.name, (-math.inf, math.inf))
    h = sigma.penalty(spread(max(low, -5.0), min(high, 5.0), 501))
    assert torch.all(h.isfinite())
    assert torch.all(h.diff(n=2) >= -1e-11)


def test_penalties_that_have_a_name() -> None:
    s = doubles(-2.0, -0.5, 0.0, 0.5, 2.0)
    assert BY_NAME["relu"].penalty(s).tolist() == [math.inf, math.inf, 0.0, 0.0, 0.0]
    assert_near(BY_NAME["soft_threshold(0.4)"].penalty(s), 0.4 * s.abs(), 1e-15)
    assert BY_NAME["identity"].penalty(s).tolist() == [0.0] * 5


def test_penalty_needs_a_lipschitz_constant_of_at_most_one() -> None:
    with pytest.raises(ValueError, match=r"^penalty needs an activation with lipschitz <= 1: 'leaky_relu\(2\)' has 2,.* mu > 2 "):
        leaky_relu(2.0).penalty(torch.zeros(1))


@every
def test_no_difference_quotient_leaves_the_bounds(sigma: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = 20 * torch.rand(2, 20000, generator=generator, dtype=torch.float64) ** 2 - 8
    apart = (a - b).abs() > 1e-3
    quotient = ((sigma(a) - sigma(b)) / (a - b))[apart]
    assert torch.all(quotient <= sigma.lipschitz + 1e-12)
    assert torch.all(quotient >= (sigma.strong if sigma.monotone else -sigma.lipschitz) - 1e-12)


@every
def test_the_constants_are_attained(sigma: Activation) -> None:
    slope = sigma.derivative(spread(-40, 40, 80001))
    assert slope.max() <= sigma.lipschitz + 1e-15
    assert slope.max() >= sigma.lipschitz - 1e-6
    if sigma.monotone:
        assert sigma.strong <= slope.min() <= sigma.strong + 1e-6
    else:
        assert sigma.strong == 0
        assert slope.min() < -0.05


@pytest.mark.parametrize(("name", "near"), [("gelu", math.sqrt(2)), ("silu", 2.399357280515468)])
def test_lipschitz_constants_of_gelu_and_silu(name: str, near: float) -> None:
    sigma = BY_NAME[name]
    highest = sigma.derivative(spread(near - 1e-4, near + 1e-4, 2001)).max()
    assert highest <= sigma.lipschitz <= highest + 1e-10


@every
def test_what_is_derived_equals_the_closed_form(sigma: Activation) -> None:
    own = from_function_only(sigma)
    a = torch.cat([spread(-30, 30, 301), spread(-1, 1, 51), doubles(-1e3, 1e3)])
    assert_near(own.derivative(away_from_kinks(sigma, a)), sigma.derivative(away_from_kinks(sigma, a)), 1e-14)
    tol = 1e-3 if sigma.name == "soft_threshold(0.4)" else 1e-12  # a kink inside a panel
    assert_near(own.integral(a), sigma.integral(a), tol)
    if sigma.monotone:
        assert_near(own.conjugate(sigma(a)), sigma.conjugate(sigma(a)), tol)
        s = doubles(-3.0, -1.0, -0.2, 0.0, 0.1, 0.9, 1.0, 2.0, 1e3, 1e6)
        assert_near(own.conjugate(s), sigma.conjugate(s), tol)


def test_a_sharp_and_a_shifted_activation_of_ones_own() -> None:
    a = torch.cat([spread(-5, 5, 101), doubles(-1e3, 1e3)])
    sharp = softplus(20.0)
    assert_near(Activation("own", sharp.function, lipschitz=1.0).integral(a), sharp.integral(a), 1e-9)
    shifted = Activation("own", lambda a: torch.atan(a - 2), lipschitz=1.0)

    def area(b: Tensor) -> Tensor:
        return b * torch.atan(b) - torch.log1p(b**2) / 2

    expected = area(a - 2) - area(doubles(-2.0))
    assert_near(shifted.integral(a), expected, 1e-9)
    assert_near(shifted.conjugate(shifted(a)), a * shifted(a) - expected, 1e-9)
    assert torch.all(shifted.conjugate(doubles(-1.6, 1.6)) == math.inf)


def test_derived_conjugate_is_exactly_zero_where_its_minimum_is() -> None:
    for sigma in CONVEX:
        zero = doubles(0.0)
        own = from_function_only(sigma)
        assert own.integral(zero).item() == 0
        if sigma(zero).item() == 0:
            assert own.conjugate(zero).item() == 0


def test_a_given_part_is_used_as_it_is() -> None:
    width = 0.4
    known = soft_threshold(width)
    own = Activation("own", known.function, lipschitz=1.0, integral=known.integral)
    assert own.integral is known.integral
    a = spread(-3, 3, 61)
    assert_near(own.conjugate(known(a)), known.conjugate(known(a)), 1e-14)  # from the integral given: its kink costs no digits
    for part in ("derivative", "conjugate"):
        assert getattr(dataclasses.replace(own, **{part: torch.cos}), part) is torch.cos


@every
def test_large_arguments(sigma: Activation) -> None:
    a = doubles(-1e3, 1e3)
    for one in (sigma, from_function_only(sigma)):
        for part in (one.function, one.derivative, one.integral, *([one.conjugate] if one.monotone else [])):
            for dtype in (torch.float32, torch.float64):
                s = sigma(a.to(dtype)) if part is one.conjugate else a.to(dtype)
                assert part(s).isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_shape_are_kept(sigma: Activation, dtype: torch.dtype) -> None:
    a = away_from_kinks(sigma, spread(-4, 4, 36)).to(dtype).reshape(2, 3, -1)
    tol = 20 * torch.finfo(dtype).eps
    for one in (sigma, from_function_only(sigma)):
        for part in (one.function, one.derivative, one.integral):
            assert part(a).dtype == dtype
            assert_near(part(a).double(), part(a.double()), tol)
        if one.monotone:
            s = sigma(a)
            assert one.conjugate(s).dtype == dtype
            assert_near(one.conjugate(s).double(), one.conjugate(s.double()), tol)
        assert one.derivative(a[0, 0, 0]).shape == one.integral(a[0, 0, 0]).shape == ()
        assert one.derivative(a[:0]).shape == one.integral(a[:0]).shape == a[:0].shape


@every
def test_derivatives_can_be_transformed(sigma: Activation) -> None:
    a, v = away_from_kinks(sigma, spread(-3, 3, 23)), spread(1, 2, 23)
    v, h = v[: len(a)], 1e-5
    for one in (sigma, from_function_only(sigma)):
        slope = one.derivative
        curvature = (slope(a + h) - slope(a - h)) / (2 * h)
        assert_near(torch.func.vmap(slope)(a), slope(a), 1e-15)
        assert_near(torch.func.jvp(slope, (a,), (v,))[1], curvature * v, 1e-8)
        assert_near(torch.func.vjp(slope, a)[1](v)[0], curvature * v, 1e-8)
        assert_near(torch.func.vmap(torch.func.grad(slope))(a), curvature, 1e-8)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_near(slope(a), sigma.derivative(a), 1e-14)


def test_derived_derivative_is_differentiable_twice_by_autograd() -> None:
    own = Activation("own", torch.tanh, lipschitz=1.0)
    a = spread(-2, 2, 5).requires_grad_()
    assert torch.autograd.gradcheck(own.derivative, a)
    assert torch.autograd.gradgradcheck(own.derivative, a)
    with torch.autograd.forward_ad.dual_level():
        dual = own.derivative(torch.autograd.forward_ad.make_dual(a.detach(), torch.ones_like(a)))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    t = torch.tanh(a.detach())
    assert_near(tangent, -2 * t * (1 - t**2), 1e-14)


def test_a_cell_with_an_activation_of_ones_own() -> None:
    torch.manual_seed(0)
    cell = OptEq(3, 4, 5, activation="tanh").double()
    other = OptEq(3, 4, 5, activation=Activation("own", torch.tanh, lipschitz=1.0)).double()
    other.load_state_dict(cell.state_dict())
    x, z = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    assert_near(other.bind(x)(z), cell.bind(x)(z), 0.0)
    assert_near(other.bind(x).linearize(z).vjp(z), cell.bind(x).linearize(z).vjp(z), 1e-14)
    assert "activation=own" in repr(other)


@every
def test_copies(sigma: Activation) -> None:
    a = spread(-2, 2, 9)
    for other in (pickle.loads(pickle.dumps(sigma)), copy.deepcopy(from_function_only(sigma))):
        assert_near(other(a), sigma(a), 0.0)
        assert_near(other.derivative(a), sigma.derivative(a), 1e-14)
        assert other.lipschitz == sigma.lipschitz


def test_text_of_an_activation() -> None:
    assert repr(BY_NAME["tanh"]) == "Activation(name='tanh', lipschitz=1.0, strong=0.0, monotone=True)"
    made = [leaky_relu(0.5), softplus(2), soft_threshold(1)]
    assert [sigma.name for sigma in made] == ["leaky_relu(0.5)", "softplus(2)", "soft_threshold(1)"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        BY_NAME["tanh"].lipschitz = 2.0  # type: ignore[misc]


def test_find_activation() -> None:
    own = Activation("own", torch.tanh, lipschitz=1.0)
    assert find_activation("C", own) is own
    assert find_activation("C", "relu") is find_activation("C", "relu")
    with pytest.raises(
        ValueError, match=r"'activation' parameter of C must be one of 'relu', .*'silu', or an Activation\. Got 'elu'"
    ):
        find_activation("C", "elu")
    with pytest.raises(TypeError, match=r"^The 'activation' parameter of C must be a name or an Activation\."):
        find_activation("C", torch.relu)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OTHERS)
def test_theory_refuses_what_is_not_monotone(name: str) -> None:
    words = (
        rf"needs an activation that is monotone \(Assumption 1\): '{name}' is not, .* Take one of 'relu', .*'soft_threshold', or"
    )
    sigma = BY_NAME[name]
    with pytest.raises(ValueError, match=f"^objective {words}"):
        check_monotone("objective", sigma)
    with pytest.raises(ValueError, match=f"^OptEq {words}"):
        check_monotone(OptEq(1, 1, 1), sigma)
    with pytest.raises(ValueError, match=f"^penalty {words}"):
        sigma.penalty(torch.zeros(1))
    with pytest.raises(ValueError, match=f"^conjugate {words}"):
        sigma.conjugate(torch.zeros(1))


@convex
def test_theory_takes_what_is_monotone(sigma: Activation) -> None:
    check_monotone("objective", sigma)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": 3}, TypeError, "'name' parameter of Activation must be a string. Got 3 instead"),
        ({"function": "tanh"}, TypeError, "'function' parameter of Activation must be a function of a tensor. Got 'tanh'"),
        ({"derivative": 1.0}, TypeError, "'derivative' parameter of Activation must be a function of a tensor or None. Got 1.0"),
        ({"integral": 1.0}, TypeError, "'integral' parameter of Activation"),
        ({"conjugate": 1.0}, TypeError, "'conjugate' parameter of Activation"),
        ({"proximal": 1.0}, TypeError, "'proximal' parameter of Activation"),
        ({"lipschitz": 0.0}, ValueError, "'lipschitz' parameter of Activation must be a finite number > 0. Got 0.0"),
        ({"lipschitz": -1.0}, ValueError, "'lipschitz' parameter of Activation"),
        ({"lipschitz": math.inf}, ValueError, "'lipschitz' parameter of Activation"),
        ({"lipschitz": "1"}, TypeError, "'lipschitz' parameter of Activation"),
        ({"strong": -0.1}, ValueError, "'strong' parameter of Activation must be a finite number >= 0 and <= 1. Got -0.1"),
        ({"strong": 1.5}, ValueError, "'strong' parameter of Activation"),
        ({"strong": None}, TypeError, "'strong' parameter of Activation"),
        (
            {"strong": 0.5, "monotone": False},
            ValueError,
            "'strong' parameter of Activation must be 0 for an activation that is not",
        ),
        ({"monotone": 1}, TypeError, "'monotone' parameter of Activation must be True or False. Got 1"),
    ],
)
def test_bad_arguments(options: dict[str, object], error: type[Exception], words: str) -> None:
    good = {"name": "own", "function": torch.tanh, "lipschitz": 1.0}
    Activation(**good)
    with pytest.raises(error, match=words):
        Activation(**{**good, **options})


def test_lipschitz_must_be_given() -> None:
    with pytest.raises(ValueError, match="'lipschitz' parameter of Activation must be a finite number > 0"):
        Activation("own", torch.tanh)


@pytest.mark.parametrize(("make", "name"), [(leaky_relu, "slope"), (softplus, "beta"), (soft_threshold, "width")])
def test_bad_parameters(make: Callable[[float], Activation], name: str) -> None:
    for value, error in ((0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("1", TypeError)):
        with pytest.raises(error, match=rf"^The '{name}' parameter of {make.__name__} must be a finite number > 0\."):
            make(value)  # type: ignore[arg-type]
