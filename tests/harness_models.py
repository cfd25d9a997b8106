"""Tiny models as lm-evaluation-harness sees them, for its two test files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from conftest import EVEN, Tiny, tiny

from angpt_jax.data.tokenizer import ByteTokenizer, Tokenizer
from angpt_jax.generate import Generator
from angpt_jax.scoring import Scorer

CONTEXT, END = 24, 256
BYTES = ByteTokenizer()


class Greedy:
    """Continues prompts by whole forward passes; notes what it was asked."""

    def __init__(self, model: Tiny):
        self.model, self.asked = model, []

    def batch(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        draw: Any,
        seed: int = 0,
        stop: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:
        self.asked.append((len(prompts), most, draw))
        return [self.continued(list(prompt), most, stop) for prompt in prompts]

    def continued(self, prompt: list[int], most: int, stop: Callable[[list[int]], bool] | None) -> list[int]:
        new: list[int] = []
        while len(new) < most and not (stop and stop(new)):
            row = np.full((1, CONTEXT), END)
            row[0, : len(prompt + new)] = prompt + new
            logits_LV = self.model.logits(self.model.random, row)[0]
            likeliest = int(logits_LV[len(prompt + new) - 1, :257].argmax())
            if likeliest == END:
                break
            new.append(likeliest)
        return new


def model() -> Tiny:
    return tiny("angpt", replace(EVEN, vocab=264))


def harness_model(model: Tiny, tokenizer: Tokenizer = BYTES, generator: Any = None) -> Any:
    from angpt_jax.harness import HarnessModel

    scorer = Scorer(model.model, model.random, tokenizer, CONTEXT, 4, shortest=8)
    drawing = generator or Generator(model.model, model.random, tokenizer, CONTEXT)
    return HarnessModel(scorer, tokenizer, CONTEXT, 4, drawing)
