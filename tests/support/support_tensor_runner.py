"""The runner of generating models on a fake model: batch, sampler and what lies between are real.

The "logits" after a prefix are highest for the token `fake_next_token` gives and fall from there,
so bans lead to the same next choice as in `FakeRunner`. The first KV group must keep everything.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from support_fake_runner import _choose, _extend

from girih.graph.execute.step_inputs import StepInputs
from girih.kernels.kv.groups import FULL
from girih.runtime.step.batch import PersistentBatch
from girih.runtime.step.generate import CompiledModelRunner
from girih.runtime.structured.rows import GrammarRows


class TensorFakeRunner(CompiledModelRunner):
    """Runs plans on a fake KV memory by slot.

    Attributes:
        steps: what the model was given.
    """

    def __init__(
        self, max_num_seqs, max_model_len, block_size, vocab_size, groups=(FULL,), processors=(),
        store=None,
    ):  # fmt: skip
        sizes = (max_num_seqs, max_model_len, block_size, vocab_size, len(groups))
        layout = SimpleNamespace(state_specs=(), inputs=())
        replays = SimpleNamespace(
            executable=SimpleNamespace(layout=layout), run=self._forward, explanation="fake"
        )
        batch = PersistentBatch(*sizes, processors)
        grammars = GrammarRows(store, vocab_size, batch.failures)
        super().__init__(replays, batch, grammars, threads=1)
        self.groups = groups
        self.block_size, self.vocab_size = block_size, vocab_size
        self.memory: dict[int, int] = {}
        self.violations: list[str] = []
        self.steps: list[StepInputs] = []

    def _forward(self, step: StepInputs) -> torch.Tensor:
        self.steps.append(step)
        starts, lens = step.attention.query_start.tolist(), step.attention.seq_lens.tolist()
        tables = [table.tolist() for table in step.attention.block_tables]
        slots = [slots.tolist() for slots in step.attention.slot_mappings]
        ids, positions = step.ids.tolist(), step.positions.tolist()
        size = self.block_size

        def slot_of(group, request, position):
            return tables[group][request][position // size] * size + position % size

        def read(group, request, position):
            """The prefix hash of one position, as one group has it."""
            return self.memory.get(slot_of(group, request, position), {}).get(group, -1)

        request_of = {}
        for request, length in enumerate(lens):
            tokens = range(starts[request], starts[request + 1])
            assert positions[tokens[-1]] == length - 1
            for token in tokens:
                position = positions[token]
                request_of[token] = request
                before = read(0, request, position - 1) if position else 0
                chain = _extend(before, ids[token])
                for group in range(len(self.groups)):
                    assert slots[group][token] == slot_of(group, request, position) >= size
                    self.memory[slots[group][token]] = {group: chain}
        rows = []
        for token in step.logits_index.tolist():
            request = request_of[token]
            position = positions[token]
            values = [read(0, request, p) for p in range(position + 1)]
            for number, group in enumerate(self.groups):
                for p in range(group.first_needed(position), position + 1):
                    assert read(number, request, p) == values[p], "wrong KV"
            best = _choose(values, self.vocab_size, frozenset())
            rows.append(-((torch.arange(self.vocab_size) - best) % self.vocab_size).float())
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
