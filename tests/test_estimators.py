"""Estimators: scikit-learn's contract, its tools, and files that run nothing."""

import importlib
import json
import pickle
import random
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from scipy import sparse
from scipy.special import softmax
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning, DataConversionWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from skops import io as skops

from conformance import write_verify
from opteq import training
from opteq.estimators import EquilibriumClassifier, EquilibriumRegressor
from opteq.estimators.settings import Settings

QUICK = {"width": 16, "learning_rate": 0.05, "batch_size": 300, "random_state": 0}
SMALL = {**QUICK, "max_iter": 5}
ROOT = Path(__file__).parent.parent


def small_classifier(**settings):
    return EquilibriumClassifier(**{**SMALL, **settings})


def small_regressor(**settings):
    return EquilibriumRegressor(**{**SMALL, **settings})


@pytest.fixture(scope="module")
def labelled():
    X, y = make_classification(60, 5, n_informative=4, n_redundant=0, n_classes=3, n_clusters_per_class=1, random_state=0)
    return X, np.array(["ant", "bee", "wasp"])[y]


@pytest.fixture(scope="module")
def measured():
    X, y = make_regression(60, 4, n_targets=2, noise=1.0, random_state=0)
    return X, 1e3 * y + 5e4


@pytest.fixture(scope="module")
def classifier(labelled):
    return small_classifier().fit(*labelled)


@pytest.fixture(scope="module")
def regressor(measured):
    return small_regressor().fit(*measured)


# ---------------------------------------------------------------- scikit-learn's own checks


@parametrize_with_checks([EquilibriumClassifier(max_iter=8, **QUICK), EquilibriumRegressor(max_iter=12, **QUICK)])
def test_scikit_learn_accepts(estimator, check):
    check(estimator)


VARIANTS = {
    "defaults": {},
    "monotone": {**QUICK, "cell": "monotone", "max_iter": 12},
    "deep": {**QUICK, "layers": 2, "max_iter": 12},
}


@pytest.mark.verify
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [EquilibriumClassifier, EquilibriumRegressor])
def test_scikit_learn_accepts_the_defaults_and_other_cells(kind, variant):
    found = check_estimator(kind(**VARIANTS[variant]), on_skip=None)
    skipped = sorted({f"{row['check_name']}: {row['exception']}" for row in found if row["status"] == "skipped"})
    assert all(row["status"] in ("passed", "skipped") for row in found)
    write_verify(f"estimators_{kind.__name__}_{variant}", {"checks": len(found), "skipped": skipped})


@pytest.mark.verify
def test_the_defaults_reach_96_percent_on_digits():
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0, stratify=y)
    accuracies = [EquilibriumClassifier(random_state=seed).fit(X, y).score(X_test, y_test) for seed in range(3)]
    write_verify("estimators_digits", {"accuracies": accuracies})
    assert min(accuracies) >= 0.96


# ---------------------------------------------------------------- what is predicted


def test_a_pattern_is_learned(labelled, measured):
    assert small_classifier(max_iter=15).fit(*labelled).score(*labelled) > 0.85
    assert small_regressor(max_iter=15).fit(*measured).score(*measured) > 0.85


@pytest.mark.parametrize("settings", [{"cell": "monotone"}, {"layers": 2, "alpha": 0.7, "hidden": 6, "activation": "tanh"}])
def test_other_cells_learn_and_come_back(labelled, tmp_path, settings):
    estimator = small_classifier(max_iter=15, **settings).fit(*labelled)
    assert estimator.score(*labelled) > 0.7
    estimator.save(tmp_path / "estimator")
    again = EquilibriumClassifier.load(tmp_path / "estimator")
    np.testing.assert_array_equal(again.decision_function(labelled[0]), estimator.decision_function(labelled[0]))


def test_predictions_are_the_networks_equilibria(classifier, labelled):
    """By plain iteration of z = W' relu(W z + U x + b) in NumPy."""
    weights, X = classifier.weights_, labelled[0]
    W, U, b = (weights[f"equilibrium.cell.{name}"] for name in ("parametrizations.W.original", "U", "b"))
    W = W * min(1.0, np.sqrt(0.8) / np.linalg.norm(W, 2))
    x = (X - X.mean(0)) / X.std(0)
    z = np.zeros((len(X), 16))
    for _ in range(50_000):
        z, before = np.maximum(z @ W.T + x @ U.T + b, 0) @ W, z
        if np.abs(z - before).max() < 1e-14:
            break
    logits = z @ weights["head.weight"].T + weights["head.bias"]
    np.testing.assert_allclose(classifier.decision_function(X), logits, atol=1e-7)
    np.testing.assert_allclose(classifier.predict_proba(X), softmax(logits, 1), atol=1e-7)
    np.testing.assert_allclose(classifier.predict_log_proba(X), np.log(softmax(logits, 1)), atol=1e-6)
    np.testing.assert_array_equal(classifier.predict(X), classifier.classes_[logits.argmax(1)])


