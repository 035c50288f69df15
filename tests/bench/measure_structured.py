"""How much 32 different grammars slow decoding down: python tests/bench/measure_structured.py.

Alternates batches with and without grammars (same prompts, same number of tokens, greedy) and
compares the best times of each. With --masks: the time of single masks of a recursive GBNF grammar.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
import torch

from girih import load_spec
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.sample.mask import unpack_mask
from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary
from girih.serve.bench.metrics import percentile
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


NESTED = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\"" ws
number ::= "-"? [0-9]+ ("." [0-9]+)? ws
ws ::= [ \t\n]*
"""


def mask_times() -> list[float]:
    """Milliseconds of each mask while random texts of a recursive grammar are written."""
    spec = load_spec("smollm2")
    vocabulary = read_vocabulary(spec.files.path, spec.vocab_size, spec.eos_token_ids)
    store = GrammarStore(lambda: vocabulary)
    mask = np.zeros((1, -(-spec.vocab_size // 32)), np.int32)
    draw, times = random.Random(0), []
    for _ in range(NUM_REQUESTS):
        matcher = store.matcher(StructuredOutput.grammar(NESTED))
        for _ in range(NUM_TOKENS):
            started = time.perf_counter()
            matcher.backend.fill([matcher], [0], mask)
            times.append(1000 * (time.perf_counter() - started))
            allowed = unpack_mask(torch.from_numpy(mask), spec.vocab_size)[0].nonzero()[:, 0]
            if not matcher.accept(draw.choice(allowed.tolist())) or matcher.is_stopped:
                break
    return times


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
    parser.add_argument("--masks", action="store_true", help="time masks, without a model")
    asked = parser.parse_args()
    if asked.masks:
        masks = sorted(mask_times())
        print(f"{len(masks)} masks, ms: median {percentile(masks, 50):.1f}, ", end="")
        print(f"p90 {percentile(masks, 90):.1f}, longest {masks[-1]:.1f}")
        return
    options = dict(word.split("=", 1) for word in asked.options)
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
