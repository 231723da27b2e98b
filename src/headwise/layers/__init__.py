"""Encoder blocks and stacks over `headwise.core`."""

from headwise.layers.names import own_names
from headwise.layers.parallel import tp_plan

__all__ = ["own_names", "tp_plan"]
