"""PyTorch files that an export takes along. Nothing of this package imports them, and they import nothing of it."""
