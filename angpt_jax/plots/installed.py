"""Whether there is Matplotlib, which is an extra."""

from angpt_jax.errors import UserError

REMEDY = "pip install -e '.[plots]'"


def has_matplotlib() -> bool:
    """Whether it can be imported; an import error of another cause is passed on."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return False
    return True


def need_matplotlib(command: str) -> None:
    """A UserError says how to install it, if it is not there."""
    if not has_matplotlib():
        raise UserError(f"{command}: needs Matplotlib, which is not installed; {REMEDY}")
