"""What every solver must satisfy, whatever its method: subclass `SolverConformance`, parametrised with solvers.

Also here: maps that record how they are used, residuals computed without the library, and the files of `make verify`.
"""

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from opteq import Map, Solution, Solver, Status, Stop, per_sample, solve
from opteq.solve import Jacobian
from opteq.solvers import Broyden, Newton

ROOT = Path(__file__).resolve().parents[1]


def write_verify(name: str, payload: dict[str, Any]) -> Path:
    """results/verify/<name>.json: what a full-size check measured, and with which torch."""
    path = ROOT / "results" / "verify" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**payload, "torch": torch.__version__}, indent=2, sort_keys=True) + "\n")
    return path


def lengths(z: Tensor) -> np.ndarray:
    """The norm of each sample, by numpy, in long double: no scale overflows."""
    rows = z.detach().cpu().double().numpy().astype(np.longdouble)
    return np.sqrt((rows.reshape(len(rows), math.prod(rows.shape[1:])) ** 2).sum(axis=1))


def residual(f: Any, z: Tensor) -> np.ndarray:
    """|f(z) - z| / |f(z)| of each sample, 0/0 = 0, computed without the library."""
    with torch.no_grad():
        fz = f(z)
    size, scale = lengths(fz - z), lengths(fz)
    return np.divide(size, scale, out=np.where(size > 0, np.inf, 0).astype(size.dtype), where=scale > 0).astype(float)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest relative difference between samples."""
    return float((lengths(a - b) / lengths(b)).max(initial=0.0))


def check_honest(solution: Solution, f: Any) -> None:
    """`residual` is that of the returned z; what is called converged meets the tolerance."""
    z, eps = solution.z, torch.finfo(solution.z.dtype).eps
    true, reported = residual(f, z), solution.residual.double().numpy()
    known = np.array([status is not Status.NONFINITE for status in solution.statuses])
    np.testing.assert_allclose(reported[known], true[known], rtol=1e-3, atol=4 * eps)
    converged = solution.converged.numpy()
    assert converged.tolist() == [status is Status.CONVERGED for status in solution.statuses]
    with torch.no_grad():
        fz = f(z)
    allowed = solution.stop.atol + (solution.stop.rtol * (1 + 1e-3) + 4 * eps) * lengths(fz)
    assert (lengths(fz - z) <= allowed)[converged].all()


class Log:
    """How a map was used."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of each evaluation
        self.products = 0

    @property
    def uses(self) -> int:
        return len(self.rows) + self.products


@dataclass(frozen=True)
class TanhMap(Map):
    """tanh(W z + u), each sample with its own W [batch, n, n] and u [batch, n]; every use is logged."""

    closed: ClassVar[bool] = True
    W: Tensor = per_sample()
    u: Tensor = per_sample()
    log: Log = field(default_factory=Log)

    def __call__(self, z: Tensor) -> Tensor:
        self.log.rows.append(z.shape[0])
        return torch.tanh(torch.einsum("bij,bj->bi", self.W, z) + self.u)

    def linearize(self, z: Tensor) -> Jacobian:
        slope = 1 - torch.tanh(torch.einsum("bij,bj->bi", self.W, z) + self.u) ** 2

        def jvp(v: Tensor) -> Tensor:
            self.log.products += 1
            return slope * torch.einsum("bij,bj->bi", self.W, v)

        def vjp(v: Tensor) -> Tensor:
            self.log.products += 1
            return torch.einsum("bij,bi->bj", self.W, slope * v)

        return Jacobian(jvp=jvp, vjp=vjp, symmetric=self.symmetric)


@dataclass(frozen=True)
class CosMap(Map):
    """rate cos(z) + shift, entry by entry; rate [batch, 1] and shift [batch, n]."""

    closed: ClassVar[bool] = True
    rate: Tensor = per_sample()
    shift: Tensor = per_sample()
    log: Log = field(default_factory=Log)

    def __call__(self, z: Tensor) -> Tensor:
        self.log.rows.append(z.shape[0])
        return self.rate * torch.cos(z) + self.shift


