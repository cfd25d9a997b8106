"""The train step compiled ahead of time, and what the program says of itself: memory, traffic, collectives, a roofline.

The command is `angpt_jax.compile`.
"""
