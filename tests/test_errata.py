"""Printed errors in the convergence theory: each test fails for the printed version and passes for the one used here."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from opteq.cells import GaussianDEQ, Monotone, OptEq, ScaledReLU
from opteq.models import Readout
from opteq.theory.certificates import certified_init, certify, descend


def data(N: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, d, generator=g).double(), torch.randn(N, generator=g).double()


def loss_of(readout: Readout, X: Tensor, y: Tensor) -> Tensor:
    return (readout(X) - y).square().sum() / 2


def test_gaussian_condition_9_needs_8_for_the_printed_4() -> None:
    """The induction gives L(k+1) <= (1 - eta lam0 + 2 eta S + eta^2 C^2) L(k), which must be at most (1 - eta lam0/2) L(k)."""

    def factor(lam0: float, S: float, C: float) -> tuple[float, float]:
        eta = min(2 / lam0, 2 * S / C**2)
        return 1 - eta * lam0 + 2 * eta * S + eta**2 * C**2, 1 - eta * lam0 / 2

    rng = np.random.default_rng(0)
    for S, extra in np.exp(rng.normal(size=(50, 2))):
        C = S + 8 * S * (1 + extra)  # C = S + c_a^2 |X|_F^2, where c_a |X|_F >= ||Z||_F >= sqrt(lam0)
        got, claimed = factor(4 * S, S, C)  # the printed condition, with equality
        assert got > claimed
        assert got >= 1 - 1e-12  # no decrease at all
        got, claimed = factor(8 * S, S, C)
        assert got <= claimed * (1 + 1e-12)
    X, y = data(2, 4)
    readout = certified_init(Readout(GaussianDEQ(4, 60).double()), X, y)
    assert "lam0 >= 8 (c_w^2 + c_u^2)" in certify(readout, X, y).explain()


def test_monotone_condition_3_17_drops_the_powers_of_m() -> None:
    """One step of descent moves Z by up to eta |e| |X|_F^2 lu/m^2 (1 + ...); the printed bound has no m, and is broken by 1/m^2."""
    m, U, u = 0.1, 0.1, 0.5
    readout = Readout(Monotone(1, 1, m=m, bias=False)).double()
    with torch.no_grad():
        for parameter, value in ((readout.cell.A, 0.0), (readout.cell.B, 0.0), (readout.cell.U, U), (readout.a, u)):
            parameter.fill_(value)
    X, y = torch.ones(1, 1).double(), torch.zeros(1).double()
    before, error = readout.solve(X).z.detach(), float((readout(X) - y).detach().abs())
    eta = 1e-6
    parts = torch.autograd.grad(loss_of(readout, X, y), list(readout.parameters()))
    with torch.no_grad():
        for parameter, part in zip(readout.parameters(), parts, strict=True):
            parameter -= eta * part
    moved = float(torch.linalg.vector_norm(readout.solve(X).z.detach() - before))
    lA, lU, lu = (float(p.detach().abs().max()) + 1e-4 for p in (readout.cell.A, readout.cell.U, readout.a))
    printed = eta * error * lu * (1 + 6 * (lU * lA) ** 2 + 4 * lU**2)
    ours = eta * error * lu / m**2 * (1 + (4 * lA**2 + 4) * lU**2 / m**2)
    assert moved > 50 * printed
    assert moved <= ours


def test_monotone_condition_3_17_lacks_a_factor_of_2() -> None:
    """Proposition 6 bounds ||Z(k) - Z(0)|| by |X|_F^2 r0 8 lu (1 + 2 (3 lA^2 + 2) lU^2)/lam0^2, which must be at most lam0/2."""
    XF, r0, lu, lA, lU = 1.3, 0.7, 0.2, 1.1, 2.0
    total = XF**2 * r0 * lu * (1 + 6 * (lU * lA) ** 2 + 4 * lU**2)

    def distance(lam0: float) -> float:
        return 8 * total / lam0**2

    printed, right = (8 * total) ** (1 / 3), (16 * total) ** (1 / 3)
    assert distance(printed) == pytest.approx(printed)  # lam0, not lam0/2: sigma_min(Z) may be 0
    assert distance(right) == pytest.approx(right / 2)


def test_monotone_condition_3_18_as_printed_forces_m_below_1_over_sqrt_20_N() -> None:
    """sigma_min(Z)^2 <= ||U||^2 |X|_F^2/(N m^2), so that lam0^2 >= 20 |X|_F^2 lU^2 cannot hold for larger m; the right one does."""
    X, y = data(3, 5)
    m = 0.8
    assert m > 1 / math.sqrt(20 * len(X))
    readout = certified_init(Readout(Monotone(5, 30, m=m, bias=False).double()), X, y)
    sigma = float(torch.linalg.svdvals(readout.solve(X).z.detach())[-1])
    norm, XF = float(torch.linalg.matrix_norm(readout.cell.U.detach(), 2)), float(X.norm())
    assert sigma**2 <= norm**2 * XF**2 / (len(X) * m**2)
    assert sigma**2 < 20 * XF**2 * norm**2
    assert certify(readout, X, y).holds


def test_monotone_step_as_printed_lets_the_loss_grow() -> None:
    """With A = B = 0, z = relu(U x)/m: the curvature grows like 1/m^2, and the printed step does not know m."""
    torch.manual_seed(0)
    m, N = 0.02, 3
    X = torch.nn.functional.normalize(torch.randn(N, 4, dtype=torch.float64))
    y = torch.randn(N, dtype=torch.float64)
    readout = Readout(Monotone(4, 12, m=m, bias=False)).double()
    with torch.no_grad():
        for weight in (readout.cell.A, readout.cell.B, readout.a):
            weight.zero_()
    XF, lU, lu, lA = float(X.norm()), float(torch.linalg.matrix_norm(readout.cell.U.detach(), 2)) + 1e-3, 1e-3, 1e-3
    lam0 = float(torch.linalg.svdvals(readout.solve(X).z.detach())[-1])
    terms = lu**2 + 4 * (lU * lu) ** 2 + 4 * (lU * lu * lA) ** 2 + lU**2
    last = min(0.5 / (XF * lam0 * lU * lu * lA), 1 / (6 * lam0**2 * (lu * lA) ** 2))
    printed = min(4 / lam0**2, 1 / (XF**2 * terms), last)
    run = descend(copy.deepcopy(readout), X, y, printed, 1)
    assert run.losses[1] > 2 * run.losses[0]
    bracket = 1 + (4 * lA**2 + 4) * lU**2 / m**2
    Q2, Q1 = XF**2 * lu**2 / m**2 * bracket, XF**2 / m**2 * (lu**2 * bracket + lU**2)
    assert descend(readout, X, y, min(4 / lam0**2, 2 * Q2 / Q1**2), 1).losses[1] < run.losses[0]


def test_scaled_relu_lower_bounds_of_section_4_1_need_1_plus_gamma_0() -> None:
    """sigma_min(M) >= gamma/(1 - gamma_0) |b| min D sigma_min(Z) fails at A = -I; with 1/(1 + gamma_0) it holds."""
    gamma = 0.5
    readout = Readout(ScaledReLU(3, 4, gamma=gamma).double())
    with torch.no_grad():
        readout.cell.A.copy_(-torch.eye(4))
        readout.cell.W.abs_()
        readout.a.fill_(1.0)
    X = torch.ones(1, 3).double()
    z = readout.solve(X).z
    assert bool((z > 0).all())  # D = I
    (M,) = torch.autograd.grad(readout(X).sum(), [readout.cell.A])
    size = float(M.norm()) / (gamma * float(readout.a.detach().norm()) * float(z.detach().norm()))
    assert size < 1 / (1 - gamma)
    assert size >= 1 / (1 + gamma) * (1 - 1e-9)


def test_scaled_relu_equation_6_speaks_of_eigenvalues_where_singular_values_are_meant() -> None:
    """I - gamma D A' need not have real eigenvalues; what is at least 1 - gamma_0 is sigma_min, which can be below their moduli."""
    gamma = 0.5
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double()
    Q = torch.eye(2).double() - gamma * rotation.T
    assert bool((torch.linalg.eigvals(Q).imag.abs() > 0.1).all())
    shear = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()
    Q = torch.eye(2).double() - gamma * shear.T
    assert float(torch.linalg.eigvals(Q).abs().min()) == pytest.approx(1.0)
    assert 1 - gamma <= float(torch.linalg.svdvals(Q)[-1]) < 0.8
    identity = torch.eye(2).double()
    assert float(torch.linalg.svdvals(identity - gamma * identity)[-1]) == 1 - gamma  # so ">" is ">="