def uneven_tanh(batch: int = 64, n: int = 10, hardest: float = 0.97, seed: int = 0) -> TanhMap:
    """Contractions from trivial to hard, in no order."""
    g = torch.Generator().manual_seed(seed)
    W, u = torch.randn(batch, n, n, generator=g).double(), torch.randn(batch, n, generator=g).double()
    norms = torch.linspace(0.01, hardest, batch).double()[torch.randperm(batch, generator=g)]
    return TanhMap(W * (norms / torch.linalg.matrix_norm(W, 2))[:, None, None], 0.3 * u)


def uneven_cos(batch: int = 64, n: int = 10, seed: int = 0) -> CosMap:
    g = torch.Generator().manual_seed(seed)
    rate = torch.linspace(0.01, 0.97, batch).double()[torch.randperm(batch, generator=g)]
    return CosMap(rate[:, None], torch.randn(batch, n, generator=g).double())


def rows_of(*samples: int) -> Tensor:
    return torch.tensor(samples)


TIGHT = Stop(rtol=1e-10, max_steps=2000)


@functools.cache
def uneven_run(solver: Solver, plain: bool) -> tuple[Solution, Log]:
    """The solution of uneven_tanh() from zeros, as a Map or a plain callable, and how the map was used; to be read only."""
    fn = uneven_tanh()
    return solve(fn.__call__ if plain else fn, torch.zeros_like(fn.u), solver, TIGHT), fn.log


@functools.cache
def spoilt_run(solver: Solver, plain: bool) -> Solution:
    """The same with NaN in the map of sample 7 and infinity in that of sample 40: both are undefined already at zeros."""
    fn = uneven_tanh()
    fn.W[7, 0, 0], fn.W[40, 0, 0] = math.nan, math.inf
    return solve(fn.__call__ if plain else fn, torch.zeros_like(fn.u), solver, TIGHT)


def cosine(z: Tensor) -> Tensor:
    """cos(z) / 2 + (0, 1/3, 2/3, 1), for 4 samples of any shape."""
    return 0.5 * torch.cos(z) + torch.linspace(0, 1, 4, dtype=z.dtype).reshape(4, *[1] * (z.dim() - 1))


@functools.cache
def cosine_of_one_number(solver: Solver) -> Solution:
    return solve(cosine, torch.zeros(4, 1, dtype=torch.float64), solver, TIGHT)


