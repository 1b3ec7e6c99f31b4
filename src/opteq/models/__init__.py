"""Whole networks with an equilibrium inside, and those that they are compared with."""

from opteq.models.baselines import FCN, FeedForward, Repeated, fit_widths
from opteq.models.classifier import Classifier, Segmenter, count_parameters, without_equilibrium
from opteq.models.imagenet import mdeq_small, opteq_mid, opteq_small
from opteq.models.ode import ConvField, NeuralODE
from opteq.models.parts import Pooled, Scores, Standardize, Stem, Strided
from opteq.models.readout import Readout
from opteq.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101, wide_resnet50
from opteq.models.zoo import deep_opteq, feed_forward, monotone_conv, neural_ode, opteq_segmenter, residual_deq

__all__ = [
    "FCN",
    "Classifier",
    "ConvField",
    "FeedForward",
    "NeuralODE",
    "Pooled",
    "Readout",
    "Repeated",
    "ResNet",
    "Scores",
    "Segmenter",
    "Standardize",
    "Stem",
    "Strided",
    "count_parameters",
    "deep_opteq",
    "feed_forward",
    "fit_widths",
    "mdeq_small",
    "monotone_conv",
    "neural_ode",
    "opteq_mid",
    "opteq_segmenter",
    "opteq_small",
    "residual_deq",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "wide_resnet50",
    "without_equilibrium",
]