def test_the_network_takes_raw_samples(classifier, regressor, labelled, measured):
    for estimator, X, method in ((classifier, labelled[0], "decision_function"), (regressor, measured[0], "predict")):
        output = estimator.network()(torch.from_numpy(X)).numpy()
        np.testing.assert_allclose(output, getattr(estimator, method)(X), rtol=1e-7, atol=1e-7)


def test_two_classes_have_one_decision(labelled):
    X, y = labelled
    X, y = X[y != "wasp"], y[y != "wasp"]
    estimator = small_classifier().fit(X, y)
    decision, probability = estimator.decision_function(X), estimator.predict_proba(X)
    assert decision.shape == (len(X),)
    np.testing.assert_allclose(probability[:, 1], 1 / (1 + np.exp(-decision)))
    np.testing.assert_array_equal(estimator.predict(X), np.where(decision > 0, "bee", "ant"))


def test_a_prediction_does_not_depend_on_its_batch_mates(classifier, labelled):
    X = np.tile(labelled[0], (10, 1))  # more than one chunk
    alone = np.concatenate([classifier.decision_function(row[None]) for row in X[:5]])
    np.testing.assert_allclose(classifier.decision_function(X)[300:305], alone, atol=1e-8)


def test_targets_keep_their_shape_and_scale(measured):
    X, y = measured
    assert small_regressor().fit(X, y).predict(X).shape == (60, 2)
    assert small_regressor().fit(X, y[:, :1]).predict(X).shape == (60, 1)
    assert small_regressor().fit(X, y[:, 0]).predict(X).shape == (60,)
    first, other = small_regressor().fit(X, y), small_regressor().fit(X, y / 1e6)
    np.testing.assert_allclose(other.predict(X) * 1e6, first.predict(X), rtol=1e-5, atol=1e-2)


def test_features_of_any_scale_are_learned(labelled):
    X, y = labelled
    moved = X * np.array([1e6, 1e-6, 1, 1e3, 1]) + np.array([0, 5e-3, 1e5, 0, 0])
    first, other = small_classifier().fit(X, y), small_classifier().fit(moved, y)
    np.testing.assert_allclose(other.predict_proba(moved), first.predict_proba(X), atol=1e-2)


def test_features_may_be_left_as_they_are(labelled):
    estimator = small_classifier(standardize=False).fit(*labelled)
    assert not estimator.weights_["standardize.mean"].any()
    np.testing.assert_array_equal(estimator.weights_["standardize.std"], np.ones(5))


# ---------------------------------------------------------------- how it is trained


def test_single_precision_is_trained_in_single_precision(labelled):
    X, y = labelled
    estimator = small_classifier().fit(X.astype(np.float32), y)
    assert all(array.dtype == np.float32 for array in estimator.weights_.values())
    assert small_classifier().fit(X, y).weights_["head.weight"].dtype == np.float64
    assert estimator.predict_proba(X.astype(np.float32)).dtype == np.float64


def test_the_same_seed_gives_the_same_weights_and_touches_no_global_state(labelled):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    first, second, other = (small_classifier(random_state=seed).fit(*labelled) for seed in (3, 3, 4))
    first.predict(labelled[0])
    assert states() == before
    assert all(np.array_equal(first.weights_[name], second.weights_[name]) for name in first.weights_)
    assert not np.array_equal(first.weights_["head.weight"], other.weights_["head.weight"])


def test_without_a_seed_numpys_decides(labelled):
    drawn = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        drawn.append(small_classifier(random_state=None, max_iter=1).fit(*labelled).weights_["head.weight"])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_the_training_is_told(classifier):
    assert classifier.n_iter_ == len(classifier.loss_curve_) == 5
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0]
    assert classifier.converged_ == 1.0
    assert classifier.validation_scores_ is None


def test_early_stopping_ends_the_training(labelled, measured):
    """There is nothing to learn: the first scores are never beaten for long."""
    X, y = labelled
    shuffled = np.random.default_rng(0).permutation(y)
    estimator = small_classifier(max_iter=60, early_stopping=True, n_iter_no_change=2, validation_fraction=0.3).fit(X, shuffled)
    assert estimator.n_iter_ < 60
    assert len(estimator.validation_scores_) == estimator.n_iter_
    assert all(0 <= score <= 1 for score in estimator.validation_scores_)
    best = small_regressor(max_iter=3, early_stopping=True).fit(*measured)
    assert all(score <= 0 for score in best.validation_scores_)


