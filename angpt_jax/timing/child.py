"""The process of a side: `python -m angpt_jax.timing.child`, a JSON object a line on stdin and stdout.

It gets a Request, compiles, and answers with facts; then it gets names of measures, and answers each with one round.
"""

import json
import os
import sys
from typing import Any

from angpt_jax import host_memory
from angpt_jax.errors import UserError
from angpt_jax.timing.side import Request


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    request = Request(**json.loads(sys.stdin.readline()))
    host_memory.keep_freed()
    from angpt_jax.timing.measures import Measures  # not before: it imports JAX

    try:
        measures = Measures(request)
    except UserError as error:
        answer({"problems": error.problems})
        return
    with measures:
        answer(measures.facts)
        for line in sys.stdin:
            answer(measures.round(json.loads(line)["measure"]))


if __name__ == "__main__":
    main()
