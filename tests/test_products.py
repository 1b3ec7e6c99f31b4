"""Products inside of solvers: the same as PyTorch's, and PyTorch's own wherever a derivative or a transform is about."""

import pytest
import torch
from torch.autograd import forward_ad

from opteq import products
from opteq.products import affine, product

BIG = (64, 256, 256)  # above the size from which oneDNN is asked


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


@pytest.mark.parametrize("case", ["small", "double", "strided", "disabled", "autocast", "grad", "batches"])
def test_pytorch_is_asked_in_all_other_cases(asked, case, monkeypatch):
    a, B, _ = operands((8, 16, 16) if case == "small" else BIG, torch.float64 if case == "double" else torch.float32)
    if case == "strided":
        a = a.T.contiguous().T
    if case == "batches":
        a = a[None]
    if case == "grad":
        B.requires_grad_()
    if case == "disabled":
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    if case == "autocast":
        with torch.autocast("cpu", dtype=torch.float16):
            assert not products._quick(a, B)
        return
    out = product(a, B)
    assert not any(asked)
    if case == "grad":
        out.sum().backward()
        torch.testing.assert_close(B.grad, a.sum(0)[:, None].expand(-1, B.shape[1]))
        with torch.no_grad():
            product(a, B)
        assert asked[-1]


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