def test_verbose_shows_the_progress(labelled, capsys):
    small_classifier(max_iter=2).fit(*labelled)
    assert capsys.readouterr() == ("", "")
    small_classifier(max_iter=2, verbose=1).fit(*labelled)
    assert "epoch 2" in capsys.readouterr().err


def test_equilibria_that_are_not_found_are_told(labelled):
    """With W far outside of the ball, where no equilibrium need exist."""
    estimator = small_classifier(constrained=False, max_iter=1).fit(*labelled)
    estimator.weights_["equilibrium.cell.W"] = 50.0 * np.abs(estimator.weights_["equilibrium.cell.W"])
    with pytest.warns(ConvergenceWarning, match=r"the equilibria of \d+ of 60 samples were not found: \(a\) keep constrained=True"):
        estimator.predict(labelled[0])


def test_a_training_whose_equilibria_did_not_all_converge_is_told(labelled, monkeypatch):
    def trained(*given, **named):
        result = training.fit(*given, **named)
        return replace(result, history=[{**row, "converged": 0.75} for row in result.history])

    monkeypatch.setattr("opteq.estimators.base.fit", trained)
    with pytest.warns(ConvergenceWarning, match=r"25\.00% of the equilibria of the last epoch did not converge to rtol=0\.001"):
        estimator = small_classifier(max_iter=1).fit(*labelled)
    assert estimator.converged_ == 0.75


def test_a_training_that_goes_wrong_is_an_error(labelled):
    with pytest.raises(training.DivergenceError, match="0% of the samples converged in layer 'equilibrium'"):
        small_classifier(constrained=False, learning_rate=100.0).fit(*labelled)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("cell", "convex", ValueError),
        ("optimizer", "lbfgs", ValueError),
        ("width", 0, ValueError),
        ("width", 3.0, TypeError),
        ("hidden", 0, ValueError),
        ("layers", True, TypeError),
        ("max_iter", 0, ValueError),
        ("batch_size", "all", TypeError),
        ("n_iter_no_change", 0, ValueError),
        ("constrained", "yes", TypeError),
        ("standardize", None, TypeError),
        ("early_stopping", 1, TypeError),
        ("activation", 3, TypeError),
        ("alpha", 0.0, ValueError),
        ("learning_rate", -1.0, ValueError),
        ("weight_decay", -1.0, ValueError),
        ("rtol", 1.0, ValueError),
        ("validation_fraction", 1.0, ValueError),
        ("device", 0, TypeError),
        ("device", "toaster", ValueError),
    ],
)
def test_a_parameter_that_is_wrong_is_named_when_it_is_fitted(labelled, name, value, error):
    estimator = EquilibriumClassifier(**{name: value})
    with pytest.raises(error, match=f"The '{name}' parameter of EquilibriumClassifier must be"):
        estimator.fit(*labelled)


def test_an_unknown_activation_is_refused_by_its_layer(labelled):
    with pytest.raises(ValueError, match="The 'activation' parameter of OptEq must be one of 'relu'"):
        small_classifier(activation="swish").fit(*labelled)


def test_a_batch_is_a_tenth_of_the_samples_from_16_to_200():
    estimator = EquilibriumClassifier()
    assert [Settings.of(estimator, samples).batch_size for samples in (20, 500, 5000)] == [16, 50, 200]
    assert Settings.of(estimator.set_params(batch_size=7), 5000).batch_size == 7


@pytest.mark.parametrize(("cell", "rtol"), [("opteq", 0.5e-10), ("monotone", 1e-10)])
def test_predictions_are_solved_to_1e_10_of_the_layer_without_its_skip_connection(labelled, cell, rtol):
    estimator = small_classifier(max_iter=1, cell=cell, alpha=0.5).fit(*labelled)
    assert estimator.network().equilibrium.stop.rtol == rtol


def test_numbers_of_numpy_are_numbers(labelled):
    estimator = small_classifier(width=np.int64(4), alpha=np.float32(0.5), constrained=np.bool_(True)).fit(*labelled)
    assert type(estimator.architecture_["width"]) is int


