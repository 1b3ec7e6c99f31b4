"""Gamma-scaled ReLU implicit networks: Z = relu(gamma Z A + relu(X W)), y = Z b; the b of the paper is `a` here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from opteq.theory.certificates.conditions import Condition, Guarantee
from opteq.theory.certificates.theorem import Radii, Theorem

__all__ = ["ScaledReLUTheorem"]


class _Constants(NamedTuple):
    l1: float
    l3: float
    gap: float  # 1 - gamma_0
    bracket: float  # 1 + gamma_0^2/(1-gamma_0)^2 l1^2/l2^2, where gamma_0/l2 = gamma


@dataclass(frozen=True)
class ScaledReLUTheorem(Theorem):
    """Theorem 4.4, (17)-(20), or for flows Theorem 4.2, (14) and (15): alpha0 = sigma_min(Z), radii C1 of W, C2 of A, C3 of a."""

    names: ClassVar[tuple[str, ...]] = ("C1", "C2", "C3")
    scaled: ClassVar[str] = "W"

    @property
    def title(self) -> str:
        return "Scaled ReLU network, " + ("Theorem 4.2 (gradient flow)" if self.flow else "Theorem 4.4 (gradient descent)")

    def limits(self) -> Radii:
        gamma = self.start.constant
        room = 1 / gamma - self.start.norms["A"] if gamma > 0 else -1.0
        return {"C1": math.inf, "C2": room, "C3": math.inf}

    def reference(self) -> Radii:
        room = max(self.limits()["C2"], 1e-3)
        return {"C1": self.start.norms["W"] + 1e-12, "C2": room / 4, "C3": room / (32 * math.sqrt(self.start.N))}

    def balls(self) -> Mapping[str, str]:
        return {"C1": "W", "C2": "A", "C3": "a"}

    @property
    def decay(self) -> float:
        return self.start.sigma * self.start.sigma / (2 if self.flow else 4)

    def posed(self, radii: Radii) -> Condition:
        gamma, norm = self.start.constant, self.start.norms["A"]
        if not gamma > 0:
            return Condition("well-posed", "gamma > 0", gamma, 0.0, remedy=f"Choose gamma > 0; it is {gamma:g}.", strict=True)
        most = 1 / norm if norm > 0 else math.inf
        remedy = f"Lower gamma below 1/||A|| = {most:.4g}, say to 1/(2 ||A||); it is {gamma:g}."
        return Condition(
            "well-posed", "1 > gamma_0 = gamma (||A|| + C2)", 1.0, gamma * (norm + radii["C2"]), remedy=remedy, strict=True
        )

    def _constants(self, radii: Radii) -> _Constants:
        norms, gamma = self.start.norms, self.start.constant
        l1, l2, l3 = norms["W"] + radii["C1"], norms["A"] + radii["C2"], norms["a"] + radii["C3"]
        gap = 1 - gamma * l2 if 0 < gamma * l2 < 1 else math.nan
        ratio = gamma * l1 / gap
        return _Constants(l1, l3, gap, 1 + ratio * ratio)

    def sides(self, radii: Radii) -> tuple[tuple[float, float], ...]:
        l1, l3, gap, bracket = self._constants(radii)
        XF, r0, alpha0, gamma = self.start.XF, self.start.r0, self.start.sigma, self.start.constant
        square, half = alpha0 * alpha0, 2 if self.flow else 1
        l0 = max(l1 / radii["C3"], gamma * l1 * l3 / (gap * radii["C2"]), l3 / radii["C1"])
        scale = bracket * 16 / (gap * gap) * XF * XF
        growing = ((square, 8 / half / gap * l0 * XF * r0), (square * alpha0, scale / half * l3 * r0))
        return growing if self.flow else (*growing, (square, scale * l3 * l3))

    def texts(self) -> tuple[tuple[str, str], ...]:
        names, half = (("(14)", "(15)"), 2) if self.flow else (("(17)", "(18)"), 1)
        bracket = "[1 + gamma^2 l1^2/(1-gamma_0)^2]"
        growing = (
            (names[0], f"alpha0^2 >= {8 // half}/(1-gamma_0) max(l1/C3, gamma l1 l3/((1-gamma_0) C2), l3/C1) |X|_F r0"),
            (names[1], f"alpha0^3 >= {bracket} {16 // half} l3/(1-gamma_0)^2 |X|_F^2 r0"),
        )
        return growing if self.flow else (*growing, ("(19)", f"alpha0^2 >= {bracket} 16 l3^2/(1-gamma_0)^2 |X|_F^2"))

    def readout_remedy(self) -> str:
        gamma, norm = self.start.constant, self.start.norms["a"]
        most = (1 - gamma * self.start.norms["A"]) / (4 * gamma * math.sqrt(self.start.N)) if gamma > 0 else math.nan
        text = (
            f"(19) forces ||a|| + C3 <= (1-gamma_0)/(4 gamma sqrt N) < {most:.3g}, because "
            "alpha0^2 <= l1^2 |X|_F^2/(N (1-gamma_0)^2)."
        )
        if norm >= most:
            return f"{text} With ||a|| = {norm:.3g} no width and no scale of W suffices: begin at a = 0, or lower gamma."
        return f"{text} ||a|| = {norm:.3g} allows it for a small C3, as (17) does once W is scaled up (certified_init)."

    def stated_step(self, radii: Radii) -> float:
        l1, l3, gap, bracket = self._constants(radii)
        XF, square = self.start.XF, self.start.sigma * self.start.sigma
        scale = XF * XF / (gap * gap)
        Q2 = bracket * l3 * l3 * scale
        Q1 = (bracket * l3 * l3 + l1 * l1) * scale  # (20) is 2 Q2/Q1^2
        return min(2 * (Q2 / Q1) / Q1, 4 / square)

    def size_of_Z(self, radii: Radii) -> float:
        l1, _, gap, _ = self._constants(radii)
        return l1 * self.start.XF / gap

    def guarantees(self, radii: Radii) -> tuple[Guarantee, ...]:
        norms, gamma = self.start.norms, self.start.constant
        found = []
        for name, weight in self.balls().items():
            found.append(Guarantee(f"moved {weight}", "<=", radii[name]))
            found.append(Guarantee(f"norm {weight}", "<=", norms[weight] + radii[name]))
        found.append(Guarantee("gamma norm A", "<=", gamma * (norms["A"] + radii["C2"])))
        return (*found, Guarantee("sigma_min Z", ">=", self.start.sigma / 2))