class SolverConformance:
    """Tests that take a `solver`: parametrise the subclass with `@pytest.mark.parametrize("solver", [...])`."""

    tight = TIGHT

    @pytest.mark.parametrize("max_steps", [1, 3, 2000])
    @pytest.mark.parametrize("rtol", [1e-2, 1e-10])
    def test_the_residual_is_that_of_the_returned_z(self, solver: Solver, rtol: float, max_steps: int) -> None:
        fn = uneven_tanh(batch=16)
        found = solve(fn, torch.zeros_like(fn.u), solver, Stop(rtol=rtol, max_steps=max_steps))
        check_honest(found, fn)
        assert int(found.steps.max()) <= max_steps
        met = torch.from_numpy(residual(fn, found.z)) <= rtol
        assert torch.equal(found.converged, met)  # nothing that met the tolerance is called a failure
        assert max_steps < 2000 or found.status is Status.CONVERGED

    def test_a_sample_is_the_same_alone_and_among_others(self, solver: Solver) -> None:
        fn, (among, _) = uneven_tanh(), uneven_run(solver, plain=False)
        assert among.status is Status.CONVERGED
        for i in range(0, 64, 13):
            alone = solve(fn.select(rows_of(i)), torch.zeros_like(fn.u[:1]), solver, self.tight)
            assert alone.status is Status.CONVERGED
            assert distance(among.z[i : i + 1], alone.z) <= 1e-12

    def test_finished_samples_leave_the_work(self, solver: Solver) -> None:
        _, log = uneven_run(solver, plain=False)
        assert log.rows[0] == 64
        assert min(log.rows) <= 24
        assert log.rows == sorted(log.rows, reverse=True)

    def test_a_plain_callable_always_gets_the_whole_batch(self, solver: Solver) -> None:
        found, log = uneven_run(solver, plain=True)
        assert found.status is Status.CONVERGED
        assert set(log.rows) == {64}

    @pytest.mark.parametrize("plain", [False, True], ids=["map", "callable"])
    def test_a_nonfinite_sample_changes_nothing_for_the_others(self, solver: Solver, plain: bool) -> None:
        (clean, _), found = uneven_run(solver, plain), spoilt_run(solver, plain)
        others = torch.ones(64, dtype=torch.bool)
        others[[7, 40]] = False
        assert [i for i, status in enumerate(found.statuses) if status is Status.NONFINITE] == [7, 40]
        assert found.z[~others].isfinite().all()
        assert found.converged[others].all()
        assert distance(found.z[others], clean.z[others]) <= 1e-12
        assert int((found.steps - clean.steps)[others].abs().max()) <= 1

    def test_a_sample_that_turns_nonfinite_on_the_way_keeps_its_best_finite_iterate(self, solver: Solver) -> None:
        z0, seen = torch.zeros(2, 3, dtype=torch.float64), []

        def sound(z: Tensor) -> Tensor:
            return torch.stack([0.9 * torch.cos(z[0]), 0.5 * z[1] + 1])

        def f(z: Tensor) -> Tensor:  # NaN for sample 0 from the fourth look on, before any solver is done with it
            seen.append(z)
            return sound(z) + torch.tensor([[math.nan if len(seen) > 3 else 0.0], [0.0]])

        found = solve(f, z0, solver, Stop(rtol=1e-10, max_steps=100))
        steps_back = isinstance(solver, (Broyden, Newton))  # from where f is not finite, again and again
        assert found.statuses == (Status.MAX_STEPS if steps_back else Status.NONFINITE, Status.CONVERGED)
        assert found.z.isfinite().all()
        true = residual(sound, found.z)
        np.testing.assert_allclose(found.residual, true, rtol=1e-3, atol=1e-15)
        assert true[0] <= residual(sound, z0)[0]

    @pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (3, 4, 5)])
    def test_any_state_shape(self, solver: Solver, shape: tuple[int, ...]) -> None:
        found = solve(cosine, torch.zeros(4, *shape, dtype=torch.float64), solver, self.tight)
        assert found.status is Status.CONVERGED
        assert found.z.shape == (4, *shape)
        check_honest(found, cosine)
        one = cosine_of_one_number(solver).z.reshape(4, *[1] * len(shape))
        assert distance(found.z, one.expand(4, *shape)) <= 1e-9

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_the_dtype_of_the_start_is_kept(self, solver: Solver, dtype: torch.dtype) -> None:
        rtol = 8 * torch.finfo(dtype).eps
        found = solve(lambda z: 0.5 * z + 1, torch.zeros(3, 4, dtype=dtype), solver, Stop(rtol=rtol, max_steps=200))
        assert found.status is Status.CONVERGED
        assert found.z.dtype == found.residual.dtype == dtype
        assert torch.allclose(found.z, torch.full((3, 4), 2, dtype=dtype), rtol=3 * rtol)

    def test_evaluations_are_counted_exactly(self, solver: Solver) -> None:
        for stop in (Stop(rtol=1e-10, max_steps=2000), Stop(rtol=1e-10, max_steps=4), Stop(rtol=0.9)):
            fn = uneven_tanh(batch=8)
            assert solve(fn, torch.zeros_like(fn.u), solver, stop).evals == fn.log.uses

    @pytest.mark.parametrize("start", ["zeros", "solution", "undefined"])
    def test_the_returned_z_is_nobody_elses_tensor(self, solver: Solver, start: str) -> None:
        fixed = torch.full((3, 4), 2.0, dtype=torch.float64)
        z0 = {"zeros": torch.zeros_like(fixed), "solution": fixed.clone(), "undefined": torch.full_like(fixed, math.nan)}[start]
        before, constant = z0.clone(), fixed.clone()
        for f in (lambda z: 0.5 * z + 1, lambda z: constant, lambda z: z):
            found = solve(f, z0, solver, Stop(rtol=1e-8))
            found.z.fill_(77.0)
            assert torch.equal(z0.nan_to_num(-1), before.nan_to_num(-1))
            assert torch.equal(constant, fixed)

    def test_a_start_at_the_solution_takes_no_step(self, solver: Solver) -> None:
        fn = uneven_tanh(batch=16)
        z = solve(fn, torch.zeros_like(fn.u), solver, Stop(rtol=1e-14, max_steps=3000)).z
        again = solve(fn, z, solver, Stop(rtol=1e-10))
        assert again.status is Status.CONVERGED
        assert again.steps.tolist() == [0] * 16
        assert torch.equal(again.z, z)

    def test_autograd_is_not_touched(self, solver: Solver) -> None:
        weight = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
        z0 = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
        found = solve(lambda z: weight * z + 1, z0, solver, self.tight)
        assert not found.z.requires_grad
        assert found.status is Status.CONVERGED

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("rtol", [0.5, 0.1, 1e-4, 0.0])
    def test_a_map_without_fixed_point_is_never_solved(self, solver: Solver, rtol: float, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        random = torch.randn(4, 3, generator=g, dtype=torch.float64).to(dtype)
        z0 = torch.cat([torch.zeros_like(random), random, torch.full_like(random, 1e6)])
        found = solve(lambda z: z + 1, z0, solver, Stop(rtol=rtol, max_steps=12))
        assert not found.converged.any()
        assert found.z.isfinite().all()
        check_honest(found, lambda z: z + 1)

    @pytest.mark.parametrize("scale", [1e30, 1e-30])
    def test_no_scale_overflows_or_vanishes_in_float32(self, solver: Solver, scale: float) -> None:
        shift = scale * torch.linspace(1, 3, 6)
        found = solve(lambda z: 0.5 * z + shift, torch.zeros(2, 6), solver, Stop(rtol=1e-5))
        assert found.status is Status.CONVERGED
        assert distance(found.z, (2 * shift.double()).expand(2, 6)) <= 1e-4
        check_honest(found, lambda z: 0.5 * z + shift)

    def test_zero_over_zero_is_converged(self, solver: Solver) -> None:
        found = solve(lambda z: 0.5 * z, torch.zeros(2, 3), solver, Stop(rtol=0.0))
        assert found.status is Status.CONVERGED
        assert found.residual.tolist() == [0, 0]
        assert found.steps.tolist() == [0, 0]

    @pytest.mark.parametrize("shape", [(0, 4), (0,), (0, 2, 3)])
    @pytest.mark.parametrize("kind", ["map", "callable"])
    def test_an_empty_batch_is_solved(self, solver: Solver, kind: str, shape: tuple[int, ...]) -> None:
        fn = CosMap(torch.zeros(shape[0], *[1] * (len(shape) - 1)), torch.zeros(shape))
        found = solve(fn if kind == "map" else fn.__call__, torch.zeros(shape), solver, record=True)
        assert found.status is Status.CONVERGED
        assert found.z.shape == shape
        assert found.statuses == ()
        assert len(found.residual) == len(found.steps) == 0

    def test_a_state_may_be_one_number_a_sample(self, solver: Solver) -> None:
        rate = torch.linspace(0, 0.9, 5, dtype=torch.float64)
        scalars = solve(lambda z: rate * torch.cos(z), torch.zeros(5, dtype=torch.float64), solver, self.tight)
        columns = solve(lambda z: rate[:, None] * torch.cos(z), torch.zeros(5, 1, dtype=torch.float64), solver, self.tight)
        assert scalars.status is Status.CONVERGED
        assert torch.equal(scalars.z[:, None], columns.z)

    def test_solvers_are_frozen_and_compare_by_value(self, solver: Solver) -> None:
        assert solver == type(solver)(**vars(solver))
        assert hash(solver) == hash(type(solver)(**vars(solver)))
        with pytest.raises(AttributeError):
            solver.memory = 3  # type: ignore[attr-defined]