def test_data_that_cannot_be_used_are_refused(labelled, classifier):
    X, y = labelled
    with pytest.raises(ValueError, match=r"at least 2 classes\. Got 1 class"):
        small_classifier().fit(X, ["ant"] * 60)
    with pytest.raises(TypeError, match="Sparse data was passed"):
        small_classifier().fit(sparse.csr_array(X), y)
    with pytest.raises(ValueError, match="contains NaN"):
        classifier.predict(np.full((1, 5), np.nan))
    with pytest.raises(ValueError, match="X has 4 features, but EquilibriumClassifier is expecting 5"):
        classifier.predict(X[:, :4])
    with pytest.raises(ValueError, match="Unknown label type"):
        small_classifier().fit(X, X[:, 0])
    with pytest.raises(ValueError, match="The 'X' parameter of EquilibriumClassifier must be of numbers whose squares"):
        small_classifier().fit(X * 1e300, y)
    with pytest.raises(ValueError, match="The 'y' parameter of EquilibriumRegressor must be of numbers whose squares"):
        small_regressor().fit(X, X[:, 0] * 1e300)
    with pytest.raises(NotFittedError):
        EquilibriumRegressor().network()
    with pytest.raises(TypeError, match="sample_weight"):
        small_classifier().fit(X, y, sample_weight=np.ones(60))
    with pytest.warns(DataConversionWarning, match="column-vector"):
        small_classifier(max_iter=1).fit(X, y[:, None])


# ---------------------------------------------------------------- scikit-learn's tools


def test_tags_say_what_is_supported():
    tags = get_tags(EquilibriumClassifier())
    assert (tags.estimator_type, tags.input_tags.sparse, tags.classifier_tags.multi_label) == ("classifier", False, False)
    assert get_tags(EquilibriumRegressor()).target_tags.multi_output


def test_a_pipeline_is_searched_by_two_processes(labelled):
    pipeline = make_pipeline(StandardScaler(), small_classifier(standardize=False, max_iter=2))
    grid = {"equilibriumclassifier__width": [4, 8]}
    found = GridSearchCV(pipeline, grid, cv=2, n_jobs=2, error_score="raise").fit(*labelled)
    alone = clone(pipeline).set_params(**found.best_params_).fit(*labelled)
    np.testing.assert_allclose(found.predict_proba(labelled[0]), alone.predict_proba(labelled[0]), atol=1e-6)


def test_it_is_cloned_and_cross_validated(classifier, regressor, measured):
    copy = clone(classifier)
    assert copy.get_params() == classifier.get_params()
    assert not hasattr(copy, "weights_")
    scores = cross_val_score(regressor, *measured, cv=2)
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()


def test_parameters_set_after_a_fit_leave_predictions_as_they_are(labelled):
    estimator = small_classifier().fit(*labelled)
    before = estimator.predict_proba(labelled[0])
    estimator.set_params(width=3, layers=2, activation="tanh", cell="monotone")
    np.testing.assert_array_equal(estimator.predict_proba(labelled[0]), before)


class Table(np.ndarray):
    """An array with names of its columns: what scikit-learn sees in a data frame."""


def table(X, names):
    found = np.array(X).view(Table)
    found.names = np.array(names, dtype=object)
    return found


@pytest.fixture
def frames(monkeypatch):
    """Let scikit-learn take a Table for a data frame: pandas is no dependency."""
    monkeypatch.setattr("sklearn.utils.validation._get_feature_names", lambda X: getattr(X, "names", None))


def test_features_are_known_by_their_names(labelled, tmp_path, frames):
    X, y = labelled
    estimator = small_classifier(max_iter=1).fit(table(X, list("abcde")), y)
    estimator.save(tmp_path / "file")
    for known in (estimator, EquilibriumClassifier.load(tmp_path / "file")):
        assert known.feature_names_in_.tolist() == list("abcde")
        assert known.feature_names_in_.dtype == object
        known.predict(table(X, list("abcde")))
        with pytest.raises(ValueError, match="feature names should match"):
            known.predict(table(X, list("badce")))
        with pytest.warns(UserWarning, match="X does not have valid feature names"):
            known.predict(X)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_a_saved_estimator_comes_back_whole(name, request, tmp_path):
    estimator = request.getfixturevalue(name)
    X = request.getfixturevalue("labelled" if name == "classifier" else "measured")[0]
    estimator.save(tmp_path / "estimator.safetensors")
    again = type(estimator).load(str(tmp_path / "estimator.safetensors"))
    assert again.__dict__.keys() == estimator.__dict__.keys()
    assert again.get_params() == estimator.get_params()
    np.testing.assert_array_equal(again.predict(X), estimator.predict(X))
    assert [path.name for path in tmp_path.iterdir()] == ["estimator.safetensors"]


