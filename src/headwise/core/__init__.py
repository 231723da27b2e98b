"""Attention itself: masks, backends, the functions and the module. Imports nothing else of headwise."""
