"""Recipes: settings to JSON and back, names to objects, runs that can be loaded again."""

import inspect
import json
import math
import re
import shutil
import types
from dataclasses import fields, is_dataclass, replace
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from data_files import random_bytes, write_camvid, write_class_folders, write_image
from opteq import Equilibrium, cells, recipes
from opteq.cells import DeepOptEq, GaussianDEQ, ScaledReLU, WideOptEq
from opteq.data import Dataset, Images, Split
from opteq.gradients import Implicit, JacobianFree, Phantom, Unrolled
from opteq.models import Readout
from opteq.recipes import KINDS, Data, Deep, Dense, Recipe, RecipeError, ScaledRelu, Solve
from opteq.runs import Run, RunError, RunWarning
from opteq.solve import Stop
from opteq.solvers import SAM, Newton
from opteq.theory.certificates import certified_init, certify
from opteq.training import TrainConfig, World

SMALL = {
    "deep": {"channels": 4, "hidden": (4,)},
    "dense": {"features": 4, "hidden": (4, 3)},
    "wide": {"features": 4, "hidden": (4, 4)},
    "monotone": {"width": 4},
    "monotone-conv": {"channels": 4},
    "residual": {"channels": 8, "inner": 8},
    "repeat": {"channels": 8, "inner": 8, "times": 2},
    "multiscale": {"channels": (8, 8), "head": (4, 4), "final": 8},
    "feed-forward": {"channels": 4},
    "ode": {"filters": 4, "augment": 1},
    "segmenter": {"channels": (4, 8), "hidden": (4,)},
    "fcn": {"channels": (4, 8), "hidden": (4, 8)},
    "opteq-small": {"stages": 1},
    "opteq-mid": {"stages": 1, "regularizer": "decorrelation"},
    "mdeq-small": {"solve": Solve(max_steps=2)},
    "gaussian": {"width": 4},
    "scaled-relu": {"width": 4, "start": "scaled_identity"},
}
LARGE = ("opteq-small", "opteq-mid", "mdeq-small")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a few images in the formats of Imagenette and CamVid."""
    folder = tmp_path_factory.mktemp("data")
    write_class_folders(folder / "imagenette64", size=(32, 32))
    write_camvid(folder / "camvid", size=(8, 12))
    return str(folder)


def data_for(kind: str, root: str) -> Data:
    if kind in ("segmenter", "fcn"):
        return Data("camvid", root=root)
    return Data("imagenette64", root=root, size=32) if kind in LARGE else Data(limit=12, test_limit=6)


# --- JSON -----------------------------------------------------------------------------------------------------------------------


def values_of(kind):
    """Values of the type of a field."""
    if is_dataclass(kind):
        return st.builds(kind, **{field.name: values_of(get_type_hints(kind)[field.name]) for field in fields(kind)})
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of(*map(values_of, get_args(kind)))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return (
            st.lists(values_of(first), max_size=3).map(tuple)
            if rest == [...]
            else st.tuples(values_of(first), *map(values_of, rest))
        )
    simple = {bool: st.booleans(), int: st.integers(1, 99), str: st.text(max_size=5), type(None): st.none()}
    return simple[kind] if kind in simple else st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(st.data())
def test_a_recipe_survives_json(kind, data):
    """Whatever its fields hold, and with every type kept: tuples, numbers that are whole, null."""
    recipe = Recipe(data.draw(values_of(Data)), data.draw(values_of(KINDS[kind])), TrainConfig(lr=data.draw(st.floats(1e-9, 1e9))))
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert type(again.model) is KINDS[kind] is type(recipe.model)
    assert repr(again) == repr(recipe)
    assert recipe.to_json()["model"]["kind"] == kind


def changed(path: str, value: object) -> dict:
    """The JSON of a recipe with one value replaced, or, with `...`, left out."""
    config = Recipe().to_json()
    *owners, name = path.split(".")
    place = config
    for owner in owners:
        place = place[owner]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.lrr", 1, ["train.lrr is no setting", "did you mean 'lr'"]),
        ("data.colour", 1, ["data.colour is no setting", "there are name, root"]),
        ("modl", {}, ["modl is no setting", "'model'"]),
        ("train.lr", ..., ["train.lr is missing"]),
        ("model", ..., ["model is missing"]),
        ("model.kind", "transformer", ["model.kind must be one of deep, dense", "'transformer'"]),
        ("model.kind", ["deep"], ["model.kind must be one of"]),
        ("model", "deep", ["model.kind must be one of", "None"]),
        ("data", [], ["data must be an object with the fields name", "[]"]),
        ("train.lr", "fast", ["train.lr must be a number", "'fast'"]),
        ("train.epochs", 2.0, ["train.epochs must be an integer", "2.0"]),
        ("train.epochs", True, ["train.epochs must be an integer", "True"]),
        ("train.flip", 1, ["train.flip must be true or false", "1"]),
        ("train.optimizer", "lion", ["train.optimizer must be one of 'sgd', 'adam', 'adamw', 'muon'", "'lion'"]),
        ("train.lr", -1.0, ["train: The 'lr' parameter of TrainConfig must be", "-1.0"]),
        ("model.hidden", [4, "8"], ["model.hidden must be a list of integers", "[4, '8']"]),
        ("model.norm", "layer", ["model.norm must be one of 'batch', 'group' or null", "'layer'"]),
        ("model.solve.rtol", "1e-3", ["model.solve.rtol must be a number or null", "'1e-3'"]),
        ("data.size", [8], ["data.size must be an integer or a list of 2 integers or null", "[8]"]),
        ("data.name", None, ["data.name must be a text", "None"]),
        ("train.lr", 10**400, ["train.lr must be a number", "1000", "..."]),
        ("train.lr", -(10**400), ["train.lr must be a number"]),
        ("data.limit", 0, ["data: The 'limit' parameter of Data must be an integer >= 1", "0"]),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line_that_names_the_place(path, value, words):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_json(changed(path, value))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_whole_number_is_a_number():
    found = Recipe.from_json(changed("train.lr", 1)).train.lr
    assert found == 1
    assert type(found) is float


def test_a_configuration_is_an_object():
    with pytest.raises(RecipeError, match="must be an object with data, model and train"):
        Recipe.from_json([])


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[1]", "must be an object")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(RecipeError, match=words) as caught:
        Recipe.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(RecipeError, match=r"is a folder: give a file, such as the config\.json of a run"):
        Recipe.read(tmp_path)


def test_a_file_may_hold_what_runs_and_dry_runs_note_beside_the_settings(tmp_path):
    recipe = Recipe(Data(limit=5), Dense())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**recipe.to_json(), "about": {"anything": 1}, "fingerprint": {}}))
    assert Recipe.read(path) == recipe


# --- names to objects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_takes_the_samples_of_its_data(kind, root):
    recipe = Recipe(data_for(kind, root), replace(KINDS[kind](), **SMALL[kind]))
    assert recipe.kind == kind
    dataset = recipe.data.load()
    model = recipes.build(recipe, dataset)
    output = recipes.probe(recipe, dataset, model)
    maps = (8, 12) if kind in ("segmenter", "fcn") else ()
    assert output.shape == (2, len(dataset.classes), *maps)
    assert output.isfinite().all()
    assert model.training


@pytest.mark.parametrize(
    ("model", "setting", "words", "thousands"),
    [
        (Deep(channels=29, hidden=(16, 32, 64, 64, 128), stride=2, pool=2), "hidden", "stride 2 and pool 2 are", 162),
        (recipes.MonotoneConv(channels=81, pool=8), "channels", "81 with pool 8 are", 172),
        (recipes.Ode(filters=125), "filters", "125, or", 172),
        (recipes.Ode(filters=64, augment=10), "filters", "64 with augment 10, are", 172),
    ],
)
def test_the_networks_of_the_help_have_the_parameters_that_it_says(model, setting, words, thousands):
    part = Split(torch.zeros(2, 3, 32, 32), torch.zeros(2).long())
    network = model.build(Dataset("as cifar10", part, part, tuple("0123456789")))
    assert round(sum(p.numel() for p in network.parameters()) / 1000) == thousands
    help_text = inspect.getsource(type(model)).partition(f"    {setting}: ")[2].split('"""')[1]
    assert words in help_text
    assert f"{thousands}k" in help_text


