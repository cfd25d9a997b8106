"""JSON from files that strangers may have written."""

import json
from typing import Any


def parsed(text: str) -> Any:
    """What the JSON `text` holds; a ValueError for all that is none, also where it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
