"""The 54 bad inputs of the reliability sheet, as a table: what is given, and the lines that answer it."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from angpt_jax import cli, experiment, run_dir
from angpt_jax.config import Config
from angpt_jax.data.prepared import MANIFEST, Manifest, write_manifest
from angpt_jax.data.shards import ShardWriter
from angpt_jax.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe

Make = Callable[[Path], object]