def traits(model: nn.Module) -> tuple[list, dict]:
    """What tells a network from another: its modules with their settings, and its weights."""
    common = vars(nn.Module())
    parts = [
        (
            name,
            type(part).__name__,
            {key: re.sub("0x[0-9a-f]+", "", repr(value)) for key, value in vars(part).items() if key not in common},
        )
        for name, part in model.named_modules()
    ]
    return parts, {name: (tuple(tensor.shape), float(tensor.double().sum())) for name, tensor in model.state_dict().items()}


OTHERS = {
    "activation": "tanh", "norm": None, "draw": "conv2d", "regularizer": "l2", "regularizer_mode": "prox", "start": "half_normal",
    "method": "rk4", "solve": Solve(solver="picard", max_steps=7, gradient="unrolled"), "kernel_size": 1, "pool": 2, "groups": 4,
    "parameters": 3000,
}  # fmt: skip
NEEDED = {"draw": {"constrained": False}, "regularizer_mode": {"regularizer": "l2"}, "gamma": {"regularizer": "l2"}}


def another(name: str, value: object) -> object:
    """Another value of a setting."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(2 * number for number in value)
    return 2 * value if isinstance(value, int) else value / 2


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(LARGE)))
def test_every_setting_of_a_model_reaches_its_network(kind, root):
    data = data_for(kind, root)
    dataset, first = data.load(), replace(KINDS[kind](), **SMALL[kind])
    names = [field.name for field in fields(first) if (kind, field.name) != ("wide", "learn_alpha")]

    def built(model) -> tuple[list, dict]:
        return traits(recipes.build(Recipe(data, model), dataset))

    for name in names:
        before = replace(first, **{key: value for key, value in NEEDED.get(name, {}).items() if key in names})
        after = replace(before, **{name: another(name, getattr(before, name))})
        assert built(before) == built(before)
        assert built(after) != built(before), name


@pytest.mark.parametrize("kind", ["dense", "wide", "monotone", "gaussian", "scaled-relu"])
def test_on_real_targets_a_dense_model_is_the_readout_of_the_theory(kind):
    data = Data(theory="unit", limit=6, test_limit=4)
    recipe = Recipe(data, replace(KINDS[kind](), **SMALL[kind]))
    dataset = data.load()
    model = recipes.build(recipe, dataset)
    assert isinstance(model, Readout)
    assert recipes.probe(recipe, dataset, model).shape == (2,)
    assert model.a.dtype == torch.float64


def test_the_weights_are_drawn_from_the_seed_alone():
    recipe = Recipe(Data(limit=4, test_limit=4), Dense(), TrainConfig(seed=3))
    dataset = recipe.data.load()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = recipes.build(recipe, dataset).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    again = recipes.build(recipe, dataset).state_dict()
    other = recipes.build(replace(recipe, train=TrainConfig(seed=4)), dataset).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_network_begins_with_the_standardization_of_its_data():
    data = Data(limit=50, test_limit=4)
    dataset = data.load()
    model = recipes.build(Recipe(data, Dense()), dataset)
    x = model.standardize(dataset.train.x)
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    plain = recipes.build(Recipe(replace(data, standardize=False), Dense()), dataset)
    assert isinstance(plain.standardize, nn.Identity)


def test_the_settings_of_a_solve_reach_the_equilibrium():
    data = Data(limit=4, test_limit=4)
    dataset = data.load()

    def layer(**settings) -> Equilibrium:
        return recipes.build(Recipe(data, Dense(solve=Solve(**settings))), dataset).equilibrium

    assert layer().solver is None
    assert layer().stop.rtol == 1e-4
    chosen = layer(solver="newton", rtol=1e-6, max_steps=7)
    assert isinstance(chosen.solver, Newton)
    assert (chosen.stop.rtol, chosen.stop.max_steps) == (1e-6, 7)
    assert layer(max_steps=7).stop.rtol == 1e-4
    kinds = {"implicit": Implicit, "unrolled": Unrolled, "phantom": Phantom, "jacobian-free": JacobianFree}
    for name, kind in kinds.items():
        assert isinstance(layer(gradient=name).gradient, kind)
    assert [layer(gradient=name, steps=9).gradient.steps for name in ("unrolled", "phantom")] == [9, 9]


def test_one_setting_of_a_solve_leaves_the_other_as_it_is():
    """On real targets, where the defaults are those of the readout, too."""
    data = Data(theory="unit", limit=4, test_limit=4)
    dataset = data.load()

    def stop(**settings) -> Stop | None:
        return recipes.build(Recipe(data, Dense(solve=Solve(**settings))), dataset).stop

    assert stop() is None
    assert stop(rtol=1e-6) == Stop(rtol=1e-6, max_steps=2000)
    assert stop(max_steps=7) == Stop(rtol=1e-12, max_steps=7)
    assert Solve(rtol=1e-6).stop() == Stop(rtol=1e-6, max_steps=100)


@pytest.mark.parametrize("mode", ["implicit", "unrolled", "sam"])
def test_a_network_of_a_fixed_depth_is_trained_in_its_own_mode_only(mode):
    with pytest.raises(RecipeError, match=f"train.mode must be 'own' for repeat, whose depth is its own. Got '{mode}'"):
        Recipe(model=recipes.Repeat(), train=TrainConfig(mode=mode))


def test_building_leaves_other_generators_alone(monkeypatch):
    """torch.manual_seed would seed the generators of the GPUs, which are not put back."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    recipe = Recipe(Data(limit=4, test_limit=4), Dense())
    recipes.build(recipe, recipe.data.load())


