"""The solved z as one node of the autograd graph: exact derivatives of every order, in every mode.

With z = f(z; theta), the derivative of z is itself an equilibrium:

    backward   v = J' v + g,              then  grad_theta = (df/dtheta)' v
    forward    t = J t + (df/dtheta) dtheta

so each is solved by the same node, which makes it differentiable in turn. Every tensor of the map is an explicit input of the
node: torch.func can then unwrap them before the loop runs, and vmap can fold its dimension into the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from opteq.batch import laid_out, norm, nothing, per_sample_like
from opteq.captures import HAND_OVER, NOT_MAPPED, SECOND_ORDER, is_closed, is_mapped, primal
from opteq.checks import is_transformed
from opteq.linear import LinearizedMap
from opteq.logs import Log, empty_trace, heard_by
from opteq.maps import Jacobian, Map, check_tensor, pullback
from opteq.solution import Solution, Status, Stop, Trace, finite, relative
from opteq.solve import solve_map
from opteq.solver import Solver, evaluates

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # z, codes, residual, steps


class Report(Protocol):
    """What to do with a Solution as soon as it is known: warn, raise or ignore."""

    def __call__(self, solution: Solution, phase: str) -> None: ...


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which has no types."""
    return function.apply(*args)


@dataclass(frozen=True)
class Problem:
    """All of an equilibrium but its tensors: how to solve it, how to solve its derivatives, whom to tell."""

    solver: Solver
    stop: Stop
    linear: Callable[[Map, torch.dtype], Solver]
    linear_stop: Callable[[torch.dtype], Stop]
    report: Report
    phase: str = "forward"
    order: int = 0  # of the derivative that is being solved for, where f captures tensors
    logs: tuple[Log, ...] = ()
    amend: Callable[[Solution], Solution] | None = None  # what logs and report are told instead
    aim: float = 1.0  # the part of the tolerance that is aimed at
    taped: bool = False  # whether the graph of the last evaluation of f is kept for the backward pass

    def derived(self, fn: Map, dtype: torch.dtype, phase: str) -> "Problem":
        """The problem of the adjoint or the tangent of fn."""
        return replace(
            self, solver=self.linear(fn, dtype), stop=self.linear_stop(dtype), phase=phase, amend=None, aim=1.0, taped=False
        )


@dataclass
class Record:
    """What a solve found that is no tensor."""

    evals: int = 0
    trace: Trace | None = None
    nonfinite: bool = False
    tape: "Tape | None" = None


class Tape:
    """f at the iterate that turns out to be the solution, with its graph: the backward pass need not evaluate it again.

    `point` is z and `operands` are the tensors of f, as leaves of that graph; `value` is where f(z) left it, without its numbers.
    """

    def __init__(self, template: Map, operands: Sequence[Tensor]) -> None:
        self.operands = [t.detach().requires_grad_(t.requires_grad) for t in operands]
        self.fn = template.filled(self.operands)
        self.point: Tensor | None = None
        self.value: GradientEdge | None = None

    def __call__(self, z: Tensor) -> Tensor:
        self.point = self.value = None  # the last graph is freed before the next is made
        with torch.enable_grad():
            self.point = z.detach().requires_grad_()
            value = self.fn(self.point)
            check_tensor(value)
            self.value = _place(value)
        return value.detach()

    def is_at(self, z: Tensor) -> bool:
        """Whether it was evaluated last at z, and may be differentiated there."""
        return self.value is not None and torch.equal(cast(Tensor, self.point), z)


def _place(value: Tensor) -> GradientEdge:
    """Where a view of a tensor is in the graph: before PyTorch 2.9 the node of a Function in Python dies with the tensor itself.

    A value that depends on nothing is a leaf of a graph of its own.
    """
    return get_gradient_edge(value.view_as(value) if value.requires_grad else value.detach().requires_grad_())


def equilibrium(fn: Map, z0: Tensor, problem: Problem, *, closed: bool | None = None) -> tuple[Solution, Record]:
    """The solution of z = f(z), its z attached to the graph of the tensors that f uses; and the record of the solve.

    `closed`: whether those tensors are all fields of fn; None finds out.
    """
    problem, found = _heard(problem), Record()
    if closed or (closed is None and is_closed(fn, z0)):
        operands = [leaf.tensor for leaf in fn.leaves()]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in operands) and _ordinary(z0, *operands)
        if problem.taped and evaluates(problem.solver) and wanted and not _hooked():
            found.tape = Tape(fn, operands)
        outputs: Outputs = call(_Equilibrium, problem, fn.emptied(), found, z0.detach(), *operands)
    else:
        outputs = _attach(fn, z0, problem, found)
    z, codes, residual, steps = outputs
    return Solution(z, codes, residual, steps, found.evals, problem.stop, found.trace), found


