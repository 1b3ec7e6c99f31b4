"""Data sets from the user's own files, what the papers do to them, and augmentation: `train, test = load("digits")`."""

from opteq.data.augment import Augment
from opteq.data.catalog import Description, describe, load, names
from opteq.data.images import Images
from opteq.data.made import sphere
from opteq.data.prepare import flat, grey, norm_sqrt_d, resize, theory_split, two_classes, unit_norm
from opteq.data.splits import Dataset, Split, check_split

__all__ = [
    "Augment",
    "Dataset",
    "Description",
    "Images",
    "Split",
    "check_split",
    "describe",
    "flat",
    "grey",
    "load",
    "names",
    "norm_sqrt_d",
    "resize",
    "sphere",
    "theory_split",
    "two_classes",
    "unit_norm",
]
