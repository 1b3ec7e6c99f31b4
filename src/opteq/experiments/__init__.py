"""The experiments of the papers, one readable file for each table or figure: `python -m opteq.experiments.NAME`."""

from opteq.experiments._harness import Experiment, Options, Status, load, names, run, status
from opteq.experiments._page import page, write_page

__all__ = ["Experiment", "Options", "Status", "load", "names", "page", "run", "status", "write_page"]
