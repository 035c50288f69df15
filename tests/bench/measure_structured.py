"""How much 32 different grammars slow decoding down: python tests/bench/measure_structured.py.

Alternates batches with and without grammars (same prompts, same number of tokens, greedy) and
compares the best times of each.
"""

from __future__ import annotations

import argparse
import time

from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import StructuredOutput
from girih.serve.offline.llm import LLM

NUM_REQUESTS, NUM_TOKENS, ROUNDS = 32, 64, 4


def form(number: int) -> StructuredOutput:
    """A list of records that no output of this length completes."""
    record = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 3, "maxLength": 20},
            f"count_{number}": {"type": "integer"},
            f"tags_{number}": {"type": "array", "items": {"enum": ["a", "b", f"c{number}"]}},
        },
        "required": [f"name_{number}", f"count_{number}", f"tags_{number}"],
        "additionalProperties": False,
    }
    return StructuredOutput.json_schema({"type": "array", "items": record, "minItems": 100})


def seconds(llm: LLM, with_forms: bool) -> float:
    """Time of one batch."""
    prompts = [f"List number {number} as JSON:" for number in range(NUM_REQUESTS)]
    common = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    params = [
        SamplingParams(structured=form(number), **common)
        if with_forms
        else SamplingParams(ignore_eos=True, **common)
        for number in range(NUM_REQUESTS)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    ended = time.perf_counter()
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    assert lengths == {NUM_TOKENS}, lengths
    return ended - started


def main() -> None:
    """Print both times and the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", nargs="*", help="options of LLM(...), key=value")
    options = dict(word.split("=", 1) for word in parser.parse_args().options)
    llm = LLM("smollm2", max_num_seqs=NUM_REQUESTS, **options)
    for with_forms in (True, False):
        seconds(llm, with_forms)
    times = {
        key: min(values)
        for key, values in zip(
            ("free", "held"),
            zip(*((seconds(llm, False), seconds(llm, True)) for _ in range(ROUNDS)), strict=True),
            strict=True,
        )
    }
    tokens = NUM_REQUESTS * NUM_TOKENS
    for key, value in times.items():
        print(f"{key}: {value:.3f} s, {tokens / value:.0f} tokens/s")
    print(f"slow-down {100 * (times['held'] / times['free'] - 1):.1f} %")


if __name__ == "__main__":
    main()