def _hooked() -> bool:
    """Whether somebody else decides what becomes of saved tensors: torch.utils.checkpoint runs forward anew for every look."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _heard(problem: Problem) -> Problem:
    """The problem, with the logs that are open here."""
    return replace(problem, logs=heard_by(problem.logs))


def _run(fn: Map, z0: Tensor, problem: Problem, found: Record) -> Outputs:
    """Solve on plain tensors, tell the log and the policy."""
    trace = empty_trace(problem.logs)
    solution = solve_map(fn, z0, problem.solver, problem.stop, trace, aim=problem.aim, last=found.tape)
    if found.tape is not None and not found.tape.is_at(solution.z):
        found.tape = None
    _tell(solution, problem, found)
    return solution.z, solution.codes, solution.residual, solution.steps


def _tell(solution: Solution, problem: Problem, found: Record) -> None:
    """The record, the logs and the policy."""
    found.evals += solution.evals
    found.trace = solution.trace
    found.nonfinite |= bool((~finite(solution.codes)).any())
    told = replace(solution, z=solution.z.detach())  # another tensor: autograd will make solution.z part of its graph
    told = told if problem.amend is None else problem.amend(told)
    for log in problem.logs:
        if log.open:
            log.append(told)
    problem.report(told, problem.phase)


class _Equilibrium(torch.autograd.Function):
    """z = f(z; operands) for maps whose tensors are all operands."""

    @staticmethod
    def forward(problem: Problem, template: Map, found: Record, z0: Tensor, *operands: Tensor) -> Outputs:
        return _run(template.filled(operands), z0, problem, found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.problem, ctx.template, found, _, *operands = inputs
        ctx.nonfinite, ctx.tape = found.nonfinite, found.tape
        z, codes, residual, steps = output
        ctx.mark_non_differentiable(codes, residual, steps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, z, codes)
        ctx.save_for_forward(*operands, z, codes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, z, codes = ctx.saved_tensors
        g, needed = grads[0], ctx.needs_input_grad[4:]
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        _refuse_stacked(g)
        if ctx.nonfinite:
            operands, z, g = quarantined(ctx.template, operands, z, g, codes)
            ctx.tape = None
        wanted = [i for i, need in enumerate(needed) if need]
        with torch.autocast(z.device.type, enabled=False):
            if torch.is_grad_enabled() or not _ordinary(g, z, *operands):
                found = iter(_differentiable_adjoint(ctx.template, operands, wanted, z, g, ctx.problem))
            else:
                found = iter(_adjoint(ctx.template, operands, wanted, z, g, ctx.problem, ctx.tape))
                ctx.tape = ctx.tape if torch._C._autograd._get_current_graph_task_keep_graph() else None
        return (None, None, None, None, *(next(found) if need else None for need in needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        for t in tangents:
            _refuse_stacked(t)
        *operands, z, codes = (primal(t) for t in ctx.saved_tensors)
        given = [primal(t) if t is not None else None for t in tangents[4:]]
        wanted = [i for i, t in enumerate(given) if t is not None]
        # PyTorch turns forward mode off in here, which would make forward-over-forward silently wrong.
        with forward_ad._set_fwd_grad_enabled(True), torch.autocast(z.device.type, enabled=False):
            if ctx.nonfinite:
                operands, z, _ = quarantined(ctx.template, operands, z, z, codes)
            partial, chosen = _partial(ctx.template, operands, wanted, z), [operands[i] for i in wanted]
            push = pullback(lambda v: pullback(partial, *chosen)(v), torch.zeros_like(z))
            (source,) = push(tuple(given[i] for i in wanted))
            tangent = _linearized(ctx.template.filled(operands), z, source, ctx.problem, transposed=False, closed=True)
        return tangent, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], problem: Problem, template: Map, found: Record, *tensors: Tensor
    ) -> tuple[Outputs, tuple[int, int, int, int]]:
        def apply(*args: Tensor) -> Outputs:
            outputs: Outputs = call(_Equilibrium, problem, template, found, *args)
            return outputs

        size, dims = info.batch_size, in_dims[3:]
        batched = [True, *(leaf.per_sample for leaf in template.leaves())]
        shared_weights = all(per or dim is None for per, dim in zip(batched, dims, strict=True))
        if template.independent and shared_weights:
            folded = [_folded(t, d, size) if per else t for t, d, per in zip(tensors, dims, batched, strict=True)]
            rows = tensors[0].shape[1 if dims[0] == 0 else 0]
            outputs = tuple(out.reshape(size, rows, *out.shape[1:]) for out in apply(*folded))
        else:  # weights are mapped too (an ensemble): one copy after the other
            runs = [apply(*(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True))) for i in range(size)]
            outputs = tuple(torch.stack(outs) for outs in zip(*runs, strict=True))
        return cast(Outputs, outputs), (0, 0, 0, 0)


def _folded(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension made part of the batch."""
    stacked = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked.flatten(0, 1)


