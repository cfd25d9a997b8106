"""A trained model as lm-evaluation-harness (lm_eval) sees it.

model = HarnessModel(scorer, tokenizer, context, batch_size, generator)
lm_eval.evaluator.evaluate(model, tasks)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.decoding import Draw
from angpt_jax.scoring import Scorer

NEW_TOKENS = 256  # where a task does not say how many, as in the harness's own models
_MOST_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Generator(Protocol):
    """What continues prompts."""

    def batch(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        draw: Draw,
        seed: int = 0,
        stop: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """New ids of each prompt: at most `most`, up to the end of document (not included) or until `stop` of them."""
        ...


class Wanted(NamedTuple):
    """What a task wants of the text that is generated; requests that want the same go together."""

    until: tuple[str, ...]
    most: int
    draw: Draw


class HarnessModel(TemplateLM):
    """Scores and continues texts as the harness asks for it.

    Args:
        scorer: of token sequences
        tokenizer: of the model
        context: tokens of a window
        batch_size: prompts that are continued at a time
        generator: continues prompts, such as `generate.Generator`
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        generator: Generator,
    ):
        super().__init__()
        self._scorer, self._ids, self._context, self._batch_size = scorer, tokenizer, context, batch_size
        self._generator = generator

    @property
    def eot_token_id(self) -> int:
        return self._ids.end_of_document

    @property
    def max_length(self) -> int:
        return self._context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Without special ids, which `encode` never gives."""
        return self._ids.encode([string])[0].tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats, and whether greedy decoding would give the continuation."""
        pairs = [self._pair(*cast(tuple[str, str], request.args)) for request in requests]
        return self._noted("loglikelihood", requests, self._scores(pairs))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text as a document of its own, in windows of the context."""
        pairs = [([self.eot_token_id], self.tok_encode(request.args[0])) for request in requests]
        return self._noted("loglikelihood_rolling", requests, [score.log_p for score in self._scorer.scores(pairs)])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the first stop string, which is left out."""
        texts = [""] * len(requests)
        groups: dict[Wanted, list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            context, options = cast(tuple[str, dict[str, Any]], request.args)
            wanted = wanted_of(options)
            groups.setdefault(wanted, []).append((number, self.tok_encode(context)))
        for wanted, prompts in groups.items():
            prompts.sort(key=lambda prompt: len(prompt[1]))
            for start in range(0, len(prompts), self._batch_size):
                numbers, batch = zip(*prompts[start : start + self._batch_size], strict=True)
                for number, text in zip(numbers, self._continued(batch, wanted, seed=start), strict=True):
                    texts[number] = text
        return self._noted("generate_until", requests, texts)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        return self._scores([(context, target) for _, context, target in requests])

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        return [(score.log_p, score.is_greedy) for score in self._scorer.scores(pairs)]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, by the convention of the harness (`_encode_pair`): spaces at the end of the context go to the
        continuation, and the ids of both together are cut behind as many as the context alone has. Where a tokenizer
        merges across the border so that none is left behind it, the two are encoded apart. An empty context is the
        beginning of a document."""
        if not context:
            return [self.eot_token_id], self.tok_encode(continuation)
        before, after = self._encode_pair(context, continuation)
        if continuation and not after:
            before, after = self.tok_encode(context), self.tok_encode(continuation)
        return before or [self.eot_token_id], after

    def _continued(self, prompts: Sequence[list[int]], wanted: Wanted, seed: int) -> list[str]:
        """Prompts that are too long are cut from the left; half of the context is theirs at least."""
        most = min(wanted.most, max(self._context // 2, 1))
        room = self._context - most

        def is_done(ids: list[int]) -> bool:
            text = self._ids.decode(ids)
            return any(stop in text for stop in wanted.until)

        rows = [prompt[-room:] or [self.eot_token_id] for prompt in prompts]
        rows += rows[:1] * (self._batch_size - len(rows))  # so that the last batch compiles nothing
        new = self._generator.batch(rows, most, wanted.draw, seed, is_done if wanted.until else None)
        return [_up_to(self._ids.decode(ids), wanted.until) for ids in new[: len(prompts)]]

    def _noted(self, kind: str, requests: list[Instance], answers: list[Any]) -> list[Any]:
        """The answers, which a cache of the harness hears of too."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers


def wanted_of(options: dict[str, Any]) -> Wanted:
    """From the `generation_kwargs` of a task: greedy unless it says `do_sample: true`, or a temperature above 0 and
    nothing of do_sample."""
    until = options.get("until") or []
    most = next((int(options[key]) for key in _MOST_KEYS if options.get(key) is not None), NEW_TOKENS)
    samples = options.get("do_sample")
    temperature, top_k, top_p = (options.get(key) for key in ("temperature", "top_k", "top_p"))
    if samples is False or temperature is None:
        temperature = 1.0 if samples else 0.0
    return Wanted(
        tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        most,
        Draw(float(temperature), int(top_k) if top_k else None, float(top_p) if top_p is not None else None),
    )


def _up_to(text: str, stops: Sequence[str]) -> str:
    """The text in front of the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
