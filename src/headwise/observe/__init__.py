"""What a model attends to: pictures of attention weights."""
