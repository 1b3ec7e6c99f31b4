"""Gaussian-initialised ReLU DEQs: z = relu(W z + U x), y = a'z."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from opteq.theory.certificates.conditions import Condition, Guarantee
from opteq.theory.certificates.theorem import Radii, Theorem

__all__ = ["GaussianTheorem"]

_ROOT = 4 * (2 + math.sqrt(2))


class _Constants(NamedTuple):
    rho_w: float
    rho_a: float
    c_w: float
    c_u: float
    c_a: float


@dataclass(frozen=True)
class GaussianTheorem(Theorem):
    """Theorem 1, with 8 for the printed 4 in (9), which its induction needs; lam0 = lambda_min(Z'Z), one radius d for W, U and a.

    For flows the same proof with integrals for sums gives (7) and (8) with half of the factors, and no (9).
    """

    names: ClassVar[tuple[str, ...]] = ("d",)
    scaled: ClassVar[str] = "U"

    @property
    def title(self) -> str:
        return "Gaussian DEQ, Theorem 1 " + ("with its proof read for flows" if self.flow else "(gradient descent), (9) corrected")

    def limits(self) -> Radii:
        return {"d": 1 - self.start.norms["W"]}

    def reference(self) -> Radii:
        return {"d": max(self.limits()["d"], 1e-3) / math.sqrt(32 * self.start.N)}

    def balls(self) -> Mapping[str, str]:
        return {"d": "W"}

    @property
    def lam0(self) -> float:
        """lambda_min(Z'Z) from below."""
        return self.start.sigma * self.start.sigma

    @property
    def decay(self) -> float:
        return self.lam0 if self.flow else self.lam0 / 2

    def posed(self, radii: Radii) -> Condition:
        norm, sw2 = self.start.norms["W"], self.start.constant
        remedy = (
            f"Scale W down to ||W|| < 1: it is {norm:.4g}. W ~ N(0, 2 sigma_w2 / m) has ||W|| about 2 sqrt(2 sigma_w2), which is "
            f"{2 * math.sqrt(2 * sw2):.4g} for sigma_w2 = {sw2:g} and below 1 only for sigma_w2 < 1/8."
        )
        return Condition("well-posed", "1 > rho_w = ||W|| + d", 1.0, norm + radii["d"], remedy=remedy, strict=True)

    def _constants(self, d: float) -> _Constants:
        rho_w, rho_u, rho_a = (self.start.norms[name] + d for name in ("W", "U", "a"))
        gap = 1 - rho_w if rho_w < 1 else math.nan
        return _Constants(rho_w, rho_a, rho_u * rho_a / (gap * gap), rho_a / gap, rho_u / gap)

    def sides(self, radii: Radii) -> tuple[tuple[float, float], ...]:
        d, XF, r0, lam0 = radii["d"], self.start.XF, self.start.r0, self.lam0
        c, half = self._constants(d), 2 if self.flow else 1
        squares = c.c_w * c.c_w + c.c_u * c.c_u
        first = 4 / half / d * max(c.c_w, c.c_u, c.c_a) * XF * r0
        second = _ROOT / half * squares * XF * XF * r0 / c.rho_a
        growing = ((lam0, first), (lam0 * self.start.sigma, second))
        return growing if self.flow else (*growing, (lam0, 8 * squares * XF * XF))

    def texts(self) -> tuple[tuple[str, str], ...]:
        k = 2 if self.flow else 4
        growing = (
            ("(7)", f"lam0 >= {k}/d max(c_w, c_u, c_a) |X|_F r0"),
            ("(8)", f"lam0^(3/2) >= {k} (2 + sqrt 2) (c_w^2 + c_u^2) |X|_F^2 r0 / rho_a"),
        )
        return growing if self.flow else (*growing, ("(9)", "lam0 >= 8 (c_w^2 + c_u^2) |X|_F^2"))

    def readout_remedy(self) -> str:
        norm, most = self.start.norms["a"], (1 - self.start.norms["W"]) / math.sqrt(8 * self.start.N)
        text = f"(9) forces ||a|| + d <= (1 - rho_w)/sqrt(8 n) < {most:.3g}, because lam0 <= rho_u^2 |X|_F^2/(n (1 - rho_w)^2)."
        if norm >= most:
            return (
                f"{text} With ||a|| = {norm:.3g} no width suffices: a ~ N(0, 1/m) has ||a|| -> 1 as the width grows. "
                "Begin at a = 0, with U scaled up (certified_init)."
            )
        return f"{text} ||a|| = {norm:.3g} allows it for a small d, as (7) does once U is scaled up (certified_init)."

    def stated_step(self, radii: Radii) -> float:
        c, XF = self._constants(radii["d"]), self.start.XF
        squares = c.c_w * c.c_w + c.c_u * c.c_u
        total = squares + c.c_a * c.c_a
        return min(2 * (squares / total) / (total * XF * XF), 2 / self.lam0)

    def size_of_Z(self, radii: Radii) -> float:
        return self._constants(radii["d"]).c_a * self.start.XF

    def guarantees(self, radii: Radii) -> tuple[Guarantee, ...]:
        d, norms = radii["d"], self.start.norms
        balls = [(name, bound) for p in ("W", "U", "a") for name, bound in ((f"moved {p}", d), (f"norm {p}", norms[p] + d))]
        least = self.start.sigma / math.sqrt(2)
        return (*(Guarantee(name, "<=", bound) for name, bound in balls), Guarantee("sigma_min Z", ">=", least))