def test_the_standardization_looks_at_a_bounded_number_of_numbers(monkeypatch):
    data = Data(limit=50, test_limit=4)
    dataset = data.load()
    seen = []
    monkeypatch.setattr("opteq.recipes.inputs.Standardize.of", lambda x: seen.append(len(x)) or nn.Identity())
    for largest in (1, 64 * 10, 64 * 1000):
        monkeypatch.setattr("opteq.recipes.inputs._LARGEST", largest)
        recipes.build(Recipe(data, Dense()), dataset)
    assert seen == [1, 10, 50]


def test_the_layers_of_dense_models_are_composed_or_side_by_side():
    data = Data(limit=4, test_limit=4)
    dataset = data.load()
    deep = recipes.build(Recipe(data, Dense(hidden=(3, 5), learn_alpha=True)), dataset).equilibrium.cell
    wide = recipes.build(Recipe(data, recipes.Wide(hidden=(3, 5))), dataset).equilibrium.cell
    assert isinstance(deep, DeepOptEq)
    assert isinstance(wide, WideOptEq)
    assert [tuple(layer.W.shape) for layer in deep.cells] == [(3, 64), (5, 64)]
    assert all(isinstance(layer.alpha, torch.Tensor) for layer in deep.cells)


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        (Data(theory="unit", limit=4, test_limit=4), Deep(), "deep needs images"),
        (Data(theory="unit", limit=4, test_limit=4), Dense(solve=Solve(gradient="phantom")), "'gradient' .* must be 'implicit'"),
        (Data(limit=4), recipes.Wide(learn_alpha=True), "'learn_alpha' parameter of Wide must be False"),
        (Data(limit=4), recipes.Multiscale(head=(4,)), "2 numbers, one a resolution"),
        (Data(limit=4), Deep(stride=4), "cannot take the samples of digits, of shape \\[1, 8, 8\\]"),
        (Data(limit=4), recipes.Fcn(channels=(4,), hidden=(4,)), r"one whose output is \[batch, classes\]"),
        (Data(limit=4), Deep(activation="rely"), "activation"),
    ],
)
def test_a_model_that_does_not_fit_its_data_says_so(data, model, words):
    recipe = Recipe(data, model)
    dataset = data.load()
    with pytest.raises(ValueError, match=words):
        recipes.probe(recipe, dataset, recipes.build(recipe, dataset))


