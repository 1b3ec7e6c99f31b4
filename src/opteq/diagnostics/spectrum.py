"""The eigenvalues of the Jacobian f'(z), complex ones included: whether, and how fast, z <- f(z) converges."""

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from opteq.batch import at_least_single, flat, per_sample_like, sound_samples
from opteq.checks import check_instance
from opteq.diagnostics.arnoldi import NONFINITE, UNSURE, Arnoldi, Array, Eigenvalues, Matrix, NotFiniteError
from opteq.diagnostics.finding import Columns, Finding
from opteq.diagnostics.keeping import undisturbed
from opteq.diagnostics.probing import probe
from opteq.equilibrium import ConvergenceWarning
from opteq.maps import Jacobian, Map, as_map, check_states, first_value
from opteq.solution import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["JacobianSpectrum", "jacobian_spectrum", "spectral_radius", "spectrum_of"]

Function: TypeAlias = Map | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class JacobianSpectrum(Finding):
    """eigenvalues[i, j]: the j-th in modulus of the Jacobian of sample i, NaN if it was not found; complex128, on the CPU.

    `error`: an estimate of how far each may be off, kappa |J v - lambda v| with its condition number kappa; infinite where a
    larger eigenvalue may have been missed. `converged`: whether the error is at most rtol times the radius.
    `layer`: the name of the equilibrium in its model, if it was found there.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import jacobian_spectrum
        >>> found = jacobian_spectrum(lambda z: z @ torch.diag(torch.tensor([0.5, -0.25, 0.1])), torch.randn(2, 3), k=2)
        >>> found.eigenvalues.shape, found.converged.all().item(), found.radius.round(decimals=4).tolist()
        (torch.Size([2, 2]), True, [0.5, 0.5])
    """

    name: ClassVar[str] = "jacobian"
    eigenvalues: Tensor
    error: Tensor
    converged: Tensor
    layer: str = ""

    @property
    def radius(self) -> Tensor:
        """The spectral radius of each sample; NaN where its error is larger than itself."""
        largest = self.eigenvalues[:, 0].abs()
        return torch.where(self.error[:, 0] <= largest, largest, math.nan)

    def columns(self) -> Columns:
        """One row for each eigenvalue: its sample, its place, itself, its error, and whether it converged."""
        samples, count = self.eigenvalues.shape
        values = self.eigenvalues.numpy().ravel()
        place = {"sample": np.repeat(np.arange(samples), count), "index": np.tile(np.arange(count), samples)}
        found = {"error": self.error, "converged": self.converged}
        return {**place, "real": values.real, "imag": values.imag, **{name: part.numpy().ravel() for name, part in found.items()}}

    def figure(self) -> "Figure":
        """The eigenvalues of all samples in the complex plane, with the unit circle."""
        from opteq.diagnostics.drawing import COLOURS, FAILED, new_figure

        values, good = self.eigenvalues.numpy().ravel(), self.converged.numpy().ravel()
        turn = np.linspace(0, 2 * np.pi, 361)
        with new_figure((3.4, 3.4)) as figure:
            axes = figure.subplots()
            axes.plot(np.cos(turn), np.sin(turn), color="0.5", linewidth=0.8, label="unit circle")
            for chosen, marker, colour, label in (
                (good, "o", COLOURS[0] + "99", "eigenvalues"),
                (~good, "x", FAILED, "not converged"),
            ):
                shown = values[chosen & np.isfinite(values)]
                if shown.size:
                    axes.plot(shown.real, shown.imag, marker, color=colour, markersize=3, label=label)
            axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")
            axes.locator_params(nbins=5)
            figure.legend(loc="outside upper center", ncols=3, frameon=False, handletextpad=0.4, columnspacing=1.2)
        return figure


def spectral_radius(fn: Function, z: Tensor, *, rtol: float = 1e-4, restarts: int = 30, seed: int = 0) -> Tensor:
    """max |lambda| over the eigenvalues of f'(z), for each sample: [batch], in the dtype of z.

    Below 1, the iteration z <- f(z) converges to its equilibrium from nearby, and the error shrinks by this factor a step.
    It is the `radius` of `jacobian_spectrum`, which says how it is found. A ConvergenceWarning tells where it is not known to
    `rtol`: it is NaN where Arnoldi's method did not converge or may have missed a larger eigenvalue. Where an eigenvalue is too
    ill-conditioned it is a guess, the radius of a matrix that differs from f'(z) by rounding, and the warning tells its error.

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import spectral_radius
        >>> spectral_radius(lambda z: 0.5 * torch.sin(z), torch.zeros(2, 3)).round(decimals=4)
        tensor([0.5000, 0.5000])
    """
    found = _spectrum("spectral_radius", fn, z, Arnoldi(1, rtol, restarts, seed))
    return found.radius.to(z.device, at_least_single(z).dtype)


