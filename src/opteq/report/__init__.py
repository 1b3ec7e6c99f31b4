"""Reports: run folders as one HTML page that needs nothing else, neither a network nor JavaScript."""

from opteq.report.page import write

__all__ = ["write"]
