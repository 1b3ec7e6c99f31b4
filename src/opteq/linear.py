"""Linear equilibria v = M v + g, that is (I - M) v = g, for each sample: CG, GMRES and the Neumann series.

They are Solvers like any other and run in the one loop of `solve`, which stops each sample on its own true residual.
M is the Jacobian of a map, or its transpose, known by its products only.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from opteq.batch import at_least_single, combine, dot, dots, is_zero, lined, norm, per_sample_like, taken, unlined
from opteq.checks import check_integer, check_number, is_transformed
from opteq.convex import ConvexMap, raised
from opteq.maps import Jacobian, Map
from opteq.products import product
from opteq.solver import Solver, State
from opteq.tree import Replace, per_sample

__all__ = ["CG", "GMRES", "DualCG", "LinearizedMap", "Neumann", "linear_solver"]


@dataclass(frozen=True)
class LinearizedMap(Map):
    """v -> J v + g, or v -> J' v + g when `transposed`, with J the Jacobian of `base` at z.

    Its equilibria are the tangent and the adjoint of the equilibrium of `base`.
    """

    fresh: ClassVar[bool] = True
    base: Map
    transposed: bool
    z: Tensor = per_sample()
    g: Tensor = per_sample()
    known: Jacobian | None = field(default=None, compare=False, repr=False)  # J, where somebody has it already

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self.base.closed

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.base.symmetric

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.base.independent

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.base.coupled

    @cached_property
    def jacobian(self) -> Jacobian:
        """J, linearised once however many products follow."""
        return _linearized(self.base, self.z) if self.known is None else self.known

    def replace_leaves(self, replace: Replace) -> Self:
        """The same map with each tensor exchanged, which forgets the J that is known unless z stays where it is."""
        other = super().replace_leaves(replace)
        if self.known is not None and not (isinstance(other.z, Tensor) and other.z.is_set_to(self.z)):
            object.__setattr__(other, "known", None)
        return other

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, base=self.base.to(dtype), z=self.z.to(dtype), g=self.g.to(dtype), known=None)

    def sourced(self, g: Tensor) -> Self:
        """The same with another g; what was linearised serves again."""
        return replace(self, g=g, known=self.jacobian)

    def product(self, v: Tensor) -> Tensor:
        """M v."""
        return self.jacobian.vjp(v) if self.transposed else self.jacobian.jvp(v)

    def __call__(self, v: Tensor) -> Tensor:
        return self.product(v) + self.g

    def linearize(self, z: Tensor) -> Jacobian:
        forward, backward = self.jacobian.jvp, self.jacobian.vjp
        jvp, vjp = (backward, forward) if self.transposed else (forward, backward)
        return Jacobian(jvp=jvp, vjp=vjp, symmetric=self.symmetric)


def _linearized(fn: Map, z: Tensor) -> Jacobian:
    """J at z, inside of a solve by a graph where f has no closed form: torch.func refuses backward hooks and old Functions in f.

    In inference mode, and of tensors made there, there is no graph.
    """
    plain = torch.is_grad_enabled() or is_transformed(z) or torch.is_inference_mode_enabled() or z.is_inference()
    if type(fn).linearize is not Map.linearize or plain:
        return fn.linearize(z)

    @cache  # made when first needed
    def graph() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            return point, fn(point)

    def vjp(v: Tensor) -> Tensor:
        point, value = graph()
        if not value.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(value, point, v, retain_graph=True, materialize_grads=True)[0]

    automatic = cache(lambda: fn.linearize(z))
    return Jacobian(jvp=lambda v: automatic().jvp(v), vjp=vjp, symmetric=fn.symmetric)


def linear_solver(fn: Map) -> "CG | GMRES":
    """The method that fits the structure of a map's Jacobian: CG if it is symmetric, in the dual where that pays; else GMRES."""
    if isinstance(fn, ConvexMap) and fn.dual_pays():
        return DualCG()
    return CG() if fn.symmetric else GMRES()