def jacobian_spectrum(
    fn: Function, z: Tensor, k: int = 6, *, rtol: float = 1e-4, restarts: int = 30, seed: int = 0
) -> JacobianSpectrum:
    """The k eigenvalues of largest modulus of f'(z), the Jacobian of each sample, by Arnoldi's method (ARPACK).

    `fn`: a Map, or any callable z -> f(z), which costs more, as its samples cannot be separated. If f couples the samples, J is
    the Jacobian of the whole batch, and every sample is given its eigenvalues. Small states (up to 64 numbers, and up to 1024
    where Arnoldi's method fails) are left to LAPACK.
    ARPACK may miss the largest eigenvalue without a sign. So J and its transpose are both iterated, from different random
    vectors (`seed`), and must agree; their eigenvectors also give the condition number of an eigenvalue, and thus its error.
    Products with J are in the dtype of z: in float32 expect an error of 1e-6 times the condition number.
    `restarts`: of Arnoldi's method, about 60 products each. Lehoucq, Sorensen and Yang, ARPACK users' guide (1998).

    Examples:
        >>> import torch
        >>> from opteq.diagnostics import jacobian_spectrum
        >>> turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]])
        >>> found = jacobian_spectrum(lambda z: z @ turn.T, torch.zeros(1, 2), k=2)
        >>> sorted(round(value.imag, 4) for value in found.eigenvalues[0].tolist())
        [-0.5, 0.5]
    """
    return _spectrum("jacobian_spectrum", fn, z, Arnoldi(k, rtol, restarts, seed))


def spectrum_of(
    model: nn.Module, x: Tensor, k: int = 6, *, layer: str | None = None, rtol: float = 1e-4, restarts: int = 30, seed: int = 0
) -> JacobianSpectrum:
    """`jacobian_spectrum` at the equilibria of a model, or of a layer, at x.

    `layer`: the name of the Equilibrium, where the model has several; its first call is the one that counts.
    The model runs in evaluation mode and is left as it was. Samples whose equilibrium was not found are not `converged`.

    Examples:
        >>> import torch
        >>> from opteq import Equilibrium
        >>> from opteq.cells import OptEq
        >>> from opteq.diagnostics import spectrum_of
        >>> model = torch.nn.Sequential(Equilibrium(OptEq(4, 8, 16, constrained=True)), torch.nn.Linear(8, 2))
        >>> found = spectrum_of(model, torch.randn(5, 4), k=3)
        >>> found.eigenvalues.shape, bool((found.radius < 1).all()), found.layer
        (torch.Size([5, 3]), True, '0')
    """
    find = Arnoldi(k, rtol, restarts, seed)
    find.check("spectrum_of")
    check_instance("spectrum_of", "model", model, nn.Module, "an nn.Module")
    with undisturbed(model):
        found = probe("spectrum_of", model, x, layer)
        solution = found.layer.solve(found.x, found.z0)
        z = solution.z.masked_fill(per_sample_like(~finite(solution.codes), solution.z), math.nan)
        spectrum = _spectrum("spectrum_of", found.layer.cell.bind(found.x).to(z.dtype), z, find)
    if not solution.converged.all():
        warnings.warn(f"spectrum_of, at an equilibrium: {solution.explain()}", ConvergenceWarning, stacklevel=2)
    owners = (name for name, part in model.named_modules() if getattr(part, "cell", None) is found.layer.cell)
    return replace(spectrum, converged=spectrum.converged & solution.converged.cpu()[:, None], layer=next(owners))


def _spectrum(owner: str, fn: Function, z: Tensor, find: Arnoldi) -> JacobianSpectrum:
    find.check(owner)
    check_states(owner, "z", z)
    map_ = as_map(owner, fn)
    find = replace(find, k=min(find.k, math.prod(z.shape[1:])))
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), torch.autocast(z.device.type, enabled=False):
        found = _samples(map_.detach(), z.detach(), find)
    _warn(owner, found)
    shape = (len(found), find.k)
    return JacobianSpectrum(
        torch.from_numpy(np.array([f.values for f in found], complex).reshape(shape)),
        torch.from_numpy(np.array([f.error for f in found], float).reshape(shape)),
        torch.from_numpy(np.array([f.good for f in found], bool).reshape(shape)),
    )