LABELS = [np.array([-7, 2**60]), np.array([False, True]), np.array([1.0, 2.0]), np.array(["é", "b"]), np.array(["a", "b"], object)]


@pytest.mark.parametrize("classes", LABELS, ids=lambda classes: classes.dtype.str)
def test_classes_come_back_as_they_were(classes, tmp_path):
    estimator = small_classifier(max_iter=1).fit(np.linspace(-1, 1, 12).reshape(6, 2), np.tile(classes, 3))
    estimator.save(tmp_path / "file")
    again = EquilibriumClassifier.load(tmp_path / "file")
    assert again.classes_.dtype == estimator.classes_.dtype
    np.testing.assert_array_equal(again.classes_, estimator.classes_)


def rewritten(path, change):
    """The file with a change made to its JSON, and a digest that fits: what only someone who means it can write."""
    from opteq.estimators.saving import FORMAT, _digest

    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    weights = safetensors.numpy.load(content)
    body = json.loads(json.loads(json.loads(content[8 : 8 + size])["__metadata__"][FORMAT])["body"])
    change(body, weights)
    text = json.dumps(body)
    sealed = json.dumps({"sha256": _digest(text, weights), "body": text})
    path.write_bytes(safetensors.numpy.save(weights, metadata={FORMAT: sealed}))


CHANGES = {
    "has version 9": lambda body, weights: body.update(version=9),
    "other parameters: spell": lambda body, weights: body["parameters"].update(spell=1),
    "other attributes: predict": lambda body, weights: body["attributes"].update(predict=1),
    "other attributes: n_iter_": lambda body, weights: body["attributes"].pop("n_iter_"),
    "features or classes": lambda body, weights: body["attributes"].update(n_features_in_=7),
    "classes_ of ": lambda body, weights: body["attributes"].update(classes_={"dtype": "M8[s]", "values": [1, 2, 3]}),
    "size mismatch": lambda body, weights: weights.update({"head.bias": np.zeros(9)}),
    "Unexpected key": lambda body, weights: weights.update(more=np.zeros(9)),
    "width": lambda body, weights: body["attributes"]["architecture_"].pop("width"),
    "corrupted": lambda body, weights: body.pop("attributes"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_file_with_other_content_is_refused(classifier, tmp_path, message):
    classifier.save(tmp_path / "file")
    rewritten(tmp_path / "file", CHANGES[message])
    with pytest.raises(ValueError, match=re.escape(message)):
        EquilibriumClassifier.load(tmp_path / "file")


def test_a_damaged_file_is_refused(classifier, tmp_path):
    path = tmp_path / "file"
    classifier.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 40):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match=r"file is (truncated or corrupted|corrupted|foreign)"):
            EquilibriumClassifier.load(path)
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"file is (truncated or corrupted|foreign)"):
            EquilibriumClassifier.load(path)


def test_a_foreign_file_is_refused_and_not_run(classifier, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    for content in (pickle.dumps(Bomb()), b"", b"{}", safetensors.numpy.save({"x": np.zeros(2)})):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="file is foreign: give a file written by save"):
            EquilibriumClassifier.load(tmp_path / "file")
    assert not (tmp_path / "exploded").exists()
    classifier.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"not an EquilibriumRegressor: use EquilibriumClassifier\.load"):
        EquilibriumRegressor.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        EquilibriumClassifier.load(tmp_path / "none")


def test_what_is_not_plain_is_not_saved(labelled, tmp_path):
    estimator = small_classifier(max_iter=1, random_state=np.random.RandomState(0)).fit(*labelled)
    with pytest.raises(TypeError, match="The 'random_state' parameter of EquilibriumClassifier must be plain"):
        estimator.save(tmp_path / "file")
    with pytest.raises(NotFittedError):
        EquilibriumClassifier().save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_skops_needs_to_trust_nothing_but_the_estimator(name, request):
    estimator = request.getfixturevalue(name)
    X = request.getfixturevalue("labelled" if name == "classifier" else "measured")[0]
    content = skops.dumps(make_pipeline(StandardScaler().fit(X), estimator))
    trusted = f"opteq.estimators.{name}.{type(estimator).__name__}"
    assert skops.get_untrusted_types(data=content) == [trusted]
    again = skops.loads(content, trusted=[trusted])[-1]
    np.testing.assert_array_equal(again.predict(X), estimator.predict(X))


def test_a_missing_package_is_named(monkeypatch):
    from opteq import estimators
    from opteq.estimators import saving

    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"safetensors: pip install 'opteq\[train\]'"):
        saving._safetensors()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install 'opteq\[train\]'"):
        importlib.reload(estimators)
