"""Whether there is Matplotlib, which is an extra."""

from angpt_jax.errors import UserError


def need_matplotlib(command: str) -> None:
    """A UserError says how to install it, if it is not there."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError(f"{command}: needs Matplotlib, which is not installed; pip install -e '.[plots]'") from None
