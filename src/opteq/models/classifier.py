"""An extractor, an equilibrium and a head as one network."""

from copy import deepcopy

from torch import Tensor, nn
from torch.nn.functional import interpolate

from opteq.checks import check_floating, check_instance, invalid
from opteq.equilibrium import Cell, Equilibrium
from opteq.solution import Solution


class Network(nn.Module):
    """x -> head(z) with z = f(z, g(x)), g the extractor: what classifiers and segmenters have in common.

    `equilibrium`: an Equilibrium, or a Cell, which is wrapped in one. A baseline has another module from g(x) to z there, such as
    FeedForward, NeuralODE or nn.Identity; it can be trained and measured in the same way, but has nothing to solve.
    `standardize` comes first: give it a `Standardize` and the model's state holds the normalisation of its data.
    """

    def __init__(self, extractor: nn.Module, equilibrium: nn.Module, head: nn.Module) -> None:
        super().__init__()
        for name, part in (("extractor", extractor), ("equilibrium", equilibrium), ("head", head)):
            check_instance(self, name, part, nn.Module, "an nn.Module")
        self.standardize: nn.Module = nn.Identity()
        self.extractor = extractor
        self.equilibrium = Equilibrium(equilibrium) if isinstance(equilibrium, Cell) else equilibrium
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """g(x): what is injected into f."""
        check_floating(self, "x", x)
        out: Tensor = self.extractor(self.standardize(x))
        return out

    def solve(self, x: Tensor, z0: Tensor | None = None) -> Solution:
        """The equilibrium with its status; z carries derivatives."""
        if not isinstance(self.equilibrium, Equilibrium):
            kind = type(self.equilibrium).__name__
            raise TypeError(f"{type(self).__name__} with a {kind} between extractor and head has no equilibrium to solve for.")
        return self.equilibrium.solve(self.features(x), z0)

    def states(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """z, the solver begun at z0."""
        if z0 is not None and not isinstance(self.equilibrium, Equilibrium):
            raise TypeError(invalid(self, "z0", "None: this network has no equilibrium to start from it", list(z0.shape)))
        given = (self.features(x),) if z0 is None else (self.features(x), z0)
        out: Tensor = self.equilibrium(*given)
        return out


class Classifier(Network):
    """logits = head(z), z = f(z, g(x)). Optimization induced equilibrium networks, Eq. (5).

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import ConvOptEq
        >>> from opteq.models import Classifier, Pooled, Stem
        >>> model = Classifier(Stem(1, 8), Equilibrium(ConvOptEq(8, 8, 12)), Pooled(8, 10))
        >>> model(torch.randn(2, 1, 8, 8)).shape, model.solve(torch.randn(2, 1, 8, 8)).status.name
        (torch.Size([2, 10]), 'CONVERGED')
    """

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """The logits [batch, classes]."""
        out: Tensor = self.head(self.states(x, z0))
        return out


class Segmenter(Network):
    """logits at each pixel of x: those of head(z), z = f(z, g(x)), between them linear in both directions.

    The interpolation takes a pixel of z for the middle of the region that it stands for. With k strided convolutions (`Strided`) it
    is that region's first pixel, 2^k i, so that the logits are shifted by (2^k - 1)/2 pixels, 3.5 for k = 3, along both sides; the
    kernels can learn to make up for it.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import ConvOptEq
        >>> from opteq.models import Scores, Segmenter, Strided
        >>> model = Segmenter(Strided(3, (8, 16)), Equilibrium(ConvOptEq(16, 16, 12)), Scores(16, 5))
        >>> model(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 5, 16, 16])
    """

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """The logits [batch, classes, height, width], at the resolution of x."""
        logits = self.head(self.states(x, z0))
        return interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


def without_equilibrium(model: Classifier) -> Classifier:
    """A copy with the head directly on the extractor, z = g(x): what the equilibrium adds is the difference.

    Extractor and equilibrium must have the same number of channels. "Extr. + Cls." in Table 7 of the OptEq paper.

    Examples:
        >>> import torch
        >>> from opteq.models import deep_opteq, without_equilibrium
        >>> plain = without_equilibrium(deep_opteq(1, 10, channels=8, hidden=(8,), stride=1))
        >>> plain(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    check_instance("without_equilibrium", "model", model, Classifier, "a Classifier")
    copy = Classifier(deepcopy(model.extractor), nn.Identity(), deepcopy(model.head))
    copy.standardize = deepcopy(model.standardize)
    return copy


def count_parameters(model: nn.Module) -> dict[str, int]:
    """How many numbers are learned, part by part: extractor, equilibrium and head, or the model's own children; and the total.

    A parameter that several parts share is counted in each, but once in the total.

    Examples:
        >>> from opteq.models import count_parameters, deep_opteq
        >>> count_parameters(deep_opteq(3, 10))["total"]
        161670
    """
    check_instance("count_parameters", "model", model, nn.Module, "an nn.Module")
    parts: dict[str, nn.Module] = dict(model.named_children())
    if isinstance(model, Network):
        del parts["standardize"]
    counts = {name: parameter.numel() for name, parameter in model.named_parameters(recurse=False)}
    counts |= {name: _size(part) for name, part in parts.items()}
    return {**counts, "total": _size(model)}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