def test_a_classifier_needs_classes():
    dataset = Data(limit=4).load()
    with pytest.raises(ValueError, match="deep is a classifier; digits has real targets"):
        Deep().build(replace(dataset, classes=()))


# --- data -----------------------------------------------------------------------------------------------------------------------


def test_a_limit_takes_the_same_samples_every_time():
    whole, some = Data().load(), Data(limit=30, test_limit=20).load()
    assert (len(some.train), len(some.test)) == (30, 20)
    assert torch.equal(some.train.x, Data(limit=30).load().train.x)
    rows = (whole.train.x[:, None] == some.train.x[None]).flatten(2).all(2).nonzero()
    assert set(rows[:, 1].tolist()) == set(range(30))  # each is one of the whole
    assert len(some.train.y.unique()) > 5  # of all classes
    assert len(Data(limit=10**6).load().train) == len(whole.train)


def test_some_classes_are_relabelled_in_their_order():
    whole, some = Data().load(), Data(classes=(7, 3)).load()
    assert some.classes == ("7", "3")
    for new, old in enumerate((7, 3)):
        assert torch.equal(some.train.x[some.train.y == new], whole.train.x[whole.train.y == old])
    assert set(some.test.y.tolist()) == {0, 1}


def test_the_classes_of_a_validation_part_are_chosen_too(monkeypatch):
    whole = Data().load()
    monkeypatch.setattr("opteq.recipes.data.load", lambda *given, **options: replace(whole, valid=whole.test))
    found = Data(classes=(7, 3), test_limit=20).load()
    assert torch.equal(found.valid.x, found.test.x)
    assert set(found.valid.y.tolist()) == {0, 1}


