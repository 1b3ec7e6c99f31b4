"""What the three theorems have in common: radii, conditions, a largest step, conclusions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from opteq.checks import invalid
from opteq.theory.certificates.conditions import Condition, Guarantee
from opteq.theory.certificates.scope import LARGEST, SMALLEST
from opteq.theory.certificates.start import Start

__all__ = ["Radii", "Theorem"]

Radii: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Theorem(ABC):
    """If `conditions(radii)` hold at theta(0) for some radii, so do `guarantees(radii)` at every step, and the loss decays.

    A method may assume that the radii are positive; what is NaN or infinite in `start` makes the conditions fail.
    """

    names: ClassVar[tuple[str, ...]]  # of the radii that are searched
    optional: ClassVar[tuple[str, ...]] = ()  # radii that are infinite unless given
    scaled: ClassVar[str]  # the weight that certified_init scales up
    parallel_remedy: ClassVar[str] = "Remove an input"
    start: Start
    flow: bool
    sharp: bool = False

    @property
    @abstractmethod
    def title(self) -> str:
        """Which theorem, of which paper."""

    @abstractmethod
    def limits(self) -> Radii:
        """The open upper end of each radius: 0 or less when there is none to choose."""

    @abstractmethod
    def reference(self) -> Radii:
        """Radii of a sensible size, from which the search begins."""

    @abstractmethod
    def posed(self, radii: Radii) -> Condition:
        """That the equilibrium exists and is unique while the parameters are within the radii."""

    @abstractmethod
    def sides(self, radii: Radii) -> tuple[tuple[float, float], ...]:
        """(left, right) of the theorem's own conditions: two that a = 0 and a larger scale repair, then one that bounds a."""

    @abstractmethod
    def texts(self) -> tuple[tuple[str, str], ...]:
        """(name, formula) of the same."""

    @abstractmethod
    def readout_remedy(self) -> str:
        """How small a must be for the last condition, whatever the width."""

    @abstractmethod
    def stated_step(self, radii: Radii) -> float:
        """The largest step of descent that the theorem states, when its conditions hold."""

    @abstractmethod
    def size_of_Z(self, radii: Radii) -> float:
        """A bound of ||Z||_F while the parameters are within the radii."""

    @property
    @abstractmethod
    def decay(self) -> float:
        """L(k) <= (1 - step decay)^k L(0), or L(t) <= exp(-decay t) L(0)."""

    @abstractmethod
    def guarantees(self, radii: Radii) -> tuple[Guarantee, ...]:
        """What holds at every step."""

    def max_step(self, radii: Radii) -> float:
        """The stated step, or with `sharp` the larger 1 / ||Z||^2.

        The same conditions allow it when the last step of the proof is done with

            e(k+1) = (I - step Z Z') e(k) + (Z(k+1) - Z(k)) a(k+1),    e = y^ - y.

        The first term is at most (1 - step s^2) |e(k)|, where s^2 <= sigma_min(Z(k))^2 is the decay (lam0 / 2 for GaussianDEQ,
        lam0^2 / 4 for others), the second step Q2 |e(k)| with Q2 <= s^2 / 4. So
        |e(k+1)|^2 <= (1 - 3/4 step s^2)^2 |e(k)|^2 <= (1 - step s^2) |e(k)|^2, because step s^2 <= 8/9. The printed proofs square
        the sum of the norms of all changes instead.
        """
        size = self.size_of_Z(radii)
        return 1 / (size * size) if self.sharp else self.stated_step(radii)

    def floors(self) -> Radii:
        """The least radii worth choosing: far above the rounding of the weights, so that it moves none of them out of its ball."""
        return {radius: max(1e-6 * self.start.norms[weight], SMALLEST) for radius, weight in self.balls().items()}

    @abstractmethod
    def balls(self) -> Mapping[str, str]:
        """Which weight each radius is about."""

    def complete(self, radii: Radii) -> Radii:
        """The radii with those that are not searched."""
        return radii

    def conditions(self, radii: Radii) -> tuple[Condition, ...]:
        """All conditions, the simple ones first."""
        posed, texts, sides = self.posed(radii), self.texts(), self.sides(radii)
        scale = self._scale_remedy(
            [(name, rhs / lhs) for (name, _), (lhs, rhs) in zip(texts, sides[:2], strict=False) if 0 < lhs < rhs]
        )
        remedies = (scale, scale, self.readout_remedy() if posed.holds else "")
        own = [
            Condition(name, formula, lhs, rhs, "bound", remedy)
            for (name, formula), (lhs, rhs), remedy in zip(texts, sides, remedies, strict=False)
        ]
        return (posed, *self._rank(), *own)

    def check_radii(self, radii: Radii) -> Radii:
        """The radii that a caller gave: one positive number for each name."""
        if not isinstance(radii, Mapping) or set(radii) - set(self.optional) != set(self.names):
            raise ValueError(invalid("certify", "radii", f"None or a mapping with the keys {', '.join(self.names)}", radii))
        for name, value in radii.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not SMALLEST <= value <= (math.inf if name in self.optional else LARGEST):
                expected = f"a mapping to positive finite numbers in [{SMALLEST:g}, {LARGEST:g}], also for {name}"
                raise ValueError(invalid("certify", "radii", expected, value))
        return {name: float(value) for name, value in radii.items()}

    def _rank(self) -> tuple[Condition, ...]:
        """sigma_min(Z) > 0, and what it needs."""
        s = self.start
        wide = Condition(
            "width",
            "width >= N",
            float(s.width),
            float(s.N),
            remedy=f"Take a width of at least N = {s.N}: Z [N, width] has rank N.",
        )
        i, j = s.pair
        which = f"x_{i} = 0 gives a row of zeros" if i == j else f"x_{i} and x_{j} give parallel rows"
        apart = Condition(
            "inputs",
            f"|x_i/|x_i| - x_j/|x_j|| > rounding, least at i = {i}, j = {j}",
            s.apart,
            s.rounding,
            remedy=f"{self.parallel_remedy}: {which} of Z, so that sigma_min(Z) = 0 at any width.",
            strict=True,
        )
        rank = Condition("rank", "sigma_min(Z) > 0, less its rounding", s.sigma, 0.0, "bound", self._rank_remedy())
        return (wide, apart, rank) if s.apart < math.inf else (wide, rank)

    def _rank_remedy(self) -> str:
        if math.isnan(self.start.sigma):
            return ""
        return "Z has no full row rank in float64: raise the width, or remove inputs that are (almost) parallel or equal."

    def _scale_remedy(self, missing: Sequence[tuple[str, float]]) -> str:
        """What to do about the conditions that grow with the scale of the features, given by what factors they fail."""
        if not missing or not all(factor < math.inf for _, factor in missing):
            return ""
        names, factor = ", ".join(name for name, _ in missing), max(factor for _, factor in missing)
        zero = "begin at a = 0 and " if self.start.norms["a"] > 0 else ""
        if self.start.bounded:
            return (
                f"{names}: {zero}make the labels smaller, or take an activation that is not bounded, such as relu: a larger "
                f"{self.scaled} does not help, because Z stays bounded."
            )
        return (
            f"{names}: {zero}scale {self.scaled} up, by {factor:.3g} or more: with a = 0 the left side grows faster than the right "
            "one. certified_init does this."
        )
