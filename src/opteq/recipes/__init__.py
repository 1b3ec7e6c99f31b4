"""Trainings as settings: names of data sets and models become objects here, and only here."""

from opteq.recipes.certified import certificate_json, log_monitor, train_certified, trained_json
from opteq.recipes.data import Data
from opteq.recipes.fields import RecipeError
from opteq.recipes.inputs import sample
from opteq.recipes.kinds import Deep, Dense, Gaussian, Monotone, MonotoneConv, Repeat, Residual, ScaledRelu, Wide
from opteq.recipes.others import Fcn, FeedForward, MdeqSmall, Multiscale, Ode, OpteqMid, OpteqSmall, Segmenter
from opteq.recipes.recipe import KINDS, Model, Recipe, build, load_model, load_stages, probe, run, write_statement
from opteq.recipes.solving import Solve
from opteq.recipes.stating import Statement, statement

__all__ = [
    "KINDS",
    "Data",
    "Deep",
    "Dense",
    "Fcn",
    "FeedForward",
    "Gaussian",
    "MdeqSmall",
    "Model",
    "Monotone",
    "MonotoneConv",
    "Multiscale",
    "Ode",
    "OpteqMid",
    "OpteqSmall",
    "Recipe",
    "RecipeError",
    "Repeat",
    "Residual",
    "ScaledRelu",
    "Segmenter",
    "Solve",
    "Statement",
    "Wide",
    "build",
    "certificate_json",
    "load_model",
    "load_stages",
    "log_monitor",
    "probe",
    "run",
    "sample",
    "statement",
    "train_certified",
    "trained_json",
    "write_statement",
]
