"""Data: labelled series to train on, and how they become padded batches."""
