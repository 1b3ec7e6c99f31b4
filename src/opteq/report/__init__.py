"""Reports: run folders as one HTML page that needs nothing else; or served, while the runs go on."""

from opteq.report.page import write
from opteq.report.serving import Server, serve

__all__ = ["Server", "serve", "write"]
