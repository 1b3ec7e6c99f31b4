"""A run folder: configuration, environment, metrics and checkpoints of one training, safe against a kill at any moment.

Files are replaced atomically; checkpoints are safetensors and JSON, with digests over all of their bytes. Nothing is pickled.
"""

from opteq.runs.checkpoint import Checkpoint
from opteq.runs.files import RunError, RunWarning, write_atomic
from opteq.runs.folder import Run
from opteq.runs.provenance import environment

__all__ = ["Checkpoint", "Run", "RunError", "RunWarning", "environment", "write_atomic"]
