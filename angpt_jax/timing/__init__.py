"""What `python -m angpt_jax.bench` is made of: processes that measure (`child`, `measures`), who has them take turns
(`side`, `rounds`, `load`), and what comes of it (`results`)."""
