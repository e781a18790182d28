r"""math-verify in a process of its own: reads requests, one JSON line each, and answers each with one.

    {"output": "… \boxed{\frac{1}{2}}", "reference": "0.5"}  →  {"verdict": true}

The last box counts if there is one, else what math-verify takes for the answer. Its own time limits are off (they are
signals, which wait for whatever sympy does in C): whoever asks kills this process when it takes too long.
A reference that cannot be read, or anything raised, is the verdict "error".
"""

import json
import os
import resource
import sys

MEMORY = 4 << 30  # bytes of address space: towers of powers would take all there is


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not come between
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    verdict: bool | str = "ready"
    while True:
        print(json.dumps({"verdict": verdict}), file=answers, flush=True)
        if not (line := sys.stdin.readline()):
            return 0
        try:
            request = json.loads(line)
            reference = parse(f"\\boxed{{{request['reference']}}}", targets, parsing_timeout=None)
            output = parse(request["output"], targets, parsing_timeout=None)
            verdict = bool(verify(reference, output, timeout_seconds=None)) if reference else "error"
        except Exception:
            verdict = "error"


if __name__ == "__main__":
    sys.exit(main())