def test_the_norm_of_a_half_normal_matrix_grows_like_its_size() -> None:
    """||A|| = O(sqrt m) is printed below (27); the mean of |N(0, 1)| makes it sqrt(2/pi) m."""
    for m in (50, 200):
        norm = float(torch.linalg.matrix_norm(ScaledReLU(3, m, gamma=0.1, init="half_normal").A.detach(), 2))
        assert norm == pytest.approx(math.sqrt(2 / math.pi) * m, rel=0.05)
        assert norm > 2.5 * math.sqrt(m)


def test_theorem_2_5_4_lacks_a_factor_of_2_in_its_rate() -> None:
    """|grad|^2 >= mu L and step 1/L give 1 - mu/(2 L): a quadratic along its flat axis is slower than the printed 1 - mu/L."""
    h = np.array([1.0, 0.1])
    theta = np.array([0.0, 1.0])

    def value(t: np.ndarray) -> float:
        return float((h * t**2).sum() / 2)

    mu = 2 * h.min()  # |grad|^2 = sum h^2 t^2 >= 2 min(h) value
    after = value(theta - h * theta / h.max())
    assert after > (1 - mu / h.max()) * value(theta)
    assert after <= (1 - mu / (2 * h.max())) * value(theta)


def test_lemma_2_3_2_lacks_one_half() -> None:
    """W + W' >= m I makes F(x) = W x strongly monotone with m/2, not m."""
    W = 0.5 * np.eye(3)
    x = np.ones(3)
    assert np.linalg.eigvalsh(W + W.T).min() == pytest.approx(1.0)
    assert x @ W @ x < 1.0 * (x @ x)
    assert x @ W @ x >= 0.5 * (x @ x)


