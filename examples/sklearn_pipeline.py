"""An equilibrium network as an estimator of scikit-learn: in a pipeline, in a search, beside a baseline.

A pipeline of PCA and `EquilibriumClassifier` learns the digits; a grid search with cross-validation chooses the number of
components and the width of the equilibrium. The winner is scored on digits that no part of the search has seen, beside logistic
regression, then saved without pickle and loaded again.

    python examples/sklearn_pipeline.py            # about 18 s on one core
    python examples/sklearn_pipeline.py --quick
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from opteq.estimators import EquilibriumClassifier


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and epochs, a smaller grid")
    quick = parser.parse_args(arguments).quick
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=360, train_size=400 if quick else None, stratify=y, random_state=0)

    network = EquilibriumClassifier(max_iter=10 if quick else 20, learning_rate=1e-2, random_state=0)
    pipeline = make_pipeline(PCA(random_state=0), network)
    grid = {"pca__n_components": [8, 16], "equilibriumclassifier__width": [32] if quick else [32, 64]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    for parameters, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        print(f"{parameters}: {score:.1%} in cross-validation")
    score = search.score(X_test, y_test)
    baseline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(X, y).score(X_test, y_test)
    print(f"{score:.1%} of {len(y_test)} test digits are right; {baseline:.1%} with logistic regression.")

    reduce, classifier = search.best_estimator_
    with TemporaryDirectory() as folder:
        classifier.save(Path(folder) / "digits.safetensors")
        again = EquilibriumClassifier.load(Path(folder) / "digits.safetensors")
    same = float((again.predict(reduce.transform(X_test)) == search.predict(X_test)).mean())
    print(f"Saved and loaded again: {same:.0%} of the answers are the same.")
    return {"score": score, "baseline": baseline, "same": same}


if __name__ == "__main__":
    main()
