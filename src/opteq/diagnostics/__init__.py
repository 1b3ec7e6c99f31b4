"""Looking at networks: the loss around their weights, what solvers do, where iterates go, spectra, and curves of a training.

Each gives a `Finding`: its data (`columns`, `csv`), and itself as a figure (`figure`, `draw`); `save` puts both into a run folder,
where a report shows them.
"""

from opteq.diagnostics.basin import Basin, Flatness
from opteq.diagnostics.finding import Finding
from opteq.diagnostics.hessian import HessianSpectrum, hessian_spectrum
from opteq.diagnostics.landscape import Landscape, landscape
from opteq.diagnostics.losses import data_loss
from opteq.diagnostics.panels import Panel
from opteq.diagnostics.residuals import ResidualCurve, SolverCurve, residual_curve
from opteq.diagnostics.spectrum import JacobianSpectrum, jacobian_spectrum, spectral_radius, spectrum_of
from opteq.diagnostics.training_curves import TrainingCurves, training_curves
from opteq.diagnostics.trajectory import Length, Trajectory, TrajectoryRecorder, trajectory

__all__ = [
    "Basin",
    "Finding",
    "Flatness",
    "HessianSpectrum",
    "JacobianSpectrum",
    "Landscape",
    "Length",
    "Panel",
    "ResidualCurve",
    "SolverCurve",
    "TrainingCurves",
    "Trajectory",
    "TrajectoryRecorder",
    "data_loss",
    "hessian_spectrum",
    "jacobian_spectrum",
    "landscape",
    "residual_curve",
    "spectral_radius",
    "spectrum_of",
    "training_curves",
    "trajectory",
]
