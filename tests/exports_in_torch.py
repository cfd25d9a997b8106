"""Loads exports as a user of transformers would: offline, with the code that the folder brings."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.utils import logging

logging.disable_progress_bar()


# Where transformers copies the code to that it runs: one folder for all tests of a process, which imports from there.
MODULES = tempfile.mkdtemp(prefix="modules")
atexit.register(shutil.rmtree, MODULES, ignore_errors=True)
dynamic_module_utils.HF_MODULES_CACHE = MODULES  # pyright: ignore[reportPrivateImportUsage]


def load_model(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def load_tokenizer(folder: Path) -> Any:
    """Without running anything that the folder brings."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@torch.no_grad()
def logits(model: Any, tokens_BL: np.ndarray, **options: Any) -> np.ndarray:
    return model(torch.tensor(tokens_BL).long(), **options).logits.float().numpy()
