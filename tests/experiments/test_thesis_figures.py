"""What figures 4.1 to 4.5 of the thesis measure, against other ways to it; and what their judges let pass."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from opteq.experiments import _thesis
from opteq.experiments import monotone_fig41_42 as fig41
from opteq.experiments import monotone_fig43 as fig43
from opteq.experiments import monotone_fig44 as fig44
from opteq.experiments import monotone_fig45 as fig45

NAN = float("nan")


def surface(width=1.0, floor=0.5, steps=17):
    """A round bowl floor + (r / width)^2, as a cell gives it."""
    axis = np.linspace(-1, 1, steps)
    bowl = floor + (axis[:, None] ** 2 + axis**2) / width**2
    line = (floor + axis**2 / width**2).tolist()
    scores = {"train_loss": [1.0], "valid_accuracy": [0.5], "converged": 1.0, "guessing": math.log(10)}
    return {"axis": axis.tolist(), "loss": bowl.tolist(), "lines": [line, line], **scores}


# --- figures 4.1 and 4.2 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def network():
    settings = {"seed": 0, "channels": 8, "inner": 8, "steps": 5, "deviation": 1.0}
    return fig41.network(settings, torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(1)))


def test_lyapunov_exponents_are_the_growth_under_the_dense_jacobians_of_an_orbit(network):
    x = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    found = fig41.lyapunov(network, x, steps=4, seed=5)
    cell, injection = deepcopy(fig41.block(network)).double(), network.extractor(x).double().detach()
    v = torch.randn(injection.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for sample, start, exponent in zip(injection, v, found, strict=True):
        z, way, growth = torch.zeros_like(sample), start.flatten(), []
        for _ in range(4):
            J = torch.autograd.functional.jacobian(lambda z, x=sample: cell(z[None], x[None])[0], z).reshape(z.numel(), -1)
            z, before, way = cell(z[None], sample[None])[0].detach(), way, J @ way
            growth.append(float(way.norm() / before.norm()))
        assert exponent == pytest.approx(np.mean(np.log(growth[2:])), abs=1e-9)


def test_the_rest_of_a_path_is_measured_in_lengths_of_its_first_step(network):
    from opteq.diagnostics import trajectory

    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    paths = trajectory(network, x)
    with torch.no_grad():
        injection = network.extractor(x)
        first = fig41.block(network)(torch.zeros_like(injection), injection)
    rest = (paths.lengths[0] - first.flatten(1).norm(dim=1)) / first.flatten(1).norm(dim=1)
    assert fig41.rest(paths, network, x) == pytest.approx(rest.tolist(), rel=1e-5)


def test_the_first_step_below_the_tolerance_is_found_or_there_is_none():
    assert fig41.first_below(torch.tensor([[1.0, 0.01, 0.5], [1.0, 0.5, 0.02]])) == [1, None]


def iterates(solved, least, rest, lyapunov):
    return {"solved": [solved], "least": [least], "rest": [rest], "lyapunov": [lyapunov]}


def test_only_weights_that_settle_and_weights_that_do_not_show_the_claims_on_initialisation():
    steady, restless = iterates(5, 1e-6, 0.3, -0.3), iterates(None, 0.2, 4.0, 0.1)

    def shown(small, middle, standard):
        found = fig41.judge({fig41.SMALL: [small], fig41.MIDDLE: [middle], fig41.STANDARD: [standard]})
        return [all(one["shown"] for one in found[name].values()) for name in fig41.CLAIMS]

    assert shown(steady, steady, restless) == [True] * 4
    assert shown(steady, restless, restless) == [True, False, True, True]
    assert shown(restless, restless, steady) == [False] * 4
    assert shown(None, None, None) == [False] * 4


# --- figure 4.3 -----------------------------------------------------------------------------------------------------------------


def test_the_scatter_ratio_is_that_of_the_analysis_of_variance():
    from sklearn.feature_selection import f_classif

    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    z = torch.randn(8, 1, generator=draw, dtype=torch.float64) + labels[:, None]
    f = f_classif(z.numpy(), labels.numpy())[0][0]  # (between / 2) / (within / 5)
    assert fig43.scatter(z, labels) == pytest.approx(f * 2 / 5)


def training(**changed):
    rising = [1.0, 2.0, 3.0]
    return dict.fromkeys(("length", "detour", "steps", "silhouette", "scatter"), rising) | changed


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (training(), [True, True, True, True]),
        (training(length=[1.0, 3.0, 2.0]), [True, False, True, True]),
        (training(steps=[2.0, 3.0, 1.0]), [True, True, False, True]),
        (training(silhouette=[0.1, 0.05, 0.3]), [True, True, True, False]),
        (training(scatter=[None, None, None]), [True, True, True, False]),
        (None, [False] * 4),
    ],
)
def test_paths_that_shrink_and_classes_that_mix_do_not_show_the_claims_on_training(series, expected):
    assert [all(one["shown"] for one in found.values()) for found in fig43.judge(series).values()] == expected


# --- figures 4.4 and 4.5 --------------------------------------------------------------------------------------------------------


def test_the_width_of_a_bowl_is_that_of_its_formula():
    found = surface(width=0.5)
    level = _thesis.halfway(found)
    radius = 0.5 * math.sqrt((math.log(10) - 0.5) / 2)  # floor + (r / width)^2 = level
    assert level == pytest.approx((0.5 + math.log(10)) / 2)
    for width in _thesis.widths(found, level):
        assert width.value == pytest.approx(2 * radius, rel=0.02)
        assert not width.bound


def test_a_basin_at_the_edge_has_a_lower_bound_for_a_width():
    narrow, wide = ([*_thesis.widths(one, _thesis.halfway(one))] for one in (surface(0.5), surface(3.0)))
    assert [width.bound for width in wide] == [True, True]
    assert all(width.text().startswith(">= ") for width in wide)
    assert all(a.over(b) > 2 for a, b in zip(wide, narrow, strict=True))
    assert all(math.isnan(a.over(b)) for b in wide for a in (*narrow, *wide))
    one_line = surface(0.5)
    one_line["lines"][0] = [0.5] * 17
    assert [width.bound for width in _thesis.widths(one_line, _thesis.halfway(one_line))] == [False, True]


def shown(widths):
    series = {name: None if width is None else surface(width) for name, width in zip(("6", "11", "18", "DEQ"), widths, strict=True)}
    return [all(one["shown"] for one in found.values()) for found in fig44.judge(fig44.measure(series)).values()]


def test_basins_show_the_claim_only_if_they_widen_with_every_depth():
    assert shown((0.3, 0.35, 0.4, 0.5)) == [True, True]
    assert shown((0.3, 0.4, 0.35, 0.5)) == [False, False]
    assert shown((0.3, None, 0.4, 0.5)) == [False, False]


def test_basins_at_the_edge_do_not_show_that_the_next_one_is_wider():
    assert shown((3.0, 3.0, 3.0, 3.0)) == [False, False]
    assert shown((0.3, 0.35, 0.4, 3.0)) == [True, True]
    assert shown((0.3, 0.35, 3.0, 3.0)) == [False, False]


def test_a_gap_in_a_surface_shows_nothing_of_it():
    series = {name: surface(0.3) for name in ("6", "11", "18", "DEQ")}
    series["11"]["loss"][8][8] = None
    assert not any(all(one["shown"] for one in found.values()) for found in fig44.judge(fig44.measure(series)).values())


def test_local_minima_and_regions_are_counted():
    axis = np.linspace(-1, 1, 9)
    bowl = axis[:, None] ** 2 + axis**2
    wells = (axis[:, None] ** 2 - 0.25) ** 2 + axis**2
    assert fig45.minima(bowl) == [(4, 4)]
    assert fig45.minima(wells) == [(2, 4), (6, 4)]
    assert (fig45.regions(bowl, 2.0), fig45.regions(wells, 2.0)) == (1, 2)
    assert (fig45.minima(bowl * NAN), fig45.regions(bowl * NAN, 2.0)) == ([], 0)


def test_a_plateau_is_one_minimum_and_losses_above_guessing_are_no_region():
    axis = np.linspace(-1, 1, 9)
    bowl = axis[:, None] ** 2 + axis**2
    assert len(fig45.minima(np.maximum(bowl, 0.2))) == 1
    assert fig45.regions(bowl + 3.0, 2.0) == 0
    guessing = surface(0.5, floor=3.0)
    assert not fig45.judge({fig45.MODEL: guessing, fig45.REFERENCE: None})["one_region"]["regions, the most at any level"]["shown"]


def test_losses_are_rounded_for_the_file_only():
    thin = _thesis.thinned({"a": surface(0.7), "b": None, "c": surface() | {"lines": [[None, NAN, 0.123456]]}})
    assert thin["a"]["loss"][0][1] == float(f"{surface(0.7)['loss'][0][1]:.4g}")
    assert thin["a"]["axis"] == surface()["axis"]
    assert thin["b"] is None
    assert thin["c"]["lines"] == [[None, None, 0.1235]]


def failed(loss):
    return surface() | {"loss": [[loss] * 17] * 17}


@pytest.mark.parametrize("module", [fig44, fig45])
def test_surfaces_are_drawn_without_those_that_failed(module):
    from matplotlib.contour import QuadContourSet

    def panels(*cells):
        page = module.figure({"series": dict(zip(("repeat-6", "MDEQ"), cells, strict=True))})
        page.canvas.draw()
        return sum(isinstance(part, QuadContourSet) and part.filled for axes in page.axes for part in axes.get_children())

    assert panels(surface(), surface()) == 2
    assert panels(None, surface()) == 1
    assert panels(failed(None), surface()) == 1
    assert panels(failed(0.0), surface()) == 2
    assert panels(None, None) == 0


def test_a_surface_without_a_loss_at_the_minimiser_is_drawn():
    gap = surface()
    gap["loss"][8][8] = None
    for module in (fig44, fig45):
        module.figure({"series": {"repeat-6": gap, "MDEQ": surface()}}).canvas.draw()


def test_figures_of_failed_cells_are_empty_pages():
    assert fig43.figure({"series": {}}).axes == []
    fig41.figure({"series": dict.fromkeys(fig41.DEVIATIONS), "config": {"steps": 5}}).canvas.draw()


def test_the_cells_of_another_seed_have_other_names(monkeypatch):
    from opteq.experiments import Options
    from opteq.grids import Outcome

    named = []

    def grid(name, function, cells, options):
        named.append(set(cells) | {cell["folder"] for cell in cells.values()})
        return {cell: Outcome(cell, None, "failed", 0.0, cached=False) for cell in cells}

    monkeypatch.setattr(_thesis, "grid", grid)
    monkeypatch.setattr(fig43, "grid", grid)
    for module in (fig43, fig44, fig45):
        named.clear()
        for seed in (0, 1):
            result = module.run(Options("smoke", seed=seed))
            module.figure(result).canvas.draw()
            assert not any(one["shown"] for one in result["claims"].values())
        assert named[0].isdisjoint(named[1])


def test_a_multiscale_surface_must_have_one_minimum_and_a_wide_basin():
    def shown(mdeq, reference):
        found = fig45.judge({fig45.MODEL: mdeq, fig45.REFERENCE: reference})
        return [all(one["shown"] for one in found[name].values()) for name in fig45.CLAIMS]

    two = surface(0.5)
    two["loss"][0][0] = two["loss"][16][16] = 0.6
    assert shown(surface(0.5), surface(0.4)) == [True, True, True]
    assert shown(surface(0.4), surface(0.5)) == [True, True, False]
    assert shown(two, surface(0.4))[:2] == [False, False]
    assert shown(None, surface(0.4)) == [False, False, False]
    assert shown(surface(0.5), None) == [True, True, False]
    assert shown(surface(3.0), surface(0.5))[2]
    assert not shown(surface(3.0), surface(3.0))[2]
