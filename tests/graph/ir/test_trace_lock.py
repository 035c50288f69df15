"""Several threads of a process build models at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

from support_models import opt_o2, tiny_spec

from girih.graph.trace.trace import trace
from girih.kernels.base.target import Target
from girih.passes.build.build import lower_and_partition

TARGET = Target("cpu", "avx2", 2, "g++")
KINDS = ("llama", "qwen3", "llama", "gemma3_text")


def lowered(spec):
    return lower_and_partition(trace(spec), opt_o2(), TARGET)[0].as_text()


def test_models_built_in_threads_are_those_built_alone():
    specs = {kind: tiny_spec(kind) for kind in KINDS}
    alone = {kind: lowered(spec) for kind, spec in specs.items()}
    together = threading.Barrier(len(KINDS), timeout=60)

    def at_once(kind):
        together.wait()
        return kind, lowered(specs[kind])

    with ThreadPoolExecutor(len(KINDS)) as pool:
        for kind, text in pool.map(at_once, KINDS):
            assert text == alone[kind]
