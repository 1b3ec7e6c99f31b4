"""Looking at trained networks: the loss around their parameters, and where the equilibrium solver fails."""

from opteq.diagnostics.finding import Finding
from opteq.diagnostics.landscape import Landscape, landscape

__all__ = ["Finding", "Landscape", "landscape"]
