"""Monotone DEQs: z = sigma(W z + U x), W = (1-m) I - A'A + B - B', y = u'z; the u of the thesis is `a` here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from opteq.theory.certificates.conditions import Condition, Guarantee
from opteq.theory.certificates.theorem import Radii, Theorem

__all__ = ["MonotoneTheorem"]


class _Constants(NamedTuple):
    lA: float
    lU: float
    lu: float
    bracket: float  # 1 + (4 lA^2 + 4) lU^2/m^2


@dataclass(frozen=True)
class MonotoneTheorem(Theorem):
    """Theorem 3.3.5, re-derived with the powers of m and the factor 2 that the thesis drops, or for flows Theorem 3.3.1.

    lam0 = sigma_min(Z), lX = ||X|| + R_X for X in A, U, u. No condition depends on the norm of B, so R_B is infinite by default;
    how far B moves is bounded all the same. With a bias, x is [x, 1] and U is [U, b]. sigma may be any activation with sigma(0) = 0
    and slopes in [0, 1].
    """

    names: ClassVar[tuple[str, ...]] = ("R_A", "R_U", "R_u")
    optional: ClassVar[tuple[str, ...]] = ("R_B",)
    scaled: ClassVar[str] = "U"
    parallel_remedy: ClassVar[str] = "Remove an input, or begin with a bias b that is not 0"

    @property
    def title(self) -> str:
        return "Monotone DEQ, " + ("Theorem 3.3.1 (gradient flow)" if self.flow else "Theorem 3.3.5 (gradient descent), re-derived")

    @property
    def _U(self) -> str:
        return "[U b]" if "[U b]" in self.start.norms else "U"

    def limits(self) -> Radii:
        return dict.fromkeys(self.names, math.inf)

    def complete(self, radii: Radii) -> Radii:
        return {"R_B": math.inf, **radii}

    def reference(self) -> Radii:
        norms, m = self.start.norms, abs(self.start.constant) or 1.0
        size = 4 * norms["A"] * norms["A"] + 4
        return {"R_A": 0.1 * norms["A"] + 0.1, "R_U": norms[self._U] + 1e-12, "R_u": m / (16 * math.sqrt(self.start.N * size))}

    def balls(self) -> Mapping[str, str]:
        return {"R_A": "A", "R_U": self._U, "R_u": "a"}

    @property
    def decay(self) -> float:
        return self.start.sigma * self.start.sigma / (2 if self.flow else 4)

    def posed(self, radii: Radii) -> Condition:
        m = self.start.constant
        return Condition("well-posed", "m > 0, where I - W >= m I", m, 0.0, remedy=f"Choose m > 0; it is {m:g}.", strict=True)

    def _constants(self, radii: Radii) -> _Constants:
        norms, m = self.start.norms, self._m
        lA, lU, lu = norms["A"] + radii["R_A"], norms[self._U] + radii["R_U"], norms["a"] + radii["R_u"]
        return _Constants(lA, lU, lu, 1 + (4 * lA * lA + 4) * lU / m * lU / m)

    @property
    def _m(self) -> float:
        return self.start.constant if self.start.constant > 0 else math.nan

    def sides(self, radii: Radii) -> tuple[tuple[float, float], ...]:
        lA, lU, lu, bracket = self._constants(radii)
        XF, r0, lam0, m = self.start.XF, self.start.r0, self.start.sigma, self._m
        square, half = lam0 * lam0, 2 if self.flow else 1
        W = 2 * lU * lu / (m * m)
        largest = max(W * lA / radii["R_A"], W / radii.get("R_B", math.inf), lu / (m * radii["R_U"]), lU / (m * radii["R_u"]))
        second = 16 / half * XF * XF * r0 * lu / (m * m) * bracket
        growing = ((square, 8 / half * XF * r0 * largest), (square * lam0, second))
        return growing if self.flow else (*growing, (square, 16 * self._Q2(radii)))

    def _Q2(self, radii: Radii) -> float:
        _, _, lu, bracket = self._constants(radii)
        return self.start.XF * self.start.XF * lu * lu / (self._m * self._m) * bracket

    def texts(self) -> tuple[tuple[str, str], ...]:
        names, half = (("(3.8)", "(3.9)"), 2) if self.flow else (("(3.16)", "(3.17)"), 1)
        growing = (
            (names[0], f"lam0^2 >= {8 // half} |X|_F r0 max(2 lU lu lA/(m^2 R_A), 2 lU lu/(m^2 R_B), lu/(m R_U), lU/(m R_u))"),
            (names[1], f"lam0^3 >= {16 // half} |X|_F^2 r0 lu/m^2 (1 + (4 lA^2 + 4) lU^2/m^2)"),
        )
        return growing if self.flow else (*growing, ("(3.18)", "lam0^2 >= 16 |X|_F^2 lu^2/m^2 (1 + (4 lA^2 + 4) lU^2/m^2)"))

    def readout_remedy(self) -> str:
        norms = self.start.norms
        most = self._m / (4 * math.sqrt(self.start.N * (4 * norms["A"] * norms["A"] + 4)))
        text = f"(3.18) forces ||a|| + R_u <= m/(4 sqrt(N (4 lA^2 + 4))) < {most:.3g}, because lam0^2 <= lU^2 |X|_F^2/(N m^2)."
        if norms["a"] >= most:
            return f"{text} With ||a|| = {norms['a']:.3g} no width and no scale of U suffices: begin at a = 0; a larger m helps."
        return f"{text} ||a|| = {norms['a']:.3g} allows it for a small R_u, as (3.16) does once U is scaled up (certified_init)."

    def stated_step(self, radii: Radii) -> float:
        _, lU, lu, bracket = self._constants(radii)
        XF, m, square = self.start.XF, self._m, self.start.sigma * self.start.sigma
        Q1 = XF * XF / (m * m) * (lu * lu * bracket + lU * lU)
        return min(2 * (self._Q2(radii) / Q1) / Q1, 4 / square)

    def size_of_Z(self, radii: Radii) -> float:
        return self._constants(radii).lU * self.start.XF / self._m

    def guarantees(self, radii: Radii) -> tuple[Guarantee, ...]:
        norms = self.start.norms
        found = []
        for name, weight in self.balls().items():
            found.append(Guarantee(f"moved {weight}", "<=", radii[name]))
            found.append(Guarantee(f"norm {weight}", "<=", norms[weight] + radii[name]))
        found.append(Guarantee("moved B", "<=", self._path_of_B(radii)))
        return (*found, Guarantee("sigma_min Z", ">=", self.start.sigma / 2))

    def _path_of_B(self, radii: Radii) -> float:
        """The length of B's path: condition (3.16) read as a bound of R_B."""
        _, lU, lu, _ = self._constants(radii)
        factor = 8 if self.flow else 16
        return factor * self.start.XF * self.start.r0 * lU * lu / (self._m * self._m) / (self.start.sigma * self.start.sigma)