@pytest.mark.parametrize("classes", [(1, 1), (3,), (4, 10), (-1, 2)])
def test_classes_must_be_labels_of_the_data(classes):
    with pytest.raises(ValueError, match=r"two or more different labels in 0\.\.9 for digits"):
        Data(classes=classes).load()


def test_classes_of_pixels_cannot_be_chosen(root):
    with pytest.raises(ValueError, match="'classes' parameter of Data must be left out for camvid"):
        Data("camvid", root=root, classes=(0, 1)).load()


def test_the_validation_part_is_kept_and_limited(root):
    found = Data("camvid", root=root, test_limit=1).load()
    assert (len(found.train), len(found.valid), len(found.test)) == (2, 1, 1)
    chosen = replace(Data(), classes=(0, 1)).load()
    assert chosen.valid is None


@pytest.mark.parametrize("fits", [True, False])
def test_images_that_are_read_when_needed_stay_so_unless_what_is_left_fits_in_memory(root, fits, monkeypatch):
    data = Data("imagenette64", root=root, size=32, classes=(1, 0), limit=1)
    wanted = data.load()
    monkeypatch.setattr("opteq.data.images.IN_MEMORY", 0)
    whole = Data("imagenette64", root=root, size=32).load()
    assert isinstance(whole.train.x, Images)
    monkeypatch.setattr("opteq.recipes.data.load", lambda *given, **options: whole)
    monkeypatch.setattr("opteq.data.images.IN_MEMORY", 2**30 if fits else 0)
    found = data.load()
    for part, expected in zip(found, wanted, strict=True):
        assert isinstance(part.x, torch.Tensor if fits else Images)
        assert torch.equal(part.x[:], expected.x)
        assert torch.equal(part.y, expected.y)


@pytest.mark.parametrize("settings", [{"solver": "pikard"}, {"gradient": "implict"}])
def test_a_misspelt_way_to_solve_is_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"The '{name}' parameter of Solve must be one of"):
        Solve(**settings)


def test_the_theory_is_about_one_label_a_sample(root):
    with pytest.raises(ValueError, match="'theory' parameter of Data must be 'off' for camvid"):
        Data("camvid", root=root, theory="unit").load()
    with pytest.raises(ValueError, match="'classes' parameter of Data must be left out for sphere"):
        Data("sphere", theory="unit", classes=(0, 1)).load()


