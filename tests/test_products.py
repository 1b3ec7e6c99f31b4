"""Products and their derivatives: the same as PyTorch's, and PyTorch's own wherever a transform is about."""

import pytest
import torch
from torch.autograd import forward_ad

from opteq import products
from opteq.products import affine, inverse, linear, product

BIG = (64, 256, 256)  # above the size from which oneDNN is asked


class Subclass(torch.Tensor):
    """Some library's tensors, which may do anything."""


@pytest.fixture
def asked(monkeypatch):
    """How often oneDNN was asked, on whatever processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    found = []
    monkeypatch.setattr(products, "_prefers_onednn", lambda: True)
    quick = products._quick
    monkeypatch.setattr(products, "_quick", lambda a, B: found.append(quick(a, B)) or found[-1])
    return found


def operands(shape=BIG, dtype=torch.float32):
    torch.manual_seed(0)
    m, k, n = shape
    return torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype), torch.randn(m, n, dtype=dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_float64_to_rounding(asked, transposed):
    a, B, u = operands()
    B = B.T.contiguous().T if transposed else B
    exact = a.double() @ B.double()
    torch.testing.assert_close(product(a, B).double(), exact, rtol=0, atol=2e-4)
    torch.testing.assert_close(affine(u, a, B).double(), u.double() + exact, rtol=0, atol=2e-4)
    assert asked == [True, True]


def test_a_sample_with_nan_leaves_the_others_alone(asked):
    a, B, u = operands()
    a[3] = float("nan")
    for out in (product(a, B), affine(u, a, B)):
        assert out[3].isnan().all()
        assert out[torch.arange(len(a)) != 3].isfinite().all()
    assert all(asked)


@pytest.mark.parametrize("case", ["small", "double", "strided", "disabled", "autocast", "subclass", "batches"])
def test_pytorch_is_asked_in_all_other_cases(asked, case, monkeypatch):
    a, B, _ = operands((8, 16, 16) if case == "small" else BIG, torch.float64 if case == "double" else torch.float32)
    if case == "strided":
        a = torch.stack([a, a], 2)[..., 0]
    if case == "subclass":
        a = a.as_subclass(Subclass)
    if case == "batches":
        a = a[None]
    if case == "disabled":
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    if case == "autocast":
        with torch.autocast("cpu", dtype=torch.float16):
            assert not products._quick(a, B)
        return
    product(a, B)
    assert not any(asked)


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_of_first_and_second_order_are_products_too(asked, transposed):
    torch.manual_seed(0)
    a, W, u = operands()
    W = W.T.contiguous() if transposed else W
    leaves = [tensor.requires_grad_() for tensor in (a, W, u)]

    def second(a, W, u):
        """The gradient of |gradient|^2 of a cubic, by way of both functions."""
        B = W.T if transposed else W
        out = affine(u, a, B) + linear(a, B.T, u[0]) + product(a, B)
        first = torch.autograd.grad((out**3).mean(), (a, W, u), create_graph=True)
        return first + torch.autograd.grad(sum((g**2).sum() for g in first), (a, W, u))

    found, wanted = second(*leaves), second(*(leaf.detach().double().requires_grad_() for leaf in leaves))
    assert asked.count(True) >= 9
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() < 1e-5 * exact.norm()


def test_gradients_have_the_layout_of_their_parameters(asked):
    a, B, _ = operands()
    W, V = B.T.contiguous().requires_grad_(), B.clone().requires_grad_()
    (linear(a, W) + product(a, V)).sum().backward()
    assert W.grad.is_contiguous()
    assert V.grad.is_contiguous()
    torch.testing.assert_close(V.grad, W.grad.T)
    made = torch.autograd.grad((linear(a, W) + product(a, V)).sum(), (W, V))  # no optimizer lays these out anew
    assert all(gradient.is_contiguous() for gradient in made)


def test_a_backward_pass_computes_what_it_is_asked_for_only(asked, monkeypatch):
    a, B, _ = operands()
    a.requires_grad_()
    B.requires_grad_()
    out, made = product(a, B), []
    outer = products._outer
    monkeypatch.setattr(products, "_outer", lambda *tensors: made.append(1) or outer(*tensors))
    (only,) = torch.autograd.grad(out, a, torch.ones_like(out), retain_graph=True)
    assert not made
    torch.testing.assert_close(only, torch.ones_like(out) @ B.T)
    del asked[:]
    torch.autograd.grad(out, B, torch.ones_like(out))
    assert made == [1]
    assert asked == [True]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own forward mode
def test_transforms_and_forward_mode_see_pytorch_s_products(asked):
    a, B, _ = operands()
    tangent = torch.randn_like(a)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(product(forward_ad.make_dual(a, tangent), B))
    torch.testing.assert_close(out.tangent, tangent @ B)
    mapped = torch.func.vmap(product, (0, None))(torch.stack([a, 2 * a]), B)
    torch.testing.assert_close(mapped[1], 2 * a @ B)
    _, pull = torch.func.vjp(lambda a: product(a, B), a)
    torch.testing.assert_close(pull(torch.ones(64, 256))[0], torch.ones(64, 256) @ B.T)
    assert not any(asked)


@pytest.mark.parametrize("side", [100, 257, 600])
@pytest.mark.parametrize("skew", [0.1, 10.0])
def test_inverses_of_monotone_matrices_need_no_pivots(asked, side, skew):
    torch.manual_seed(0)
    S, B = torch.randn(2, side, side) / side**0.5
    A = torch.eye(side) + S.T @ S + skew * (B - B.T)
    exact, given = torch.linalg.inv(A.double()), A.clone()
    error = (inverse(A) - exact).norm() / exact.norm()
    assert error < 10 * (torch.linalg.inv(A) - exact).norm() / exact.norm()
    assert torch.equal(A, given)
    assert any(asked) == (side > 128)


def test_matrices_that_are_nearly_skew_are_inverted_with_pivots(asked):
    torch.manual_seed(0)
    B = torch.randn(256, 256) / 16
    A = torch.eye(256) + 1000 * (B - B.T)
    assert torch.equal(inverse(A), torch.linalg.inv(A))