def _partial(template: Map, operands: Sequence[Tensor], wanted: Sequence[int], z: Tensor) -> Callable[..., Tensor]:
    """f at z as a function of some operands."""

    def partial(*chosen: Tensor) -> Tensor:
        full = list(operands)
        for i, tensor in zip(wanted, chosen, strict=True):
            full[i] = tensor
        return template.filled(full)(z)

    return partial


def _ordinary(*tensors: Tensor) -> bool:
    """Whether neither forward mode nor a torch.func transform is at work on the tensors."""
    return forward_ad._current_level < 0 and not any(is_transformed(t) for t in tensors)


def _refuse_stacked(g: Tensor | None) -> None:
    """Raise for a stack of derivatives that torch.autograd maps over by a vmap of its own, into which no loop can look."""
    if g is not None and torch._C._functorch.is_legacy_batchedtensor(g):
        raise RuntimeError(
            "An equilibrium cannot follow torch.autograd with is_grads_batched=True or vectorize=True. "
            "Take torch.func.jacrev, jacfwd or hessian, or torch.func.vmap over torch.func.vjp, which do the same."
        )


def _differentiable_adjoint(
    template: Map, operands: Sequence[Tensor], wanted: Sequence[int], z: Tensor, g: Tensor, problem: Problem
) -> Sequence[Tensor | None]:
    """(df/dtheta)' v for the wanted operands theta, with v = J' v + g."""
    v = _linearized(template.filled(operands), z, g, problem, transposed=True, closed=True)
    return pullback(_partial(template, operands, wanted, z), *(operands[i] for i in wanted))(v)


def _adjoint(
    template: Map,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    z: Tensor,
    g: Tensor,
    problem: Problem,
    tape: Tape | None = None,
) -> Sequence[Tensor | None]:
    """The same in one evaluation of f, or none: its graph serves J' v, for the solvers that ask for it, and the operands."""
    graph: list[GradientEdge] = []
    if tape is not None and tape.value is not None and tape.point is not None:
        z, chosen = tape.point, [tape.operands[i] for i in wanted]
        graph.append(tape.value)
    else:
        z, chosen = z.detach().requires_grad_(), [operands[i].detach().requires_grad_() for i in wanted]
    partial = _partial(template, operands, wanted, z)

    def value() -> GradientEdge:
        if not graph:
            with torch.enable_grad():
                graph.append(_place(partial(*chosen)))
        return graph[0]

    def vjp(v: Tensor) -> Tensor:
        return torch.autograd.grad(value(), z, v, retain_graph=True, materialize_grads=True)[0]

    fn = template.filled(operands)
    known = Jacobian(jvp=lambda v: fn.linearize(z.detach()).jvp(v), vjp=vjp, symmetric=fn.symmetric)
    g = laid_out(g, z)
    equation = LinearizedMap(fn, True, z.detach(), g, known)
    derived = _heard(problem.derived(fn, z.dtype, "backward"))
    if not derived.solver.estimates:
        v = _run(equation, nothing(g), derived, Record())[0]
        return torch.autograd.grad(value(), chosen, v, allow_unused=True, retain_graph=tape is not None)
    stop = replace(derived.stop, rtol=_BELIEVED * derived.stop.rtol, atol=_BELIEVED * derived.stop.atol)
    solution = solve_map(equation, nothing(g), derived.solver, stop, empty_trace(derived.logs), verified=False)
    image, *found = torch.autograd.grad(value(), [z, *chosen], solution.z, allow_unused=True, retain_graph=True)
    measured = _measured(replace(solution, stop=derived.stop), g if image is None else image + g)
    if not bool((solution.converged & ~measured.converged).any()):
        _tell(measured, derived, Record())
        return found
    v = _run(equation, solution.z, derived, Record())[0]  # an estimate was too good to be true
    return torch.autograd.grad(value(), chosen, v, allow_unused=True, retain_graph=tape is not None)


