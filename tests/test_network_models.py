"""Whole networks: what they compute, how many parameters they have, and what they refuse."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.functional import adaptive_avg_pool2d, conv2d, interpolate, relu

from cell_zoo import random_matrix
from conformance import write_verify
from opteq import Equilibrium, Solution, Stop, models
from opteq.cells import DeepOptEq, DepthwiseOptEq, Monotone, MonotoneConv, OptEq, Residual
from opteq.gradients import Implicit, Unrolled
from opteq.models import (
    FCN,
    Classifier,
    ConvField,
    FeedForward,
    NeuralODE,
    Pooled,
    Readout,
    Repeated,
    ResNet,
    Scores,
    Segmenter,
    Standardize,
    Stem,
    Strided,
    count_parameters,
    deep_opteq,
    feed_forward,
    fit_widths,
    mdeq_small,
    monotone_conv,
    neural_ode,
    opteq_mid,
    opteq_segmenter,
    opteq_small,
    parts,
    residual_deq,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    separable,
    wide_resnet50,
    without_equilibrium,
)
from opteq.models.imagenet import TieredHead
from opteq.models.separable import QuickDepthwiseOptEq, TwofoldOptEq
from opteq.regularizers import L2
from opteq.solvers import SAM, Picard
from opteq.spectral import operator_norm

ROOT = Path(__file__).parent.parent
TINY = {"channels": 4, "hidden": (3, 5), "pool": 2}


def images(*shape: int, seed: int = 0) -> Tensor:
    return random_matrix(*shape, seed=seed)


def small_zoo() -> dict[str, tuple[nn.Module, Tensor, tuple[int, ...]]]:
    """Every kind of network, tiny, in float64, with an input and the shape of its output."""
    torch.manual_seed(0)
    x = images(3, 2, 8, 8)
    mdeq = mdeq_small(3, in_channels=2, channels=(4, 8), expand=1, head=(2, 3), final=5)
    found = {
        "deep OptEq": deep_opteq(2, 3, **TINY, norm=None),
        "deep OptEq with norms": deep_opteq(2, 3, **TINY, norm="batch", learn_alpha=True, constrained=True),
        "feed-forward": feed_forward(2, 3, **TINY, norm="group"),
        "residual": residual_deq(2, 3, channels=4, inner=4, groups=2, pool=2),
        "repeated": residual_deq(2, 3, channels=4, inner=4, groups=2, pool=2, repeat=3),
        "monotone": monotone_conv(2, 3, size=8, channels=3, pool=2),
        "ODE": neural_ode(2, 3, size=8, filters=3),
        "augmented ODE": neural_ode(2, 3, size=8, filters=3, augment=2, method="rk4", steps=3),
        "MDEQ": mdeq,
        "segmenter": opteq_segmenter(2, 3, channels=(3, 4), hidden=(3, 5)),
        "FCN": FCN(2, 3, channels=(3, 4), hidden=(3, 5), norm=None),
        "ResNet": Classifier(ResNet((1, 1), bottleneck=True, in_channels=2), nn.Identity(), Pooled(512, 3)),
    }
    shapes = {"segmenter": (3, 3, 8, 8), "FCN": (3, 3, 8, 8)}
    return {name: (model.double(), x, shapes.get(name, (3, 3))) for name, model in found.items()}


ZOO = small_zoo()


# What every network satisfies


@pytest.mark.parametrize("name", ZOO)
def test_a_network_has_logits_gradients_copies_and_a_state(name):
    model, x, shape = copy.deepcopy(ZOO[name])
    model.standardize = Standardize.of(x)
    logits = model(x)
    assert logits.shape == shape
    assert logits.dtype is torch.float64
    logits.square().sum().backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        assert parameter.grad.any() or "branches.1" in label, label  # the coarse tier of an MDEQ that is begun at z = 0
    other, fresh = copy.deepcopy(model), small_zoo()[name][0]
    fresh.standardize = Standardize.of(images(4, 2, 8, 8, seed=9))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1.0)
    fresh.load_state_dict(model.state_dict())
    model.eval(), other.eval(), fresh.eval()
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(fresh(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_memory_in_channels_last_changes_nothing(name):
    model, x, _ = copy.deepcopy(ZOO[name])
    expected = model.eval()(x)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ZOO)
def test_the_parts_of_a_network_add_up(name):
    model, *_ = ZOO[name]
    counts = count_parameters(model)
    assert list(counts) == ["extractor", "equilibrium", "head", "total"]
    assert type(model.equilibrium).__name__ in repr(model)
    assert counts["total"] == sum(p.numel() for p in model.parameters()) == sum(counts.values()) - counts["total"]


def test_other_models_are_counted_by_their_children():
    assert count_parameters(Readout(OptEq(3, 5, 4))) == {"a": 5, "cell": 4 * 5 + 4 * 3 + 4, "total": 41}
    tied = nn.Linear(2, 2)
    assert count_parameters(nn.Sequential(tied, tied)) == {"0": 6, "total": 6}


# Classifier and Segmenter


def test_a_classifier_is_its_three_parts_and_tells_of_its_equilibrium():
    torch.manual_seed(0)
    x, cell = images(4, 3), Monotone(5, 6)
    model = Classifier(nn.Linear(3, 5), cell, nn.Linear(6, 2)).double()
    assert isinstance(model.equilibrium, Equilibrium)
    model.equilibrium.stop = Stop(1e-12, max_steps=500)
    solution = model.solve(x)
    assert isinstance(solution, Solution)
    expected = model.head(model.equilibrium(model.extractor(x)))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.states(x), solution.z)
    again = model.solve(x, solution.z)
    assert again.evals < solution.evals
    torch.testing.assert_close(model(x, solution.z), expected, rtol=1e-9, atol=1e-9)


def test_standardisation_comes_first_and_is_saved():
    torch.manual_seed(0)
    x = 3 * images(50, 2, 8, 8) + torch.tensor([1.0, 5.0], dtype=torch.float64)[:, None, None]
    model = deep_opteq(2, 3, **TINY).double()
    plain = copy.deepcopy(model)
    model.standardize = Standardize.of(x)
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(model(x), plain((x - mean) / std))
    assert {"standardize.mean", "standardize.std"} <= set(model.state_dict())
    assert "channels=2" in repr(model.standardize)
    assert without_equilibrium(model).standardize is not model.standardize


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 5)])
def test_standardize_makes_channels_of_mean_zero_and_deviation_one(shape):
    x = 1e3 + images(*shape)
    x[:, 1] = 7.0  # a constant channel
    out = Standardize.of(x)(x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(out.std(1, correction=0), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), atol=1e-9, rtol=0)
    assert Standardize([0.0] * 3, [2.0] * 3)(x).dtype is torch.float64


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 2, 4), (1, 2, 5)])
def test_the_deviation_is_summed_in_parts_and_exact_beside_a_large_mean(shape, monkeypatch):
    sizes, double = [], torch.Tensor.double
    monkeypatch.setattr(parts, "_CHUNK", 48)
    monkeypatch.setattr(torch.Tensor, "double", lambda x: sizes.append(x.numel()) or double(x))
    x = 1000 + images(*shape).float()
    x[:, 0] = 7.0
    found = Standardize.of(x)
    monkeypatch.undo()
    channels = x.transpose(0, 1).flatten(1).numpy().astype("float64")
    np.testing.assert_allclose(found.mean.numpy(), channels.mean(1), rtol=1e-7)
    np.testing.assert_allclose(found.std.numpy(), [1.0, *channels.std(1)[1:]], rtol=1e-6)
    assert max(sizes) <= 48


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (16, 11)])
@pytest.mark.parametrize("make", [opteq_segmenter, FCN])
def test_segmenters_answer_at_every_pixel_of_any_image(make, size):
    torch.manual_seed(0)
    model = make(2, 3, channels=(3, 4), hidden=(3, 5)).double()
    x = images(2, 2, *size)
    coarse = model.head(model.states(x))
    assert coarse.shape[2:] == tuple(-(-side // 4) for side in size)
    logits = model(x)
    assert logits.shape == (2, 3, *size)
    torch.testing.assert_close(logits, interpolate(coarse, size=size, mode="bilinear"), rtol=1e-4, atol=1e-4)


def test_upsampling_between_pixels_is_linear():
    model = Segmenter(nn.AvgPool2d(2), nn.Identity(), nn.Identity())
    x = torch.arange(8.0).repeat_interleave(2)[None, None, None, :].expand(1, 1, 2, 16)
    torch.testing.assert_close(model(x)[0, 0, 0, 1:-1], torch.arange(0.25, 7.0, 0.5))


def test_without_its_equilibrium_a_classifier_has_its_head_on_its_extractor():
    model = deep_opteq(2, 3, **TINY).double()
    bare, x = without_equilibrium(model), images(3, 2, 8, 8)
    torch.testing.assert_close(bare(x), model.head(model.extractor(x)))
    assert count_parameters(bare)["equilibrium"] == 0
    assert not {id(p) for p in bare.parameters()} & {id(p) for p in model.parameters()}


# Heads and extractors


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_pooled_is_a_linear_map_of_the_means_of_regions(pool):
    head, z = Pooled(3, 4, pool=pool).double(), images(2, 3, 6, 6)
    side = 6 // pool
    means = z.reshape(2, 3, pool, side, pool, side).mean((3, 5))
    torch.testing.assert_close(head(z), means.flatten(1) @ head[-1].weight.T + head[-1].bias)
    assert isinstance(head[:2], nn.Sequential)


@pytest.mark.parametrize("make", [Pooled, Scores])
def test_the_norm_of_a_head_comes_first(make):
    torch.manual_seed(0)
    head, z = make(4, 3, norm="group").double(), images(2, 4, 5, 6)
    nn.init.normal_(head[0].weight), nn.init.normal_(head[0].bias)
    torch.testing.assert_close(head(z), head[1:](nn.functional.group_norm(z, 2, head[0].weight, head[0].bias)))


@pytest.mark.parametrize("norm", ["batch", "group", None])
def test_convolutions_are_followed_by_their_norm_and_relu(norm):
    """Of stride 2 in the extractor, a Strided, and of stride 1 behind it."""
    torch.manual_seed(0)
    model, z = FCN(2, 3, channels=(3, 4), hidden=(5, 3), norm=norm).double(), images(2, 2, 9, 8)
    for layers, stride in ((model.extractor, 2), (model.equilibrium, 1)):
        wanted = z
        for conv, scale in zip(layers[::3], layers[1::3], strict=True):
            wanted = relu(scale(conv2d(wanted, conv.weight, conv.bias, stride=stride, padding=1)))
        z = layers(z)
        torch.testing.assert_close(z, wanted)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_a_stem_divides_the_side_of_an_image_by_its_stride(stride):
    stem = Stem(2, 3, stride=stride)
    for side in range(stride, 34):
        assert stem(torch.zeros(1, 2, side, 32)).shape == (1, 3, side // stride, 32 // stride)
    assert Stem(2, 3, kernel_size=5)(torch.zeros(1, 2, 7, 6)).shape == (1, 3, 7, 6)


def test_norms_stand_outside_of_f():
    model = deep_opteq(2, 3, **TINY, norm="batch")
    assert not [part for part in model.equilibrium.modules() if isinstance(part, nn.BatchNorm2d)]
    assert sum(isinstance(part, nn.BatchNorm2d) for part in model.modules()) == 2
    with torch.device("meta"):
        assert not [part for part in mdeq_small(2).equilibrium.modules() if isinstance(part, nn.BatchNorm2d)]


# FeedForward


def written_out(model: FeedForward, x: Tensor, product) -> Tensor:
    z = torch.zeros(0)
    for k, (U, b) in enumerate(zip(model.U, model.b, strict=True)):
        b = b if x.ndim == 2 else b[:, None, None]
        z = product(U, x) + b + (product(model.W[k - 1], z) if k else 0)
        z = z.clamp(min=0)
    return z


def test_dense_feed_forward_layers_are_equation_1():
    torch.manual_seed(0)
    model, x = FeedForward(3, (4, 6, 5)).double(), images(7, 3)
    for b in model.b:
        nn.init.normal_(b)
    torch.testing.assert_close(model(x), written_out(model, x, lambda W, z: z @ W.T))
    assert [tuple(W.shape) for W in model.W] == [(6, 4), (5, 6)]
    smooth = FeedForward(3, (4, 5), activation="tanh").double()
    assert gradcheck(smooth, (images(2, 3).requires_grad_(),))


def test_convolutional_feed_forward_layers_are_equation_1():
    torch.manual_seed(0)
    model, x = FeedForward(2, (3, 4), kernel_size=3).double(), images(2, 2, 5, 6)
    for b in model.b:
        nn.init.normal_(b)
    torch.testing.assert_close(model(x), written_out(model, x, lambda W, z: conv2d(z, W, padding="same")))


def test_feed_forward_keeps_the_size_of_its_signals():
    torch.manual_seed(0)
    z = FeedForward(50, (400,) * 6)(torch.randn(200, 50))
    assert 0.5 < z.square().mean().item() < 2.0


def test_a_feed_forward_network_is_given_the_size_it_is_compared_with():
    deep = count_parameters(deep_opteq(3, 10, hidden=(16, 32, 64, 128, 128), pool=4))["total"]
    same = feed_forward(3, 10, hidden=(16, 32, 64, 128, 128), parameters=deep)
    assert same.equilibrium.hidden == (11, 22, 44, 88, 88)  # the default widths
    assert 0.99 * deep < count_parameters(feed_forward(3, 10))["total"] == count_parameters(same)["total"] <= deep
    assert fit_widths((1, 2), 10**4, lambda w: nn.Linear(*w, bias=False)) == (70, 141)


# Repeated


@pytest.mark.parametrize("times", [1, 2, 5])
def test_repeated_is_f_applied_so_many_times(times):
    torch.manual_seed(times)
    cell, x = Residual(4, 4, groups=2).double(), images(3, 4, 3, 3).requires_grad_()
    model = Repeated(cell, times)
    z = torch.zeros_like(x)
    for _ in range(times):
        z = cell(z, x)
    torch.testing.assert_close(model(x), z)
    inputs = (x, *cell.parameters())
    cotangent = images(*z.shape, seed=1)
    for ours, exact in zip(
        torch.autograd.grad(model(x), inputs, cotangent), torch.autograd.grad(z, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, exact)
    assert model.solve(x).steps.tolist() == [times] * 3


def test_repeated_takes_any_cell_and_nears_its_equilibrium():
    torch.manual_seed(0)
    cell, x = OptEq(3, 5, 4).double(), images(4, 3)
    z = Equilibrium(cell, stop=Stop(1e-12))(x)
    torch.testing.assert_close(Repeated(cell, 60)(x), z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(Repeated(cell, 1, Picard(damping=0.5))(x), cell.bind(x)(torch.zeros_like(z)) / 2)


# Neural ODEs


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_linear_ode_ends_at_the_matrix_exponential(adjoint):
    torch.manual_seed(0)
    field = nn.Linear(3, 3, bias=False).double()
    model, x = NeuralODE(field, rtol=1e-9, atol=1e-9, adjoint=adjoint), images(4, 3).requires_grad_()
    exact = x @ torch.linalg.matrix_exp(field.weight).T
    torch.testing.assert_close(model(x), exact, rtol=1e-7, atol=1e-7)
    cotangent = images(4, 3, seed=1)
    inputs = (x, field.weight)
    ours = torch.autograd.grad(model(x), inputs, cotangent)
    for one, other in zip(ours, torch.autograd.grad(exact, inputs, cotangent), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_equal_steps_have_the_order_of_their_method(method, order):
    torch.manual_seed(0)
    field, x = nn.Linear(3, 3, bias=False).double(), images(4, 3)
    exact = x @ torch.linalg.matrix_exp(field.weight).T
    errors = [(NeuralODE(field, method=method, steps=steps)(x) - exact).norm().item() for steps in (7, 14)]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.2)


def test_the_field_of_images_is_three_convolutions_with_relu_between_them():
    torch.manual_seed(0)
    field, z = ConvField(3, 4).double(), images(2, 3, 5, 6)
    first, second, third = field.layers[::2]
    inner = relu(conv2d(z, first.weight, first.bias))
    inner = relu(conv2d(inner, second.weight, second.bias, padding=1))
    torch.testing.assert_close(field(z), conv2d(inner, third.weight, third.bias))


class Wave(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return 5 * torch.sin(3 * z)


def test_the_tolerance_is_that_of_every_sample():
    moving = images(1, 2)
    crowd = torch.cat([moving, torch.zeros(999, 2, dtype=torch.float64)])  # the others rest at 0
    model = NeuralODE(Wave(), rtol=1e-5, atol=1e-5)
    exact = NeuralODE(Wave(), rtol=1e-11, atol=1e-11)(moving)
    torch.testing.assert_close(model(crowd)[:1], model(moving), rtol=0, atol=1e-12)
    assert (model(moving) - exact).abs().max() < 1e-3


def test_augmented_channels_begin_at_zero():
    x = images(2, 3, 4, 5)
    z = NeuralODE(nn.Identity(), augment=2).initial(x)
    assert z.shape == (2, 5, 4, 5)
    assert torch.equal(z[:, :3], x)
    assert not z[:, 3:].any()
    still = NeuralODE(ConvField(5, 2), augment=2).double()
    nn.init.zeros_(still.field.layers[-1].weight), nn.init.zeros_(still.field.layers[-1].bias)
    torch.testing.assert_close(still(x), z)
    assert still(x[:0]).shape == (0, 5, 4, 5)


@pytest.mark.parametrize(("x", "options"), [(torch.full((1, 2), torch.nan), {}), (torch.ones(1, 2), {"max_steps": 1})])
def test_an_ode_that_cannot_be_integrated_says_why(x, options):
    field = nn.Linear(2, 2)
    with torch.no_grad():
        field.weight.mul_(20)
    with pytest.raises(RuntimeError, match=r"could not be integrated by dopri5: .* the field may be stiff"):
        NeuralODE(field, rtol=1e-6, atol=1e-6, **options)(x)


def test_without_torchdiffeq_the_remedy_is_told(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install 'opteq\[train\]'"):
        NeuralODE(nn.Linear(2, 2))(torch.zeros(1, 2))


# ResNets and ImageNet

KNOWN = {resnet18: 11_689_512, resnet34: 21_797_672, resnet50: 25_557_032, resnet101: 44_549_160, wide_resnet50: 68_883_240}


@pytest.mark.parametrize(("make", "channels"), [(resnet18, 512), (resnet50, 2048)])
def test_resnets_reduce_an_image_of_224_to_7(make, channels):
    with torch.device("meta"):
        model = make()
        x = torch.zeros(2, 3, 224, 224)
        assert model.features(x).shape == (2, channels, 7, 7)
        assert model(x).shape == (2, 1000)


@pytest.mark.parametrize("bottleneck", [True, False])
def test_a_residual_block_is_relu_of_its_shortcut_and_its_convolutions(bottleneck):
    torch.manual_seed(0)
    net, x = ResNet((2, 1), bottleneck=bottleneck, in_channels=2).double().eval(), images(1, 2, 16, 16)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5), nn.init.normal_(part.bias), nn.init.normal_(part.running_mean)

    def step(pair: nn.Sequential, y: Tensor, stride: int = 1) -> Tensor:
        conv, norm = pair
        y = conv2d(y, conv.weight, stride=stride, padding=conv.weight.shape[2] // 2)
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        return (y - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]

    y = nn.functional.max_pool2d(relu(step(net[0], x, 2)), 3, 2, 1)
    for block, stride in ((net[3][0], 1), (net[3][1], 1), (net[4][0], 2)):
        *first, strided, last = block.layers
        inside = relu(step(first[0], y)) if first else y
        inside = step(last, relu(step(strided, inside, stride)))
        y = relu(inside + (y if isinstance(block.shortcut, nn.Identity) else step(block.shortcut, y, stride)))
    torch.testing.assert_close(net(x), y)
    assert (net.out_channels, net.reduction) == (512 if bottleneck else 128, 8)


def test_a_resnet_begins_by_the_rule_of_he_for_its_outputs():
    torch.manual_seed(0)
    for part in ResNet((1, 1), bottleneck=True, in_channels=2).modules():
        if isinstance(part, nn.Conv2d):
            assert part.weight.std().item() == pytest.approx((2 / part.weight[:, 0].numel()) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("make", "options", "channels", "sides"),
    [
        (opteq_small, {}, 512, (28, 8)),
        (opteq_mid, {"stages": 3}, 512, (14, 4)),
        (mdeq_small, {}, 32 * 64 + 64 * 16 + 128 * 4 + 256, (7, 2)),
    ],
)
def test_states_on_imagenet_have_the_shapes_of_table_6(make, options, channels, sides, monkeypatch):
    monkeypatch.setattr(separable, "estimated_norm", lambda *given: torch.ones(()))
    with torch.device("meta"):
        model = make(**options)
        for size, side in zip((224, 64), sides, strict=True):
            z = model.equilibrium.cell.initial(model.features(torch.zeros(1, 3, size, size)))
            assert z.shape == (1, channels, side, side)
            assert model.head(z).shape == (1, 1000)


@pytest.mark.parametrize("make", [opteq_small, opteq_mid, mdeq_small])
def test_networks_for_imagenet_learn_from_an_image(make):
    torch.manual_seed(0)
    model = make(5, gradient=Unrolled(1))
    side = 64 if make is mdeq_small else 32
    logits = model(torch.randn(2, 3, side, side))
    assert logits.shape == (2, 5)
    nn.functional.cross_entropy(logits, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.verify
def test_networks_for_imagenet_learn_at_full_size():
    figures = {}
    for make in (opteq_small, opteq_mid, mdeq_small):
        torch.manual_seed(0)
        model, x = make(), torch.randn(2, 3, 224, 224)
        loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 999]))
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            residual = model.solve(x).residual.max().item()
        figures[make.__name__] = {"parameters": count_parameters(model), "loss": loss.item(), "residual": residual}
    write_verify("models_imagenet", figures)


def test_layers_with_many_channels_begin_with_a_norm_of_about_a_half():
    torch.manual_seed(0)
    cell, twofold = QuickDepthwiseOptEq(16, 16, 12), TwofoldOptEq(8, 8, 8)
    assert isinstance(cell, DepthwiseOptEq)
    assert float(operator_norm(cell.operator(), (8, 8))) == pytest.approx(0.5, rel=0.2)
    assert float(operator_norm(twofold.operator(), (8, 8, 8), method="lanczos")) == pytest.approx(0.5, rel=0.2)


def test_the_twofold_layer_is_an_optimisation_layer():
    """W' is the adjoint of W = P2 D2 P1 D1, and f is W' relu(W z + U x + b)."""
    torch.manual_seed(0)
    cell = TwofoldOptEq(2, 3, 4).double()
    x, z = images(2, 2, 5, 6), images(2, 3, 5, 6, seed=1)

    def product(kernels, v: Tensor) -> Tensor:
        D1, P1, D2, P2 = kernels
        half = len(D1) // 2
        twice = torch.cat([conv2d(v, D1[:half], padding=2, groups=half), conv2d(v, D1[half:], padding=2, groups=half)], 1)
        return conv2d(conv2d(conv2d(twice, P1), D2, padding=1, groups=len(D2)), P2)

    z.requires_grad_()
    hidden = relu(product(cell.W, z) + product(cell.U, x) + cell.b[:, None, None])
    wanted = torch.autograd.grad(product(cell.W, z), z, hidden)[0]
    torch.testing.assert_close(cell.bind(x)(z), wanted)
    deep = Equilibrium(DeepOptEq([cell, TwofoldOptEq(2, 3, 4).double()]), stop=Stop(1e-12, max_steps=300))
    assert gradcheck(deep, (images(1, 2, 2, 2).requires_grad_(),), atol=1e-5, fast_mode=True)


def test_the_head_of_an_mdeq_joins_its_tiers_from_fine_to_coarse():
    torch.manual_seed(0)
    head = TieredHead((2, 3), (2, 2), 4, 5).double().eval()
    fine, coarse = images(2, 2, 4, 4), images(2, 3, 2, 2, seed=1)
    joined = head.blocks[1](coarse) + relu(head.steps[0](head.blocks[0](fine)))
    last = adaptive_avg_pool2d(relu(head.last(joined)), 1).flatten(1)
    torch.testing.assert_close(head(head.tiers.pack([fine, coarse])), head.pooled[-1](last))


# The sizes in docs/models.md

SIZES = {
    "deep_opteq(3, 10)": 161_670,
    "deep_opteq(3, 10, hidden=(16, 32, 64, 128, 128), pool=4)": 198_622,
    "deep_opteq(3, 10, channels=84, hidden=(48, 96, 192, 192, 384))": 1_387_594,
    "feed_forward(3, 10)": 197_436,
    "monotone_conv(3, 10, size=32)": 172_216,
    "monotone_conv(3, 10, size=32, channels=200)": 853_610,
    "neural_ode(3, 10, size=32)": 172_358,
    "neural_ode(3, 10, size=32, filters=64, augment=10)": 171_799,
    "residual_deq(3, 10)": 64_794,
    "opteq_segmenter(3, 19)": 6_276_179,
    "FCN(3, 19)": 6_289_803,
    "opteq_small()": (1_444_928, 2_670_080, 4_673_512, 8_788_520),
    "opteq_small(stages=3)": (8_543_296, 4_003_840, 4_673_512, 17_220_648),
    "opteq_mid()": (4_126_528, 4_901_376, 4_673_512, 13_701_416),
    "opteq_mid(stages=3)": (24_862_528, 6_551_040, 4_673_512, 36_087_080),
    "mdeq_small()": (10_208, 7_145_152, 9_888_392, 17_043_752),
    **{f"{make.__name__}()": count for make, count in KNOWN.items()},
}


@pytest.mark.parametrize("call", SIZES)
def test_a_network_has_the_size_that_its_page_says(call, monkeypatch):
    monkeypatch.setattr(separable, "estimated_norm", lambda *given: torch.ones(()))  # slow without data
    with torch.device("meta"):
        counts = count_parameters(eval(call, vars(models).copy()))
    expected = SIZES[call]
    assert (counts["total"] if isinstance(expected, int) else tuple(counts.values())) == expected
    page = (ROOT / "docs" / "models.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| `{call}` |"))
    for number in (expected,) if isinstance(expected, int) else expected:
        assert f"{number:,}" in line


# Arguments


def test_builders_hand_on_what_they_are_given(monkeypatch):
    model = deep_opteq(
        3, 10, channels=4, hidden=(3, 5), kernel_size=5, stride=1, extractor_kernel=3, alpha=0.5, activation="tanh",
        regularizer=L2(), mode="prox", gamma=0.3, evaluation="none", constrained=True, stop=Stop(1e-2), gradient=Implicit(),
        solver=Picard(), on_failure="raise",
    )  # fmt: skip
    layer, cell = model.equilibrium, model.equilibrium.cell
    assert (layer.stop, layer.gradient, layer.solver, layer.on_failure) == (Stop(1e-2), Implicit(), Picard(), "raise")
    assert (cell.regularizer, cell.mode, cell.gamma, cell.evaluation) == (L2(), "prox", 0.3, "none")
    first, second = cell.layers
    assert (first.alpha, first.kernel_size, first.hidden, second.hidden, first.constrained) == (0.5, 5, 3, 5, True)
    assert first.activation.name == "tanh"
    assert model.extractor[0].kernel_size == (3, 3)
    sam = deep_opteq(3, 10, **TINY, solver=SAM(L2()), gradient=Unrolled(4))
    assert sam(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    monkeypatch.setattr(separable, "estimated_norm", lambda *given: torch.ones(()))
    small = opteq_small(2, alpha=0.7, learn_alpha=True, regularizer=L2(), gamma=0.2)
    assert small.equilibrium.gradient == Unrolled(5)
    assert small.equilibrium.cell.layers[4].alpha.item() == pytest.approx(0.7)
    assert (small.equilibrium.cell.regularizer, small.equilibrium.cell.gamma) == (L2(), 0.2)
    assert isinstance(monotone_conv(1, 2, size=(8, 4), channels=2, pool=2).equilibrium.cell, MonotoneConv)


REFUSED = [
    (lambda: Classifier(nn.Identity(), 3, nn.Identity()), "The 'equilibrium' parameter of Classifier must be an nn.Module"),
    (lambda: Segmenter(None, nn.Identity(), nn.Identity()), "The 'extractor' parameter of Segmenter must be an nn.Module"),
    (lambda: feed_forward(3, 10).solve(torch.zeros(1, 3, 32, 32)), "Classifier with a FeedForward .* has no equilibrium"),
    (lambda: feed_forward(3, 10)(torch.zeros(1, 3, 32, 32), torch.zeros(1)), "The 'z0' parameter of Classifier must be None"),
    (lambda: deep_opteq(3, 10, draw="he"), "The 'draw' parameter of deep_opteq must be 'half' or 'conv2d'. Got 'he'"),
    (
        lambda: deep_opteq(3, 10, draw="conv2d", constrained=True),
        "The 'draw' parameter of deep_opteq must be 'half' for constrained",
    ),
    (lambda: deep_opteq(3, 10)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)), "The 'x' parameter of Classifier must be a floating"),
    (lambda: deep_opteq(3, 10)(torch.zeros(1, 1, 32, 32)), r"The 'x' parameter of Stem must be of shape \[batch, 3, height"),
    (lambda: deep_opteq(3, 10)(torch.zeros(3, 32, 32)), r"The 'x' parameter of Stem must be of shape \[batch, 3, height"),
    (lambda: deep_opteq(1, 10, pool=4)(torch.zeros(1, 1, 6, 6)), "The 'x' parameter of Pooled must be images of at least 4 x 4"),
    (lambda: deep_opteq(1, 10, hidden=()), "The 'hidden' parameter of deep_opteq must be not empty"),
    (lambda: deep_opteq(1, 10, hidden=16), "The 'hidden' parameter of deep_opteq must be a tuple of integers"),
    (lambda: deep_opteq(1, 10, stride=0), "The 'stride' parameter of Stem must be an integer >= 1"),
    (lambda: deep_opteq(1, 10, norm="layer"), "The 'norm' parameter of Stem must be 'batch', 'group' or None"),
    (lambda: deep_opteq(1, 0), "The 'classes' parameter of Pooled must be an integer >= 1"),
    (lambda: Stem(1, 2, kernel_size=1, stride=2), "The 'kernel_size' parameter of Stem must be an integer >= 2"),
    (lambda: Strided(1, (2, 2.5)), "The 'channels' parameter of Strided must be an integer >= 1"),
    (lambda: Strided(1, (2, 2, 2))(torch.zeros(1, 1, 7, 9)), "of Strided must be images of at least 8 x 8.*Got '7 x 9'"),
    (lambda: Scores(2, 3)(torch.zeros(1, 3, 4, 4)), r"The 'x' parameter of Scores must be of shape \[batch, 2,"),
    (lambda: Standardize([0.0], [0.0]), "The 'std' parameter of Standardize must be 1 positive numbers"),
    (lambda: Standardize([0.0, 1.0], [1.0]), "The 'std' parameter of Standardize must be 2 positive numbers"),
    (lambda: Standardize([[0.0]], [1.0]), "The 'mean' parameter of Standardize must be one number a channel"),
    (lambda: Standardize([torch.nan], [1.0]), "The 'mean' parameter of Standardize must be finite"),
    (lambda: Standardize([0.0], [1.0])(torch.zeros(2, 3)), r"The 'x' parameter of Standardize must be of shape \[batch, 1"),
    (lambda: Standardize.of(torch.zeros(0, 3)), r"The 'x' parameter of Standardize.of must be of shape \[n, channels"),
    (lambda: Standardize.of(torch.zeros(2, 3, dtype=torch.uint8)), "The 'x' parameter of Standardize.of must be a floating"),
    (lambda: FeedForward(3, (4,), kernel_size=2), "The 'kernel_size' parameter of FeedForward must be odd"),
    (lambda: FeedForward(3, (4,))(torch.zeros(2, 4)), r"The 'x' parameter of FeedForward must be of shape \[batch, 3\]"),
    (lambda: FeedForward(3, (4,), activation="relo"), "The 'activation' parameter of FeedForward must be one of"),
    (lambda: FCN(3, 2, kernel_size=2), "The 'kernel_size' parameter of FCN must be odd"),
    (lambda: FCN(3, 2, parameters=372_000), "The 'parameters' parameter of fit_widths must be enough for layers of width 1"),
    (lambda: fit_widths((), 10, nn.Linear), "The 'widths' parameter of fit_widths must be not empty"),
    (lambda: Repeated(OptEq(2, 2, 2), 0), "The 'times' parameter of Repeated must be an integer >= 1"),
    (lambda: residual_deq(3, 10, repeat=3, stop=Stop()), "The 'stop' parameter of residual_deq must be None with `repeat`"),
    (lambda: neural_ode(3, 10, size=(8, 4)), "The 'size' parameter of neural_ode must be that of a square image"),
    (lambda: NeuralODE(nn.Identity(), method="rk5"), "The 'method' parameter of NeuralODE must be one of 'dopri5'"),
    (lambda: NeuralODE(nn.Identity())(torch.zeros(3)), r"The 'x' parameter of NeuralODE must be of shape \[batch, channels"),
    (lambda: NeuralODE(nn.Linear(3, 2))(torch.zeros(1, 3)), "The 'field' parameter of NeuralODE must be a module that keeps"),
    (lambda: ResNet((1,), bottleneck=False, width=2), "The 'width' parameter of ResNet must be 1 without bottlenecks"),
    (lambda: ResNet((1,), bottleneck=True, stages=2), "The 'stages' parameter of ResNet must be at most 1"),
    (lambda: ResNet((1, 1), bottleneck=True)(torch.zeros(1, 3, 7, 7)), "of ResNet must be images of at least 8 x 8"),
    (lambda: without_equilibrium(nn.Identity()), "The 'model' parameter of without_equilibrium must be a Classifier"),
    (lambda: TwofoldOptEq(2, 3, 4).bind(torch.zeros(1, 3, 4, 4)), "The 'x' parameter of TwofoldOptEq must be of shape"),
    (lambda: mdeq_small(2, channels=(4, 8), head=(2,)), "The 'head' parameter of mdeq_small must be 2 numbers, one a resolution"),
    (lambda: mdeq_small(2, channels=()), "The 'channels' parameter of mdeq_small must be not empty"),
    (
        lambda: mdeq_small(2, channels=(4, 8), head=(2, 2), final=3)(torch.zeros(1, 3, 12, 12)),
        "The 'x' parameter of Multiscale must be .* multiples of 2",
    ),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:50] for _, said in REFUSED])
def test_what_does_not_fit_is_refused_in_words(make, said):
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_weights_begin_at_half_or_as_a_convolution_draws_them():
    for draw, low, high in (("half", 0.3, 0.7), ("conv2d", 0.8, 2.2)):
        torch.manual_seed(0)
        norms = [float(operator_norm(layer.operator(), (16, 16))) for layer in deep_opteq(3, 10, draw=draw).equilibrium.cell.layers]
        assert all(low < norm < high for norm in norms), (draw, norms)
