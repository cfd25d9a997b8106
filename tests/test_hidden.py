"""Packages that others take along stay out, and are there afterwards."""

import subprocess
import sys

import pytest
from commands import one_device

from angpt_jax.hidden import hidden


def test_inside_it_is_not_installed_and_afterwards_it_is():
    sys.modules.pop("this", None)
    with hidden("this"), pytest.raises(ImportError):
        import this  # noqa: F401
    assert "this" not in sys.modules


def test_what_was_imported_before_stays():
    import json

    with hidden("json"):
        import json as again
    assert again is json and sys.modules["json"] is json


def test_training_starts_without_pytorch():
    code = "import sys, angpt_jax.pretrain; print('torch' in sys.modules, 'tensorboardX' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=one_device(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "False True\n", done.stderr