def test_the_data_of_the_theory_has_one_norm_and_two_targets():
    unit = Data(theory="unit", classes=(3, 8)).load()
    count = {label: int((Data().load().train.y == label).sum()) for label in (3, 8)}
    assert len(unit.train) == 2 * min(count.values())
    assert torch.linalg.vector_norm(unit.train.x, dim=1).sub(1).abs().max() < 1e-12
    assert unit.train.y.sum() == 0
    assert set(unit.train.y.tolist()) == {-1.0, 1.0}
    rooted = Data(theory="sqrt_d", limit=4, test_limit=2, size=4).load()
    assert rooted.train.x.shape == (4, 16)
    assert torch.linalg.vector_norm(rooted.train.x, dim=1).sub(4).abs().max() < 1e-12
    assert len(Data("sphere", theory="unit", limit=7).load().train) == 7
    sphere = Data("sphere", theory="unit").load()
    assert sphere.train.x.shape == (1000, 1000)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": (1, 2, 3)}, "two labels"),
        ({"size": (4, 4)}, "one number"),
        ({"limit": 7}, "'limit' parameter of Data must be even"),
        ({"test_limit": 7}, "'test_limit' parameter of Data must be even"),
    ],
)
def test_the_data_of_the_theory_is_of_two_classes_and_square(settings, words):
    with pytest.raises(ValueError, match=words):
        Data(theory="unit", **settings).load()


# --- runs -----------------------------------------------------------------------------------------------------------------------

TINY = Recipe(
    Data(limit=24, test_limit=12), Deep(channels=4, hidden=(4,)), TrainConfig(epochs=2, batch_size=12, lr=1e-2, device="cpu")
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, recipes.run(TINY, folder, verbose=False)


def test_a_run_notes_its_settings_its_parameters_and_its_problem(trained):
    folder, result = trained
    assert Recipe.of_run(folder) == TINY
    facts = json.loads((folder / "result.json").read_text())
    parts = facts["parameters"]
    assert parts["total"] == parts["extractor"] + parts["equilibrium"] + parts["head"]
    assert facts["valid_accuracy"] == result.scores["valid_accuracy"]
    text = (folder / "problem.txt").read_text()
    assert text.startswith("minimise")
    assert "||W||^2 <= mu" in text
    stated = Run.read(folder).read_json("problem.json")
    assert (stated["kind"], stated["convex"]) == ("minimisation", True)
    assert text == "\n".join([stated["text"], *(condition["text"] for condition in stated["requirements"])]) + "\n"
    assert all(condition["holds"] == (condition["lhs"] <= condition["rhs"]) for condition in stated["requirements"])
    assert stated["latex"].startswith(r"\min_z")


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (nn.Sequential(nn.Linear(3, 4)), None, ""),
        (Readout(ScaledReLU(3, 4)), "equation", "relu(gamma z A + relu(x W))"),
        (Readout(GaussianDEQ(3, 4)), "equation", "relu(W z + U x)"),
        (Readout(cells.Monotone(3, 4)), "inclusion", "0 in (I - W) z"),
        (Equilibrium(cells.MonotoneConv(1, 2, size=(4, 4))), "inclusion", "0 in (I - W) z"),
        (Equilibrium(cells.Residual(4, 4, groups=2)), "equation", "norm(relu(z + norm("),
        (Equilibrium(cells.OptEq(3, 4, 4)), "minimisation", "minimise over z"),
        (Equilibrium(cells.FunctionCell(lambda z, x: z / 2 + x, (3,))), None, ""),
    ],
)
def test_what_a_network_solves_is_stated_where_it_is_known(model, kind, words, tmp_path):
    found = recipes.statement(model)
    recipes.write_statement(model, tmp_path)
    assert (found is None) == (kind is None) == (not list(tmp_path.iterdir()))
    if found is not None:
        assert found.kind == kind
        assert words in found.text
        assert found.latex


def test_the_problem_may_be_stated_later(tmp_path):
    """Its conditions are norms, and to bound those of many channels takes minutes."""
    recipes.run(replace(TINY, train=replace(TINY.train, epochs=1)), tmp_path / "run", state=False, verbose=False)
    assert not list((tmp_path / "run").glob("problem.*"))
    recipes.write_statement(recipes.load_model(tmp_path / "run")[0], tmp_path / "run")
    assert (tmp_path / "run" / "problem.txt").read_text().startswith("minimise")


def test_a_trained_model_is_loaded_as_it_was_judged(trained):
    folder, result = trained
    model, dataset = recipes.load_model(folder)
    assert not model.training
    with torch.no_grad():
        right = (model(dataset.test.x).argmax(1) == dataset.test.y).double().mean()
    assert float(right) == pytest.approx(result.scores["valid_accuracy"])