def test_equation_2_6_equates_norm_and_spectral_radius() -> None:
    J = np.array([[0.0, 2.0], [0.0, 0.0]])
    assert np.linalg.norm(J, 2) == 2
    assert np.abs(np.linalg.eigvals(J)).max() == 0


def test_theorem_6_of_opteq_is_unsound() -> None:
    """Two equal inputs with labels y + 1 and y - 1: the gradient is 0 and the loss is not, where the assumptions hold."""
    g = torch.Generator().manual_seed(0)
    cell = OptEq(3, 6, 4, activation="leaky_relu", alpha=0.1).double()
    readout = Readout(cell)
    with torch.no_grad():
        cell.W.copy_(0.5 * torch.linalg.qr(torch.randn(6, 4, generator=g).double())[0].T)
    x = torch.randn(1, 3, generator=g).double()
    X = torch.cat([x, x])
    y = readout(X).detach() + torch.tensor([1.0, -1.0]).double()
    found = certify(readout, X, y)
    assert all(c.holds for c in found.conditions)
    loss = loss_of(readout, X, y)
    parts = torch.autograd.grad(loss, list(readout.parameters()))
    assert float(loss.detach()) == pytest.approx(1.0)
    assert max(float(p.abs().max()) for p in parts) < 1e-9
    assert found.holds is None
    assert found.guarantees == ()


def test_theorem_6_needs_alpha_K_L_below_1() -> None:
    """(1 - alpha L)^k, Lemma 16's lower bound, is no bound for alpha L >= 1, as in the paper's own networks (alpha = 1)."""
    X, y = data(2, 3)
    found = certify(Readout(OptEq(3, 6, 4).double()), X, y)
    (condition,) = (c for c in found.conditions if c.name == "alpha K L")
    assert not condition.holds
    # alpha = 1: the Jacobian of a layer is W'DW, which vanishes with W, below any (1 - alpha)^(L - l) c for c > 0
    W = 0.01 * torch.eye(3).double()
    alpha = 0.6
    J = alpha * W.T @ W + (1 - alpha) * torch.eye(3).double()
    assert float(torch.linalg.matrix_norm(J @ J, 2)) < abs(1 - 2 * alpha) + 1e-3
    assert 1 - 2 * alpha < 0  # printed as a lower bound of that norm
