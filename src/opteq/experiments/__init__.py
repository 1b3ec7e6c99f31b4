"""The experiments of the papers, one readable file for each table or figure: `python -m opteq.experiments.NAME`."""

import pkgutil

__all__ = ["names"]


def names() -> list[str]:
    """The experiments there are, by the names of their files."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