def test_the_standardization_of_a_loaded_model_is_that_of_its_weights(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.setattr("opteq.recipes.recipe.standardization", lambda dataset: pytest.fail("computed again"))
    model, dataset = recipes.load_model(folder)
    x = model.standardize(dataset.train.x)
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_damaged_weights_are_told_and_the_last_checkpoint_is_taken(trained, tmp_path):
    folder, _ = trained
    wanted = recipes.load_model(folder)[0].state_dict()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").write_text("garbage")
    with pytest.warns(RunWarning, match="The last checkpoint is taken instead"):
        found = recipes.load_model(copy)[0].state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_one_class_alone_is_refused():
    dataset = Data("digits", limit=20, test_limit=5).load()
    with pytest.raises(ValueError, match="tells classes apart"):
        Deep().build(replace(dataset, classes=("0",)))


def test_a_run_without_a_result_gives_its_last_checkpoint(trained, tmp_path):
    folder, _ = trained
    wanted = recipes.load_model(folder)[0].state_dict()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(RunError, match="neither a trained model nor a checkpoint"):
        recipes.load_model(copy)
    (folder / "checkpoints").rename(copy / "checkpoints")
    try:
        found = recipes.load_model(copy)[0].state_dict()
    finally:
        (copy / "checkpoints").rename(folder / "checkpoints")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_resuming_a_finished_run_changes_nothing(trained):
    folder, result = trained
    free = replace(TINY, train=replace(TINY.train, log_every=3), data=replace(TINY.data, root="elsewhere"))
    again = recipes.run(free, folder, resume=True, verbose=False)
    assert again.scores == result.scores
    assert Recipe.of_run(folder) == TINY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": replace(TINY.train, lr=0.5, seed=1)}, r"train.lr: 0.01 -> 0.5; train.seed: 0 -> 1"),
        ({"data": replace(TINY.data, name="mnist")}, "data.name: 'digits' -> 'mnist'"),
        ({"model": replace(TINY.model, hidden=(5,))}, r"model.hidden: \[4\] -> \[5\]"),
        ({"model": Dense()}, r"\(model.kind: 'deep' -> 'dense'\)"),
        ({"model": replace(TINY.model, solve=Solve(rtol=1e-3))}, "model.solve.rtol: None -> 0.001"),
    ],
)
def test_a_changed_recipe_is_not_resumed_and_the_changes_are_named(trained, changes, words):
    with pytest.raises(RunError, match=words):
        recipes.run(replace(TINY, **changes), trained[0], resume=True)


def test_a_setting_that_is_infinite_is_compared_too(tmp_path):
    """Data that JSON has no number for; nothing else differs."""
    endless = Recipe(TINY.data, recipes.Monotone(m=math.inf), TINY.train)
    with Run.create(tmp_path / "run", endless.to_json()):
        pass
    with pytest.raises(RunError, match=r"\(model.m: inf -> 2.0\)"):
        recipes.run(replace(endless, model=recipes.Monotone(m=2.0)), tmp_path / "run", resume=True)


def test_only_the_first_process_describes_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("opteq.recipes.recipe.World.here", lambda device: World(1, 2, device))
    monkeypatch.setattr("opteq.recipes.recipe.fit", lambda *arguments, **options: "trained by all")
    assert recipes.run(TINY, tmp_path / "run") == "trained by all"
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_not_made_from_a_recipe_cannot_be_loaded(tmp_path):
    with Run.create(tmp_path / "own", {"train": {}}):
        pass
    with pytest.raises(RunError, match="was not made from a recipe"):
        recipes.load_model(tmp_path / "own")
    with Run.create(tmp_path / "odd", {**Recipe().to_json(), "model": {"kind": "odd"}}):
        pass
    with pytest.raises(RunError, match=r"config\.json: model\.kind must be one of"):
        Recipe.of_run(tmp_path / "odd")