def _linear(solver: Solver, fn: Map) -> LinearizedMap:
    if not isinstance(fn, LinearizedMap):
        name = type(solver).__name__
        raise TypeError(
            f"{name} solves linear equilibria v = M v + g, given as a LinearizedMap. Got {type(fn).__name__} instead; "
            "solvers that fit any map are Picard, Anderson, Broyden and Newton."
        )
    return fn


def _start(fn: LinearizedMap, v0: Tensor) -> tuple[Tensor, int]:
    """The residual g - (I - M) v0, and what it cost."""
    return (fn.g, 0) if is_zero(v0) else (fn(v0) - v0, 1)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b where b > 0, else 0."""
    return torch.where(b > 0, a / b, torch.zeros_like(a))


@dataclass(frozen=True)
class CGState(State):
    """The iterate is z + unit x: directions and residuals are kept near 1, so that no scale of g overflows.

    x, r and p change in place.
    """

    exact: ClassVar[bool] = False
    history: ClassVar[tuple[str, ...]] = ("x", "r", "p")
    x: Tensor
    r: Tensor
    p: Tensor
    rr: Tensor
    unit: Tensor

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        return self.iterate() if rows is None else self.iterate()[rows]

    def iterate(self) -> Tensor:
        """z + unit x."""
        return torch.addcmul(self.z, per_sample_like(self.unit, self.x), self.x)

    def estimate(self) -> tuple[Tensor, Tensor]:
        size = self.rr.sqrt() * self.unit
        return size, torch.maximum(norm(self.iterate()), size)

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        true = (fz - z).div_(per_sample_like(self.unit[rows], z))
        self.r[rows], self.p[rows] = true, true
        return replace(self, rr=self.rr.index_copy(0, rows, dot(true, true)))


@dataclass(frozen=True)
class CG(Solver):
    """Conjugate gradients for (I - M) v = g with M symmetric and I - M positive definite; one product a step, five vectors.

    Hestenes and Stiefel (1952). Where I - M turns out not to be positive definite, a sample stops moving and does not converge;
    GMRES does not need that.
    """

    estimates: ClassVar[bool] = True

    def init(self, fn: Map, z0: Tensor) -> CGState:
        r, evals = _start(_linear(self, fn), z0)
        size = norm(r)
        unit = torch.where(size > 0, size, torch.ones_like(size))
        r = r / per_sample_like(unit, r)
        return CGState(z0, evals, x=torch.zeros_like(r), r=r, p=r.clone(), rr=dot(r, r), unit=unit)

    def step(self, fn: Map, state: State) -> CGState:
        assert isinstance(state, CGState)
        x, r, p = state.x, state.r, state.p
        q = p - _linear(self, fn).product(p)
        length = per_sample_like(_ratio(state.rr, dot(p, q)), p)
        x.addcmul_(length, p)
        r.addcmul_(length, q, value=-1)
        rr = dot(r, r)
        p.mul_(per_sample_like(_ratio(rr, state.rr), p)).add_(r)
        return replace(state, evals=state.evals + 1, rr=rr)


@dataclass(frozen=True)
class LinearDual(Map):
    """v = J v + g of a convex map, with what its dual needs: G = W W' / mu and the roots of D = diag(sigma'(W z + u))."""

    base: ConvexMap  # the map that was linearised, of which u has served its purpose
    G: Tensor
    root: Tensor = per_sample()
    g: Tensor = per_sample()

    def select(self, rows: Tensor) -> Self:
        return replace(self, root=taken(self.root, rows), g=taken(self.g, rows))

    def sourced(self, g: Tensor) -> Self:
        """The same with another g."""
        return replace(self, g=g)

    def rooted(self, s: Tensor, rows: Tensor | None = None) -> Tensor:
        """D^1/2 s for an s, of some samples or of all, that is D^1/2 times something."""
        return s if self.base.sigma.binary else s * (self.root if rows is None else self.root[rows])

    def __call__(self, v: Tensor) -> Tensor:
        """J v + g, without linearising once more."""
        alpha, out = self.base.alpha, self.base.lift(self.rooted(self.base.project(v).mul_(self.root)))
        out = out if not isinstance(alpha, Tensor) and alpha == 1 else torch.lerp(v, out, alpha)
        return out.add_(self.g)


@dataclass(frozen=True)
class DualCGState(State):
    """The iterate is z + (g + unit W' D^1/2 x / mu) / alpha. x, r and p, all of them D^1/2 times something, change in place."""

    exact: ClassVar[bool] = False
    history: ClassVar[tuple[str, ...]] = ("x", "r", "p")
    g: Tensor  # the residual at z
    x: Tensor
    r: Tensor
    p: Tensor
    rr: Tensor
    bx: Tensor  # <b, x>, b the right-hand side
    xx: Tensor  # |x|^2, <x, p> and |p|^2, by their recurrences
    xp: Tensor
    pp: Tensor
    unit: Tensor
    trust: Tensor  # how far the estimate of the residual was below the truth
    reach: Tensor  # |J z + g|
    mu: float
    moved: bool

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        if not self.moved:
            return super().candidate(fn, rows)
        assert isinstance(fn, LinearDual)
        if rows is None:
            return fn.base.lift(fn.rooted(self.x)).mul_(self.unit[:, None]).add_(self.g).div_(fn.base.alpha).add_(self.z)
        step = fn.base.lift(fn.rooted(self.x[rows], rows)).mul_(self.unit[rows, None])
        return step.add_(self.g[rows]).div_(fn.base.alpha).add_(self.z[rows])

    def estimate(self) -> tuple[Tensor, Tensor]:
        """The residual is W' D^1/2 r / mu, of norm |r| / sqrt(mu) at most; alpha^2 |v - z|^2 = 1 + (<b, x> + |x|^2) / mu, in units.

        alpha is left out, which makes the estimate of |v| too small and asks for a little more than the tolerance.
        """
        if not self.moved:
            return self.unit, self.reach
        size = self.unit * self.trust * (self.rr / self.mu).sqrt()
        return size, torch.maximum(self.unit * (1 + (self.bx + self.xx) / self.mu).sqrt(), self.reach)

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        return replace(self, trust=raised(self.trust, rows, norm(fz - z), self.estimate()[0][rows]))


@dataclass(frozen=True)
class DualCG(CG):
    """CG on the dual of v = J v + g, J = alpha W' D W / mu + (1 - alpha) I with a dense W: one product with G = W W' / mu a step.

    v = (g + W' D^1/2 w / mu) / alpha with (I - D^1/2 G D^1/2) w = D^1/2 W g.
    """

    def prepare(self, fn: Map) -> LinearDual:
        if isinstance(fn, LinearDual):
            return fn
        primal = _linear(self, fn)
        if not isinstance(primal.base, ConvexMap):
            name = type(primal.base).__name__
            raise TypeError(f"DualCG needs a map that has a dual, such as that of a dense OptEq. Got {name} instead; CG does not.")
        base = primal.base
        return LinearDual(base, base.dual().G, base.sigma.root(base.hidden(primal.z)), primal.g)

    def init(self, fn: Map, z0: Tensor) -> DualCGState:  # type: ignore[override]
        assert isinstance(fn, LinearDual)
        g, evals = (fn.g, 0) if is_zero(z0) else (fn(z0) - z0, 1)
        size = norm(g)
        unit = torch.where(size > 0, size, torch.ones_like(size))
        r = fn.base.project(g / unit[:, None]).mul_(fn.root)
        zeros, ones, rr = torch.zeros_like(size), torch.ones_like(size), dot(r, r)
        unit = torch.where(size > 0, unit, size)
        products = {"rr": rr, "bx": zeros, "xx": zeros, "xp": zeros, "pp": rr}
        return DualCGState(
            z0, evals + 1, g, torch.zeros_like(r), r, r.clone(), **products, unit=unit, trust=ones, reach=norm(z0 + g),
            mu=fn.base.mu, moved=False,
        )  # fmt: skip

    def step(self, fn: Map, state: State) -> DualCGState:  # type: ignore[override]
        assert isinstance(fn, LinearDual)
        assert isinstance(state, DualCGState)
        x, r, p, rr = state.x, state.r, state.p, state.rr
        q = torch.addcmul(p, fn.root, product(fn.rooted(p), fn.G), value=-1)
        ratio = _ratio(rr, dot(p, q))
        length = ratio[:, None]
        x.addcmul_(length, p)
        r.addcmul_(length, q, value=-1)
        after = dot(r, r)
        share, reached = _ratio(after, rr), state.xp + ratio * state.pp  # <x, p> for the new x
        torch.addcmul(r, share[:, None], p, out=p)
        return replace(
            state,
            evals=state.evals + 1,
            rr=after,
            bx=state.bx + ratio * rr,
            xx=state.xx + ratio * (state.xp + reached),
            xp=share * reached,  # the new x is orthogonal to the new r
            pp=after + share * share * state.pp,
            moved=True,
        )


@dataclass(frozen=True)
class NeumannState(State):
    """The partial sum z and the next term r, which is also its residual."""

    exact: ClassVar[bool] = False
    r: Tensor

    def estimate(self) -> tuple[Tensor, Tensor]:
        return norm(self.r), norm(self.z + self.r)

    def corrected(self, rows: Tensor, z: Tensor, fz: Tensor) -> Self:
        return replace(self, r=self.r.index_copy(0, rows, fz - z))


@dataclass(frozen=True)
class Neumann(Solver):
    """v = g + M g + M^2 g + ...: converges when the spectral radius of M is below 1; one product a step, two vectors."""

    estimates: ClassVar[bool] = True

    def init(self, fn: Map, z0: Tensor) -> NeumannState:
        r, evals = _start(_linear(self, fn), z0)
        return NeumannState(z0, evals, r)

    def step(self, fn: Map, state: State) -> NeumannState:
        assert isinstance(state, NeumannState)
        return NeumannState(state.z + state.r, state.evals + 1, _linear(self, fn).product(state.r))


_FORESEEN = 2.0  # times the last rate of the terms of a series is what the next one is expected to be at most


@dataclass(frozen=True)
class GMRESState(State):
    """Arnoldi's method from z, for each sample: (I - M) V' = V' H, and H = Q' R by accumulated rotations.

    z, V, R and Q change in place. A sample that sums the series has no columns: z is its sum so far, and beta V_0, which is the
    residual at z, its next term. Its iterate has that term, too, and what this leaves is foreseen from the `rate` of the terms.
    """

    exact: ClassVar[bool] = False
    history: ClassVar[tuple[str, ...]] = ("V",)
    V: Tensor  # [batch, slots, n]: j + 1 orthonormal rows, then zeros; what is beyond slot `top` is not defined
    R: Tensor  # [batch, restart, restart], upper triangular
    Q: Tensor  # [batch, restart + 1, restart + 1], orthogonal
    beta: Tensor  # [batch], the residual at z
    reach: Tensor  # [batch], |z|
    j: Tensor  # [batch], columns so far
    brisk: Tensor  # [batch] bool: the sample sums the series
    rate: Tensor  # [batch], of the last two terms
    top: int  # the largest j

    def slots(self) -> int:
        return self.top + 1

    def weights(self) -> Tensor:
        """y [batch, top], the least-squares solution min |beta e1 - H y|; 0 beyond the columns of a sample."""
        top = self.top
        R, rhs = self.R[:, :top, :top], self.beta[:, None] * self.Q[:, :top, 0]
        diagonal = R.diagonal(dim1=1, dim2=2)
        floor = torch.finfo(R.dtype).eps * diagonal.amax(dim=1, keepdim=True)
        singular = ~(diagonal > floor)  # a breakdown, or no column: leave that direction out
        R = R + torch.diag_embed(singular.to(R.dtype))
        rhs = torch.where(singular, 0, rhs)[:, :, None]
        y: Tensor = torch.linalg.solve_triangular(at_least_single(R), at_least_single(rhs), upper=True)
        return y[:, :, 0].to(R.dtype)

    def candidate(self, fn: Map, rows: Tensor | None = None) -> Tensor:
        return self.iterate() if rows is None else self.iterate()[rows]

    def iterate(self) -> Tensor:
        """z + V' y; z + beta V_0 for the samples that sum the series, once it is known how fast that is."""
        term = torch.where(self.ahead() < 1, self.beta, 0)
        if self.top == 0:
            return torch.addcmul(self.z, unlined(self.V[:, 0], self.z), per_sample_like(term, self.z))
        y = self.weights()
        y[:, 0] += term
        return unlined(combine(y, self.V[:, : self.top]), self.z).add_(self.z)

    def ahead(self) -> Tensor:
        """The part of the residual at z that the term beta V_0 is expected to leave."""
        return torch.where(self.brisk, (_FORESEEN * self.rate).clamp_max(1), 1)

    def estimate(self) -> tuple[Tensor, Tensor]:
        if self.top == 0:
            return self.beta * self.ahead(), torch.maximum(self.reach, self.beta)
        size = self.beta * self.Q[:, :, 0].gather(1, self.j[:, None])[:, 0].abs() * self.ahead()
        return size, torch.maximum(torch.hypot(self.reach, norm(self.weights())), size)


@dataclass(frozen=True)
class GMRES(Solver):
    """min |g - (I - M) v| over growing Krylov spaces, begun anew every `restart` steps; one product a step, restart + 4 vectors.

    `brisk`: while each term of the series v = g + M g + ... has at most this part of the length of the last, a sample sums the
    series, which needs three vectors and no projections; 0: never. Saad and Schultz (1986), with Gram-Schmidt done
    twice where once does not do.
    """

    estimates: ClassVar[bool] = True
    restart: int = 30
    brisk: float = 0.4

    def __post_init__(self) -> None:
        check_integer(self, "restart", self.restart, 1)
        check_number(self, "brisk", self.brisk, 0.0, 1.0, open_high=True)

    def init(self, fn: Map, z0: Tensor) -> GMRESState:
        r, evals = _start(_linear(self, fn), z0)
        beta, j = norm(r), torch.zeros(len(z0), dtype=torch.long, device=z0.device)
        V = lined(r, z0).div(torch.where(beta > 0, beta, 1)[:, None])[:, None]
        R, Q = V.new_empty(len(V), 0, 0), V.new_empty(len(V), 0, 0)  # made when a sample needs them
        brisk = torch.full_like(j, self.brisk > 0 and not fn.coupled, dtype=torch.bool)  # samples that depend on others keep step
        return GMRESState(z0.clone(), evals, V, R, Q, beta, norm(z0), j, brisk, torch.ones_like(beta), top=0)

    def step(self, fn: Map, state: State) -> GMRESState:
        assert isinstance(state, GMRESState)
        fn, most = _linear(self, fn), min(self.restart, state.V.shape[2])
        state = replace(state, top=int(state.j.max()))  # samples may have been dropped
        if state.top == most:
            state = _renewed(fn, state, state.j == most)
        v = _last(state)
        image = lined(fn.product(unlined(v, state.z)), state.z)
        rate = norm(image)
        state = replace(state, evals=state.evals + 1, brisk=state.brisk & (rate <= self.brisk))
        if state.brisk.all():
            return _summed(state, v, image, rate)
        w = v - image
        if state.brisk.any():
            state = _summed(state, v, image, rate)
        del v, image  # make room
        return _expanded(state, w, most)


def _last(state: GMRESState) -> Tensor:
    """The last row of V of each sample."""
    if int(state.j.min()) == state.top:
        return state.V[:, state.top]
    return state.V[torch.arange(len(state.V), device=state.j.device), state.j]


def _summed(state: GMRESState, v: Tensor, image: Tensor, rate: Tensor) -> GMRESState:
    """One more term for the brisk samples: z <- z + beta v, and M v is the next."""
    z = state.z.addcmul_(unlined(v, state.z), per_sample_like(torch.where(state.brisk, state.beta, 0), state.z))
    first, unit = state.V[:, 0], torch.where(rate > 0, rate, 1)
    if state.brisk.all():
        torch.div(image, unit[:, None], out=first)
    else:
        first.mul_((~state.brisk)[:, None]).addcmul_(image, (state.brisk / unit)[:, None])
    return replace(state, z=z, beta=torch.where(state.brisk, state.beta * rate, state.beta), reach=norm(z), rate=rate)


def _renewed(fn: LinearizedMap, state: GMRESState, full: Tensor) -> GMRESState:
    """Some samples begin a new cycle at their iterates."""
    z, rows = state.iterate(), full.nonzero()[:, 0]
    if rows.numel() < len(full):
        z = torch.where(per_sample_like(full, z), z, state.z)
    state = replace(state, z=z)  # the old one is freed
    r = lined(fn(z) - z, z)
    beta = torch.where(full, norm(r), state.beta)
    r.div_(torch.where(beta > 0, beta, 1)[:, None])
    state.V[rows, 0] = r if rows.numel() == len(full) else r[rows]
    state.V[rows, 1 : state.top + 1] = 0
    state.R[rows] = 0
    state.Q[rows] = torch.eye(state.Q.shape[1], dtype=r.dtype, device=r.device)
    j = torch.where(full, 0, state.j)
    return replace(state, evals=state.evals + 1, beta=beta, reach=norm(z), j=j, top=int(j.max()))


def _roomy(state: GMRESState, most: int) -> GMRESState:
    """The state with room for columns."""
    if state.V.shape[1] > 1:
        return state
    batch, _, n = state.V.shape
    V = state.V.new_empty(batch, most + 1, n)
    V[:, 0] = state.V[:, 0]
    Q = torch.eye(most + 1, dtype=V.dtype, device=V.device).repeat(batch, 1, 1)
    return replace(state, V=V, R=V.new_zeros(batch, most, most), Q=Q)


_PARALLEL = 0.1  # a vector that loses more than this to a projection is projected once more


def _expanded(state: GMRESState, w: Tensor, most: int) -> GMRESState:
    """One more column of H, rotated into R, for the samples that are not brisk: w = (I - M) v, v the last row of V."""
    state = _roomy(state, most)
    V, R, Q, top = state.V, state.R, state.Q, state.top
    rows = (~state.brisk).nonzero()[:, 0]
    j = state.j[rows]
    basis = V[:, : top + 1]
    before = norm(w)
    h = dots(basis, w)
    w.sub_(combine(h, basis))
    rest = norm(w)
    if not (rest > _PARALLEL * before)[rows].all():  # most of w was in the span of V: what is left may not be orthogonal to it
        part = dots(basis, w)
        w.sub_(combine(part, basis))
        h, rest = h + part, norm(w)
    dependent = rest <= torch.finfo(w.dtype).eps * norm(h)  # the Krylov space is exhausted
    w.div_(torch.where(dependent, 1, rest)[:, None])
    w.masked_fill_((dependent | state.brisk)[:, None], 0)
    if int(j.min()) == top:
        V[:, top + 1] = w
    else:
        V[:, top + 1] = 0
        V[rows, j + 1] = w[rows]
    _rotate(R, Q, dots(Q[:, : top + 1, : top + 1], h)[rows], torch.where(dependent, 0, rest)[rows], rows, j)
    return replace(state, V=V, j=state.j.index_add(0, rows, torch.ones_like(rows)), top=max(top, int(j.max()) + 1))


def _rotate(R: Tensor, Q: Tensor, column: Tensor, rest: Tensor, rows: Tensor, j: Tensor) -> None:
    """Column j of R from Q h, and the rotation that takes `rest` out of it into Q, for some rows."""
    here = j[:, None]
    last = column.gather(1, here)[:, 0]
    length = torch.hypot(last, rest)
    cos = torch.where(length > 0, last / length, 1)[:, None]
    sin = torch.where(length > 0, rest / length, 0)[:, None]
    above = torch.arange(column.shape[1], device=j.device) < here
    R[rows, : column.shape[1], j] = torch.where(above, column, 0).scatter(1, here, length[:, None])
    upper, lower = Q[rows, j], Q[rows, j + 1]
    Q[rows, j] = cos * upper + sin * lower
    Q[rows, j + 1] = cos * lower - sin * upper
