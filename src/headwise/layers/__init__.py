"""Encoder blocks and stacks over `headwise.core`."""