def test_the_test_part_is_scored_where_validation_has_its_own(tmp_path):
    write_camvid(tmp_path / "camvid", size=(8, 12))
    write_image(tmp_path / "camvid" / "test" / "frame0.png", random_bytes(7, 8, 12, 3))
    model = recipes.Fcn(channels=(4,), hidden=(4,))
    recipe = Recipe(Data("camvid", root=str(tmp_path)), model, TrainConfig(epochs=1, batch_size=2, device="cpu"))
    recipes.run(recipe, tmp_path / "run", verbose=False)
    facts = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 <= facts["test_miou"] <= 1
    assert facts["test_loss"] != facts["valid_loss"]
    assert not (tmp_path / "run" / "problem.txt").exists()


def test_a_loaded_model_solves_as_it_was_trained(tmp_path):
    """In the mode "sam" the regulariser is in the solver, and no longer in the map."""
    training = TrainConfig(epochs=1, batch_size=12, mode="sam", unroll=3, device="cpu")
    recipe = replace(TINY, model=replace(TINY.model, regularizer="l2"), train=training)
    result = recipes.run(recipe, tmp_path / "run", verbose=False)
    model, dataset = recipes.load_model(tmp_path / "run")
    assert isinstance(model.equilibrium.solver, SAM)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(dataset.test.x), dataset.test.y)
    assert float(loss) == pytest.approx(result.scores["valid_loss"], rel=1e-4)


# --- certificates ---------------------------------------------------------------------------------------------------------------


def test_a_training_under_a_certificate_is_told_in_json():
    data = Data(theory="unit", limit=4, test_limit=4)
    X, y = (dataset := data.load()).train
    start = recipes.build(Recipe(data, ScaledRelu(width=16)), dataset)
    assert isinstance(start.cell, ScaledReLU)
    failing = recipes.certificate_json(certify(start, X, y))
    assert failing["holds"] is False
    assert failing["rate"] is None  # NaN
    assert {c["name"]: c["slack"] for c in failing["conditions"]}["rank"] is None  # infinite
    model = certified_init(start, X, y)
    certificate = certify(model, X, y, sharp=True)
    monitor, violation = recipes.train_certified(model, X, y, certificate, 7)
    told = recipes.certificate_json(certificate, recipes.trained_json(monitor, violation))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["holds"] is True
    assert all(c["holds"] for c in told["conditions"])
    assert told["trained"]["steps"] == 7
    assert told["trained"]["violation"] is None
    assert told["trained"]["loss_last"] <= told["trained"]["bound_last"] < told["trained"]["loss_first"]
    assert math.isclose(told["trained"]["loss_first"], float(y.square().sum()) / 2)  # a = 0
    assert told["explain"] == certificate.explain()
    assert recipes.certificate_json(certificate, {"seen": (1.0, (math.nan,))})["trained"] == {"seen": [1.0, [None]]}


@pytest.mark.parametrize("steps", [1, 7, 100, 101, 120])
def test_the_last_step_of_a_certified_training_is_recorded(steps, monkeypatch):
    asked = []

    class Stopped(Exception):
        pass

    def monitor(*arguments, every, kernel):
        asked.append(every)
        raise Stopped

    monkeypatch.setattr("opteq.recipes.certified.Monitor", monitor)
    with pytest.raises(Stopped):
        recipes.train_certified(None, None, None, None, steps)
    assert steps % asked[0] == 0
    assert asked[0] <= max(1, steps // 50)


def test_a_broken_promise_is_told():
    """The same training with a step that is too large."""
    data = Data(theory="unit", limit=4, test_limit=4)
    X, y = (dataset := data.load()).train
    model = certified_init(recipes.build(Recipe(data, ScaledRelu(width=16)), dataset), X, y)
    certificate = certify(model, X, y, sharp=True)
    boastful = replace(certificate, decay=0.9 / certificate.max_step)
    monitor, violation = recipes.train_certified(model, X, y, boastful, 3)
    told = recipes.trained_json(monitor, violation)
    assert "loss <=" in told["violation"]


def test_a_sample_is_of_the_part_that_is_asked_for_and_always_the_same():
    digits = Data().load()
    for split in (digits.train, digits.test):
        x, y = recipes.sample(split, 5)
        assert torch.equal(x, recipes.sample(split, 5)[0])
        assert not torch.equal(x, recipes.sample(split, 5, seed=1)[0])
        assert all(any(torch.equal(one, other) for other in split.x) for one in x)
        assert len(y) == 5
