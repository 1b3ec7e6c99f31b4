"""Estimators as files: safetensors, with JSON in the header and a digest of everything. Reading one runs nothing that is in it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opteq.checks import invalid
from opteq.estimators.network import Architecture, Arrays, exact_network
from opteq.estimators.settings import plain
from opteq.runs import write_atomic

FORMAT, VERSION = "opteq estimator", 1


@dataclass(frozen=True)
class Saved:
    """What a file holds."""

    parameters: dict[str, Any]
    attributes: dict[str, Any]
    weights: Arrays


def write(path: Path, kind: str, parameters: Mapping[str, Any], attributes: Mapping[str, Any], weights: Arrays) -> None:
    """Replace the file by one with this estimator, as a whole."""
    body = {
        "version": VERSION,
        "estimator": kind,
        "parameters": {name: _encoded(kind, name, plain(value)) for name, value in parameters.items()},
        "attributes": {name: _encoded(kind, name, value) for name, value in attributes.items()},
    }
    text = json.dumps(body, sort_keys=True)
    sealed = json.dumps({"sha256": _digest(text, weights), "body": text})
    write_atomic(path, _safetensors().save(weights, metadata={FORMAT: sealed}))


def read(path: Path, kind: str, parameters: Mapping[str, Any], attributes: tuple[str, ...]) -> Saved:
    """The estimator of this kind in a file. `parameters`, `attributes`: the names that there must be."""
    content = path.read_bytes()
    text, weights = _opened(path, content)
    body = json.loads(text)
    if body["version"] != VERSION:
        raise ValueError(f"{path} has version {body['version']!r} of the format: use the opteq that wrote it.")
    if body["estimator"] != kind:
        raise ValueError(f"{path} holds an {body['estimator']}, not an {kind}: use {body['estimator']}.load.")
    try:
        found = Saved(body["parameters"], {name: _decoded(name, value) for name, value in body["attributes"].items()}, weights)
        _check(found, set(parameters), set(attributes))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} is corrupted ({error}): save the estimator again.") from error
    return found


def _opened(path: Path, content: bytes) -> tuple[str, Arrays]:
    """The JSON and the arrays of a file, if they are those that were written."""
    library = _safetensors()
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        sealed = json.loads(header["__metadata__"][FORMAT])
        text, weights = str(sealed["body"]), dict(library.load(content))
        sound = sealed["sha256"] == _digest(text, weights)
    except Exception as error:  # whatever JSON and safetensors say of bytes that are not theirs
        known = FORMAT.encode() in content
        what = "truncated or corrupted: save the estimator again" if known else "foreign: give a file written by save"
        raise ValueError(f"{path} is {what}.") from error
    if not sound:
        raise ValueError(f"{path} is corrupted (its digest differs): save the estimator again.")
    return text, weights


def _check(saved: Saved, parameters: set[str], attributes: set[str]) -> None:
    """Raise unless the names are those of the estimator, and the weights those of its network."""
    if saved.parameters.keys() != parameters:
        raise ValueError(f"other parameters: {', '.join(sorted(saved.parameters.keys() ^ parameters))}")
    if saved.attributes.keys() - {"feature_names_in_"} != attributes:
        raise ValueError(f"other attributes: {', '.join(sorted(saved.attributes.keys() ^ attributes))}")
    architecture = Architecture(**saved.attributes["architecture_"])
    sizes = (saved.attributes["n_features_in_"], len(saved.attributes.get("classes_", range(architecture.outputs))))
    if sizes != (architecture.inputs, architecture.outputs):
        raise ValueError("features or classes that are not those of the network")
    exact_network(architecture, saved.weights)


def _encoded(kind: str, name: str, value: Any) -> Any:
    """A parameter or an attribute as JSON."""
    if isinstance(value, np.ndarray):
        value = {"dtype": value.dtype.str, "values": value.tolist()}
    try:
        json.dumps(value)
    except TypeError as error:
        raise TypeError(invalid(kind, name, "plain (None, bool, int, float, str) to be saved", value)) from error
    return value


def _decoded(name: str, value: Any) -> Any:
    if name not in ("classes_", "feature_names_in_"):
        return value
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufUO" or not all(isinstance(item, (str, int, float)) for item in value["values"]):
        raise ValueError(f"{name} of {dtype}")
    return np.array(value["values"], dtype)


def _digest(text: str, weights: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("Files of estimators need the package safetensors: pip install 'opteq[train]'.") from error
    return safetensors.numpy