_BELIEVED = 0.95  # the part of a tolerance that estimates must meet, so that rounding does not take them beyond it


def _measured(solution: Solution, image: Tensor) -> Solution:
    """A solution that was believed, with its true residual: f at it is at hand."""
    size, scale = norm(image - solution.z), norm(image)
    met, stopped = size <= solution.stop.atol + solution.stop.rtol * scale, Status.MAX_STEPS.code
    open_ = solution.converged | (solution.codes == stopped)
    codes = torch.where(open_, torch.where(met, 0, stopped), solution.codes)
    return replace(solution, residual=relative(size, scale), codes=codes, evals=solution.evals + 1)


def _linearized(fn: Map, z: Tensor, g: Tensor, problem: Problem, *, transposed: bool, closed: bool) -> Tensor:
    """v = J'v + g or v = Jv + g, attached to the graph of z, g and the tensors of fn."""
    g = laid_out(g, z)
    equation = LinearizedMap(fn, transposed, z, g)
    phase = "backward" if transposed else "tangent"
    return equilibrium(equation, torch.zeros_like(g), problem.derived(fn, z.dtype, phase), closed=closed)[0].z


def quarantined(
    template: Map, operands: Sequence[Tensor], z: Tensor, g: Tensor, codes: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Let a sound sample, with a zero cotangent, stand in for each that met NaN or infinity.

    So they add nothing to the gradient of shared weights, wherever f is defined.
    """
    sound = finite(codes)
    rows = torch.where(sound, torch.arange(sound.shape[0], device=sound.device), sound.to(torch.uint8).argmax())
    marks = [leaf.per_sample for leaf in template.leaves()]

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(sound.any(), tensor.index_select(0, rows), torch.zeros_like(tensor))

    operands = [clean(t) if per else t for t, per in zip(operands, marks, strict=True)]
    return operands, clean(z), torch.where(per_sample_like(sound, g), g, torch.zeros_like(g))


def _attach(fn: Map, z0: Tensor, problem: Problem, found: Record) -> Outputs:
    """The equilibrium of a map that captures tensors: solve, then hang the solution on the graph of f by two Newton steps.

    Each step is z <- z + (I - J)^-1 (f(z) - z), which changes no value. The first makes first derivatives exact, the second
    makes second derivatives exact; higher ones are refused.
    """
    if problem.order > 2:
        raise RuntimeError(SECOND_ORDER)
    if is_mapped(z0) or any(is_mapped(leaf.tensor) for leaf in fn.leaves()):
        raise RuntimeError(NOT_MAPPED)
    with torch.no_grad():
        z, codes, residual, steps = _run(fn.detach(), z0.detach(), problem, found)
    value = z
    if found.nonfinite:
        operands, z, _ = quarantined(fn, [leaf.tensor for leaf in fn.leaves()], z, z, codes)
        fn = fn.filled(operands)
    seen: list[Tensor] = []
    with torch.autocast(z.device.type, enabled=False):
        inner = call(_NewtonStep, z, fn(z) - z, fn, problem, seen, True)
        outer: Tensor = call(_NewtonStep, inner, fn(inner) - inner, fn, problem, seen, False)
    if found.nonfinite:
        outer = torch.where(per_sample_like(finite(codes), outer), outer, value)
    return outer, codes, residual, steps


class _NewtonStep(torch.autograd.Function):
    """z in value; dz + (I - J)^-1 dgap in derivative."""

    @staticmethod
    def forward(z: Tensor, gap: Tensor, fn: Map, problem: Problem, seen: list[Tensor], inner: bool) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.fn, ctx.problem, ctx.seen, ctx.inner = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (z,), g = ctx.saved_tensors, grads[0]
        _refuse_stacked(g)
        if ctx.inner and _negligible(g, ctx.seen, ctx.problem):
            return (None,) * 6
        if not ctx.inner and not is_transformed(g):
            ctx.seen[:] = [norm(g.detach())]
        problem = replace(ctx.problem, order=ctx.problem.order + 1)
        return g, _linearized(ctx.fn, z, g, problem, transposed=True, closed=False), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise RuntimeError("f captures a tensor that has derivatives, so forward mode cannot follow f. " + HAND_OVER)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        raise RuntimeError(NOT_MAPPED)


def _negligible(g: Tensor, seen: list[Tensor], problem: Problem) -> bool:
    """Whether the outer step, in the same backward pass, has left only the error of its linear solve, g - (I - J') v."""
    if not seen:
        return False
    return bool((norm(g.detach()) <= 10 * problem.linear_stop(g.dtype).rtol * seen.pop()).all())