def _warn(owner: str, found: list[Eigenvalues]) -> None:
    troubles = Counter(f.trouble for f in found if f.trouble)
    if troubles:
        head = f"{owner}: the eigenvalues of {troubles.total()} of {len(found)} samples are not all known to rtol."
        told = "".join(f"\n{count} {trouble}" for trouble, count in troubles.items())
        errors = [error for f in found if f.trouble == UNSURE for error in f.error if error < math.inf]
        size = f" Errors are up to about {max(errors):.1e}." if errors else ""
        warnings.warn(head + told + size, ConvergenceWarning, stacklevel=4)


def _samples(fn: Map, z: Tensor, find: Arnoldi) -> list[Eigenvalues]:
    """The eigenvalues of each sample."""
    sound, nothing = sound_samples(z), find.nothing(NONFINITE)
    if not sound.any():
        return [nothing] * len(sound)
    z = torch.where(per_sample_like(sound, z), z, torch.zeros_like(z))
    first_value(fn, z)
    if fn.independent and not find.is_small(math.prod(z.shape[1:])):
        return [find.solve(_alone(fn, z, row)) if ok else nothing for row, ok in enumerate(sound.tolist())]
    jacobian = fn.linearize(z)
    if fn.coupled or (not fn.independent and _couples(jacobian, z)):
        return [find.solve(_whole(jacobian, z)) if sound.all() else nothing] * len(sound)
    if find.is_small(math.prod(z.shape[1:])):
        eps = torch.finfo(z.dtype).eps
        found = (find.direct(matrix, jacobian.symmetric, eps) for matrix in _dense(jacobian, z))
        return [one if ok else nothing for one, ok in zip(found, sound.tolist(), strict=True)]
    return [find.solve(_matrix(jacobian, z, row)) if ok else nothing for row, ok in enumerate(sound.tolist())]


def _alone(fn: Map, z: Tensor, row: int) -> Matrix:
    """The Jacobian of a sample that can be separated from the others."""
    rows = torch.tensor([row], device=z.device)
    return _matrix(fn.select(rows).linearize(z[rows]), z[rows], 0)


def _whole(jacobian: Jacobian, z: Tensor) -> Matrix:
    """The Jacobian of the batch as one sample."""
    one = Jacobian(lambda v: jacobian.jvp(v[0])[None], lambda v: jacobian.vjp(v[0])[None], jacobian.symmetric)
    return _matrix(one, z[None], 0)


def _matrix(jacobian: Jacobian, z: Tensor, row: int) -> Matrix:
    """The block of a sample, by products with vectors that are zero in the others."""

    def product(linear: Callable[[Tensor], Tensor]) -> Callable[[Array], Array]:
        def apply(v: Array) -> Array:
            full = torch.zeros_like(z)
            full[row] = torch.tensor(v, dtype=z.dtype).view(z.shape[1:])
            image: Array = linear(full)[row].flatten().cpu().double().numpy()
            if not np.isfinite(image).all():
                raise NotFiniteError
            return image

        return apply

    size, eps = math.prod(z.shape[1:]), torch.finfo(z.dtype).eps
    return Matrix(size, product(jacobian.jvp), product(jacobian.vjp), jacobian.symmetric, eps)


def _dense(jacobian: Jacobian, z: Tensor) -> Array:
    """The Jacobians of all samples: [batch, n, n]."""
    basis = torch.eye(math.prod(z.shape[1:]), dtype=z.dtype, device=z.device)
    columns = [flat(jacobian.jvp(e.view(z.shape[1:]).expand_as(z))) for e in basis]
    matrices: Array = torch.stack(columns, dim=2).cpu().double().numpy()
    return matrices


def _couples(jacobian: Jacobian, z: Tensor) -> bool:
    """Whether some sample of f(z) depends on another one: some bit of their numbers differs, and f' crosses it."""
    rows = torch.arange(z.shape[0], device=z.device)
    probe = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype).to(z.device)
    for bit in range((z.shape[0] - 1).bit_length()):
        for side in (0, 1):
            outside = per_sample_like((rows >> bit) & 1 != side, z)
            image = jacobian.jvp(probe.masked_fill(outside, 0))
            if (outside & image.isfinite() & (image != 0)).any():
                return True
    return False
