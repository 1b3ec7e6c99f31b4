"""Tiers, which pack resolutions into one state; Multiscale: what every cell satisfies, its formula, its paths and its start."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import jacrev, jvp, vjp, vmap
from torch.nn.functional import conv2d, interpolate, pixel_shuffle, pixel_unshuffle

from cell_conformance import CellConformance, DerivativeConformance, IndependentCellConformance, ModuleConformance, equilibrium_of
from cell_zoo import random_matrix
from conformance import residual
from opteq import Equilibrium, Status, Stop, solve
from opteq.cells.multiscale import Fusion, Multiscale, Repeat, downward, group_norm, upward
from opteq.cells.tiers import Tiers
from opteq.solvers import Anderson, Picard
from test_residual import image_entry, normalised, with_uneven_norms

# Forward mode makes PyTorch import code that still calls torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

# Tiers


def random_tiers(tiers: Tiers, batch: int, size: tuple[int, int], seed: int = 0) -> list[Tensor]:
    height, width = size
    return [
        random_matrix(batch, c, s * height, s * width, seed=seed + s) for c, s in zip(tiers.channels, tiers.scales, strict=True)
    ]


@settings(max_examples=20)
@given(
    channels=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    batch=st.integers(0, 2),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_packing_is_the_stack_of_pixel_unshuffles_and_unpacking_undoes_it(channels, batch, size):
    tiers = Tiers(channels)
    parts = random_tiers(tiers, batch, size)
    z = tiers.pack(parts)
    assert z.shape == (batch, *tiers.shape((parts[0].shape[2], parts[0].shape[3])))
    assert z.shape[1] == tiers.packed_channels
    for found, wanted in zip(tiers.unpack(z), parts, strict=True):
        assert torch.equal(found, wanted)
    if batch:  # torch's own gives an empty batch another shape
        assert torch.equal(z, torch.cat([pixel_unshuffle(p, s) for p, s in zip(parts, tiers.scales, strict=True)], 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tiers_keep_the_dtype_and_every_entry(dtype):
    tiers = Tiers((2, 3))
    z = random_matrix(2, tiers.packed_channels, 3, 2, seed=0).to(dtype)
    parts = tiers.unpack(z)
    assert [part.shape for part in parts] == [(2, 2, 6, 4), (2, 3, 3, 2)]
    assert all(part.dtype is dtype for part in parts)
    assert torch.equal(tiers.pack(parts), z)
    assert torch.equal(torch.cat([p.flatten() for p in parts]).sort().values, z.flatten().sort().values)


def test_tiers_work_under_every_transform():
    tiers = Tiers((2, 1, 3))
    z, v = (random_matrix(2, 2, tiers.packed_channels, 1, 2, seed=i) for i in range(2))

    def f(z: Tensor) -> Tensor:
        return tiers.pack([(i + 1) * part**2 for i, part in enumerate(tiers.unpack(z))])

    slope = 2 * z * tiers.pack([(i + 1) * torch.ones_like(p) for i, p in enumerate(tiers.unpack(z[0]))])
    torch.testing.assert_close(vmap(f)(z), torch.stack([f(z[0]), f(z[1])]))
    torch.testing.assert_close(jvp(f, (z[0],), (v[0],))[1], slope[0] * v[0])
    torch.testing.assert_close(vjp(f, z[0])[1](v[0])[0], slope[0] * v[0])
    torch.testing.assert_close(vmap(lambda z, v: vjp(f, z)[1](v)[0])(z, v), slope * v)


def test_tiers_are_values():
    assert Tiers((2, 3)) == Tiers([2, 3])
    assert hash(Tiers((2, 3))) == hash(Tiers([2, 3]))
    assert Tiers((2, 3, 4)).scales == (4, 2, 1)
    assert Tiers((2, 3, 4)).packed_channels == 2 * 16 + 3 * 4 + 4
    assert Tiers((2, 3, 4)).shape((8, 12)) == (48, 2, 3)
    with pytest.raises(AttributeError):
        Tiers((2,)).channels = (3,)


TWO = Tiers((2, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Tiers(3), TypeError, "'channels' parameter of Tiers must be a tuple of integers"),
        (lambda: Tiers("34"), TypeError, "'channels' parameter of Tiers must be a tuple of integers"),
        (lambda: Tiers(()), ValueError, "'channels' parameter of Tiers must be of at least one resolution"),
        (lambda: Tiers((3, 0)), ValueError, "'channels' parameter of Tiers must be an integer >= 1. Got 0"),
        (lambda: Tiers((3, 1.0)), TypeError, "'channels' parameter of Tiers must be an integer >= 1. Got 1.0"),
        (lambda: TWO.shape((4, 5)), ValueError, r"'size' parameter of Tiers must be two positive multiples of 2, .* Got \(4, 5\)"),
        (lambda: TWO.shape((0, 4)), ValueError, "'size' parameter of Tiers must be two positive multiples of 2"),
        (lambda: TWO.shape((4,)), ValueError, "'size' parameter of Tiers must be two positive multiples of 2"),
        (
            lambda: TWO.unpack(torch.ones(1, 10, 2, 2)),
            ValueError,
            r"'z' parameter of Tiers must be of shape \[batch, 11, height, wid",
        ),
        (lambda: TWO.unpack(torch.ones(11, 2, 2)), ValueError, "'z' parameter of Tiers must be of shape"),
        (lambda: TWO.pack([torch.ones(1, 2, 4, 4)]), ValueError, "'parts' parameter of Tiers must be of 2 tensors"),
        (lambda: TWO.pack([torch.ones(2, 4, 4), torch.ones(3, 2, 2)]), ValueError, r"must be of shapes \[batch, channels, height"),
        (lambda: TWO.pack([torch.ones(1, 2, 4, 4), torch.ones(1, 3, 2, 1)]), ValueError, r"\[\[1, 2, 4, 2\], \[1, 3, 2, 1\]\]"),
        (lambda: TWO.pack([torch.ones(1, 2, 4, 4), torch.ones(2, 3, 2, 2)]), ValueError, "from the finest to the coarsest"),
        (lambda: TWO.pack([torch.ones(1, 3, 4, 4), torch.ones(1, 3, 2, 2)]), ValueError, "from the finest to the coarsest"),
    ],
)
def test_tiers_refuse_what_does_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call()


# What every cell satisfies


def net(seed: int, channels: tuple[int, ...], **options) -> Multiscale:
    torch.manual_seed(seed)
    return with_uneven_norms(Multiscale(channels, **options), seed)


PAIR = image_entry("two tiers", lambda: net(0, (2, 2)), (2, 4, 4), (10, 2, 2))
TRIPLE = image_entry("three tiers", lambda: net(1, (2, 3, 4), blocks=2, expand=2), (2, 4, 8), (48, 1, 2))


@pytest.mark.parametrize("entry", [PAIR, TRIPLE], ids=lambda entry: entry.name)
class TestMultiscale(CellConformance):
    pass


@pytest.mark.parametrize("entry", [PAIR], ids=lambda entry: entry.name)
class TestMultiscaleModules(ModuleConformance, IndependentCellConformance, DerivativeConformance):
    pass


# The formula


class ByHand:
    """f of a Multiscale from its tensors, by functions of torch that the cell does not use."""

    def __init__(self, cell: Multiscale) -> None:
        self.cell, self.parts = cell, dict(cell.named_modules())

    def norm(self, name: str, z: Tensor) -> Tensor:
        part = self.parts[name]
        return normalised(z, part.num_groups, part.weight, part.bias)

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        W = self.parts[name].weight
        return conv2d(z, W, stride=stride, padding=W.shape[-1] // 2)

    def block(self, name: str, z: Tensor, x: Tensor | float) -> Tensor:
        inner = self.norm(f"{name}.norm1", self.conv(f"{name}.conv1", z)).clamp(min=0)
        out = z + self.norm(f"{name}.norm2", self.conv(f"{name}.conv2", inner) + x)
        return self.norm(f"{name}.norm3", out.clamp(min=0))

    def path(self, j: int, i: int, z: Tensor) -> Tensor:
        name = f"fusions.{i}.paths.{j}"
        if j > i:
            return interpolate(self.norm(f"{name}.1", self.conv(f"{name}.0", z)), scale_factor=2 ** (j - i), mode="nearest")
        for k in range(i - j):
            z = z.clamp(min=0) if k else z
            z = self.norm(f"{name}.{3 * k + 1}", self.conv(f"{name}.{3 * k}", z, stride=2))
        return z

    def __call__(self, parts: list[Tensor], x: Tensor) -> list[Tensor]:
        for k in range(self.cell.blocks):
            injections = [x if (i, k) == (0, 0) else 0.0 for i in range(len(parts))]
            parts = [self.block(f"branches.{i}.blocks.{k}", z, injections[i]) for i, z in enumerate(parts)]
        fused = [sum(self.path(j, i, z) for j, z in enumerate(parts)) for i in range(len(parts))]
        return [self.norm(f"fusions.{i}.norm", self.conv(f"fusions.{i}.conv", y.clamp(min=0))) for i, y in enumerate(fused)]


@pytest.mark.parametrize(
    ("channels", "options"),
    [((4,), {}), ((4, 6), {"blocks": 2}), ((2, 3, 4), {"expand": 3}), ((2, 4, 3, 6), {"groups": 2, "init": "mdeq"})],
)
def test_f_is_blocks_then_fusion(channels, options):
    cell = net(2, channels, **options)
    parts = random_tiers(cell.tiers, 2, (2, 1))
    x = random_matrix(*parts[0].shape, seed=9)
    found = cell.unpack(cell.bind(x)(cell.pack(parts)))
    for a, b in zip(found, ByHand(cell)(parts, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_pack_and_unpack_give_the_tiers_of_an_equilibrium():
    cell, x = net(0, (4, 6, 8)), random_matrix(2, 4, 8, 12, seed=1)
    z = equilibrium_of(cell, x)
    parts = cell.unpack(z)
    assert [part.shape[1:] for part in parts] == [(4, 8, 12), (6, 4, 6), (8, 2, 3)]
    assert torch.equal(parts[0], pixel_shuffle(z[:, :64], 4))
    assert torch.equal(cell.pack(parts), z)
    found = ByHand(cell)(list(parts), x)
    assert residual(lambda z: cell.pack(found), z).max() <= 1e-11


def test_the_parameters_of_32_and_64_channels():
    count = sum(p.numel() for p in Multiscale((32, 64)).parameters())
    blocks = sum(2 * 9 * c * c + 3 * 2 * c for c in (32, 64))
    paths = (9 * 32 * 64 + 2 * 64) + (64 * 32 + 2 * 32)
    last = sum(c * c + 2 * c for c in (32, 64))
    assert count == blocks + paths + last == 118_720
    assert "118,720" in Multiscale.__doc__


# The paths between resolutions


@pytest.mark.parametrize("channels", [(2, 3), (2, 3, 4), (2, 2, 2, 2)])
def test_every_resolution_takes_from_every_other(channels):
    cell, scales = net(0, channels), range(len(channels))
    parts = random_tiers(cell.tiers, 1, (2, 1))
    x = random_matrix(*parts[0].shape, seed=9)
    fusion = jacrev(lambda *parts: tuple(part(parts) for part in cell.fusions), argnums=tuple(scales))(*parts)
    whole = jacrev(lambda *parts: cell.unpack(cell(cell.pack(parts), x)), argnums=tuple(scales))(*parts)
    for i, j in product(scales, scales):
        assert fusion[i][j].norm() > 1e-3
        assert whole[i][j].norm() > 1e-3


def test_x_enters_at_the_finest_resolution_only():
    cell, x = net(0, (2, 3, 2)), random_matrix(1, 2, 8, 4, seed=1)
    z = random_matrix(*cell.initial(x).shape, seed=2)

    def slopes() -> list[float]:
        return [float(J.detach().norm()) for J in jacrev(lambda x: cell.unpack(cell(z, x)))(x)]

    assert min(slopes()) > 1e-3
    with torch.no_grad():
        for fusion in cell.fusions[1:]:  # cut the ways from the finest
            for p in fusion.paths[0].parameters():
                p.zero_()
    assert slopes()[0] > 1e-3
    assert slopes()[1:] == [0, 0]


def without_norms(sequence: nn.Sequential) -> nn.Sequential:
    """The same path in float64 with Dirac kernels and no norm, so that it can only move pixels."""
    for k, part in enumerate(sequence):
        if isinstance(part, nn.GroupNorm):
            sequence[k] = nn.Identity()
        elif isinstance(part, nn.Conv2d):
            nn.init.dirac_(part.weight)
    return sequence.double()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_paths_go_down_to_every_second_pixel_and_up_by_repetition(levels):
    channels, step = (2,) * (levels + 1), 2**levels
    fine, coarse = random_matrix(1, 2, 16, 8, seed=0).abs(), random_matrix(1, 2, 16 // step, 8 // step, seed=1)
    down, up = without_norms(downward(channels, 8)), without_norms(upward(channels, 8))
    assert torch.equal(down(fine), fine[:, :, ::step, ::step])
    assert torch.equal(up(coarse), interpolate(coarse, scale_factor=step, mode="nearest"))
    assert torch.equal(down(up(coarse.abs())), coarse.abs())


@pytest.mark.parametrize("levels", [1, 2])
def test_paths_keep_a_constant_image_constant_away_from_the_border(levels):
    channels = (4,) * (levels + 1)
    constant = random_matrix(1, 4, 1, 1, seed=0).expand(1, 4, 16, 8)
    for path, border in ((downward(channels, 8), 1), (upward(channels, 8), 0)):
        inside = path.double()(constant)[:, :, border:, border:]
        torch.testing.assert_close(inside, inside[:, :, :1, :1].expand_as(inside), rtol=1e-12, atol=1e-12)
        assert inside.norm() > 0.1


@pytest.mark.parametrize("batch", [0, 2])
def test_repetition_keeps_shapes_and_empty_batches(batch):
    assert Repeat(4)(torch.ones(batch, 3, 2, 5)).shape == (batch, 3, 8, 20)
    assert repr(Repeat(4)) == "Repeat(times=4)"


def test_fusion_leaves_a_tiers_own_state_as_it_is():
    fusion = Fusion((2, 3, 4), 1, 8)
    assert isinstance(fusion.paths[1], nn.Identity)
    assert [len(path) for path in (fusion.paths[0], fusion.paths[2])] == [2, 3]


@pytest.mark.parametrize(
    ("channels", "groups", "wanted"),
    [(1, 8, 1), (2, 8, 1), (3, 8, 1), (4, 8, 2), (6, 8, 3), (8, 8, 4), (11, 8, 1), (16, 8, 8), (20, 8, 5), (24, 4, 4), (64, 8, 8)],
)
def test_groups_divide_any_number_of_channels(channels, groups, wanted):
    assert group_norm(channels, groups).num_groups == wanted


# The start


NETS = [((8,), {}), ((8, 8, 16), {}), ((6, 6), {"expand": 5}), ((8, 8), {"blocks": 3})]


@pytest.mark.parametrize(("channels", "options"), NETS, ids=str)
def test_the_damped_start_converges_and_that_of_the_paper_does_not(channels, options):
    def trace(init: str, solver: Picard | Anderson) -> list[float]:
        torch.manual_seed(0)
        cell, x = Multiscale(channels, init=init, **options), random_matrix(3, channels[0], 8, 8, seed=1).float()
        found = solve(cell.bind(x), cell.initial(x), solver, Stop(rtol=0.0, max_steps=20), record=True)
        return [float(r.max()) for r in found.trace.residual]

    damped = trace("damped", Picard())
    assert damped[2] < 0.2
    assert damped[20] < 1e-4
    assert trace("damped", Anderson())[20] < 1e-4
    assert min(trace("mdeq", Picard())) > 0.1
    assert min(trace("mdeq", Anderson())) > 0.01


@pytest.mark.parametrize("init", ["damped", "mdeq"])
def test_weights_and_gains_begin_as_init_says(init):
    torch.manual_seed(0)
    cell = Multiscale((16, 32, 16), init=init)
    gains = {}
    for name, part in cell.named_modules():
        if isinstance(part, nn.Conv2d):
            assert float(part.weight.detach().std()) == pytest.approx(0.01, rel=0.15)
            assert part.bias is None
        elif isinstance(part, nn.GroupNorm):
            gains[name] = part.weight.unique().tolist()
            assert not part.bias.any()
    assert gains == {
        name: [1.0 if init == "mdeq" or name.startswith("branches.0") or ".paths.0." in name else pytest.approx(0.1)]
        for name in gains
    }


@pytest.mark.filterwarnings("error")
def test_a_new_net_works_at_the_defaults_and_learns():
    torch.manual_seed(0)
    model = nn.Sequential(Equilibrium(Multiscale((8, 16, 32))), nn.Flatten(), nn.LazyLinear(1))
    x, y = torch.randn(6, 8, 8, 8), torch.randn(6, 1)
    losses = []
    model(x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(b < a for a, b in pairwise(losses))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    cell, x = Multiscale((4, 6)), torch.randn(2, 4, 8, 8)
    wanted = equilibrium_of(cell, x, Stop(rtol=1e-5))
    found = Equilibrium(cell.to(dtype), stop=Stop(rtol=2e-2)).solve(x.to(dtype))
    assert found.status is Status.CONVERGED
    assert found.z.dtype is dtype
    assert (found.z.float() - wanted).norm() < 0.1 * wanted.norm()


# Arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Multiscale(32), TypeError, "'channels' parameter of Multiscale must be a tuple of integers"),
        (lambda: Multiscale((4, 0)), ValueError, "'channels' parameter of Multiscale must be an integer >= 1"),
        (lambda: Multiscale((4, 4), blocks=0), ValueError, "'blocks' parameter of Multiscale must be an integer >= 1"),
        (lambda: Multiscale((4, 4), expand=0.5), TypeError, "'expand' parameter of Multiscale must be an integer >= 1"),
        (lambda: Multiscale((4, 4), groups=True), TypeError, "'groups' parameter of Multiscale must be an integer >= 1"),
        (lambda: Multiscale((4, 4), init="small"), ValueError, "'init' parameter of Multiscale must be one of 'damped', 'mdeq'"),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("shape", [(2, 6, 8), (2, 8, 6), (2, 0, 8), (3, 8, 8)])
def test_images_that_do_not_halve_often_enough_are_refused(shape):
    cell = Multiscale((2, 2, 2))
    message = r"'x' parameter of Multiscale must be of shape \[batch, 2, height, width\], height and width multiples of 4"
    for call in (Equilibrium(cell), cell.bind, cell.initial):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, *shape))


@pytest.mark.parametrize("channels", [(2, 1), (1, 2), (1,)])
@pytest.mark.parametrize("batch", [1, 3])
def test_norms_of_one_number_are_refused(channels, batch):
    side = 2 ** (len(channels) - 1)
    with pytest.raises(ValueError, match="'x' parameter of Multiscale must be larger: at the coarsest resolution, a norm would"):
        Equilibrium(Multiscale(channels))(torch.ones(batch, channels[0], side, side))
    x = torch.ones(batch, channels[0], side, 2 * side)
    cell = Multiscale(channels)
    assert cell(cell.initial(x), x).isfinite().all()
