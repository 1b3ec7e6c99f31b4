"""Methods for z = f(z), each a frozen dataclass of its hyper-parameters."""

from opteq.solvers.accelerated import Accelerated
from opteq.solvers.anderson import Anderson
from opteq.solvers.broyden import Broyden
from opteq.solvers.mixed import MixedPrecision
from opteq.solvers.newton import Newton
from opteq.solvers.picard import Picard
from opteq.solvers.sam import SAM
from opteq.solvers.splitting import ForwardBackward, PeacemanRachford

__all__ = ["SAM", "Accelerated", "Anderson", "Broyden", "ForwardBackward", "MixedPrecision", "Newton", "PeacemanRachford", "Picard"]
