"""Analytic FLOPs of training."""


def per_token(weights: int, layers: int, width: int, context: int) -> int:
    """Forward and backward: 6 per weight of a matrix product, and attention's two products over the whole L × L
    square, 12·N·D·L (PaLM, arXiv 2204.02311, appendix B)."""
    return 6 * weights + 12 * layers * width * context
