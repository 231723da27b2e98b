"""Whole models over `headwise.layers`, and their files."""
