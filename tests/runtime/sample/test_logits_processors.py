"""Plug-ins that change logits: their rows, their place in the order, their failures."""

import dataclasses
import importlib.metadata
import random

import numpy as np
import pytest
import torch
from support_core import make_core, make_request, run_to_end
from support_engines import eager_llm
from support_fake_runner import fake_generate
from support_models import tiny_model
from support_processors import Broken, Staircase
from support_tensor_runner import TensorFakeRunner

from girih import SamplingParams
from girih.kernels.base.errors import ConfigError, EngineError, GirihError, RequestError
from girih.runtime.sample.logits_processors import (
    ENTRY_POINTS,
    ActiveProcessor,
    NamedProcessor,
    RowTokens,
    check_arguments,
    load_processors,
)
from girih.runtime.sample.sampler import PenaltyInputs, SamplingInputs, sample

VOCAB, BLOCK, LENGTH, ROWS = 300, 16, 96, 6
STAIRCASE, BROKEN = "support_processors:Staircase", "support_processors:Broken"
OPTIONS = {"dtype": "float32", "num_blocks": 64, "threads": 1, "max_num_seqs": 4}


class PluginRunner(TensorFakeRunner):
    """A fake model below the real batch and sampler, with plug-ins."""

    def __init__(self):
        named = (NamedProcessor("stairs", Staircase(VOCAB, ROWS)),)
        super().__init__(ROWS, LENGTH, BLOCK, VOCAB, processors=named)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_come_go_and_move_keep_their_arguments(seed):
    rng = random.Random(seed)
    runner = PluginRunner()
    core = make_core(14, BLOCK, LENGTH, runner=runner, max_num_seqs=ROWS, async_scheduling=seed % 2)
    requests = {}
    for number in range(20):
        args = {"staircase": rng.randrange(VOCAB)} if rng.random() < 0.6 else None
        request = make_request(
            f"r{number}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
            max_tokens=rng.randint(1, 30),
            temperature=0,
            extra_args=args,
        )
        requests[request.request_id] = request
        core.add_request(request)
    ended = run_to_end(core)
    core.close()
    assert core.stats().num_preemptions > 0  # rows also came back with output
    for name, request in requests.items():
        count = len(ended[name].tokens)
        if request.sampling.extra_args:
            start = request.sampling.extra_args["staircase"]
            assert ended[name].tokens == [(start + i) % VOCAB for i in range(count)]
        else:
            assert ended[name].tokens == fake_generate(request, VOCAB, LENGTH)


def active(processor, index, rows, tokens=None):
    return ActiveProcessor("plug", processor, torch.tensor(index), rows, tokens)


class Favour:
    """Adds to one token; shows what it was given."""

    def __init__(self, token, amount):
        self.token, self.amount, self.seen = token, amount, None

    def apply(self, logits, rows, tokens):
        self.seen = logits.clone()
        logits[:, self.token] += self.amount
        return logits


def test_its_place_is_after_bias_and_bans_and_before_penalties():
    logits = torch.zeros(2, 8, dtype=torch.bfloat16)
    plug = Favour(5, 3.0)
    inputs = SamplingInputs(
        banned=(torch.tensor([1]), torch.tensor([2])),
        bias=(torch.tensor([1]), torch.tensor([3]), torch.tensor([2.0])),
        processors=(active(plug, [1], None),),
    )
    assert sample(logits, inputs).token_ids.tolist() == [0, 5]
    assert plug.seen.dtype == torch.float32
    assert plug.seen.shape == (1, 8)
    assert plug.seen[0, 2] == -torch.inf
    assert plug.seen[0, 3] == 2.0
    one = torch.tensor([1.0])
    penalties = PenaltyInputs(
        torch.tensor([1]), torch.tensor([5]), one, torch.tensor([4.0]), one * 0, one * 0
    )
    again = dataclasses.replace(inputs, penalties=penalties)
    assert sample(logits, again).token_ids.tolist() == [0, 3]  # 3 / 4 < 2
    assert logits.eq(0).all()


def test_a_grammar_keeps_the_last_word():
    logits = torch.zeros(1, 32)
    words = torch.tensor([[0b110]], dtype=torch.int32)  # tokens 1 and 2
    grammar = (torch.tensor([0]), words)
    favour = SamplingInputs(grammar=grammar, processors=(active(Favour(9, 50.0), [0], None),))
    assert sample(logits, favour).token_ids.tolist() == [1]
    forbid = SamplingInputs(
        grammar=grammar, processors=(active(Favour(slice(None), -torch.inf), [0], None),)
    )
    assert sample(logits, forbid).token_ids.tolist() == [1]


def test_logprobs_are_those_of_the_model():
    logits = torch.arange(8.0)[None]
    inputs = SamplingInputs(processors=(active(Favour(0, 99.0), [0], None),), num_logprobs=(1,))
    output = sample(logits, inputs)
    assert output.token_ids.tolist() == [0]
    assert output.logprobs[0].rank == 8


@pytest.mark.parametrize(
    ("how", "message"),
    [("apply", "ZeroDivisionError"), ("nan", "not numbers"), ("shape", "logits")],
)
def test_a_failure_names_the_plug_in(how, message):
    broken = Broken(8, 4)
    broken.how = how
    logits = torch.randn(3, 8)
    with pytest.raises(GirihError, match=rf"logits processor plug failed: .*{message}"):
        sample(logits, SamplingInputs(processors=(active(broken, [1], None),)))


def test_arguments_are_checked_on_arrival():
    named = load_processors([STAIRCASE, BROKEN], VOCAB, ROWS)
    check_arguments(named, SamplingParams(extra_args={"staircase": 3, "break": "x"}))
    with pytest.raises(RequestError, match=r"'other'; this engine takes break, staircase"):
        check_arguments(named, SamplingParams(extra_args={"other": 1}))
    with pytest.raises(RequestError, match=r"Staircase refuses extra_args: staircase is 'x'"):
        check_arguments(named, SamplingParams(extra_args={"staircase": "x"}))
    with pytest.raises(RequestError, match="no logits processor that takes any"):
        check_arguments((), SamplingParams(extra_args={"other": 1}))
    with pytest.raises(RequestError, match=r"extra_args has the entry 'a'"):
        SamplingParams(extra_args={"a": object()})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("support_processors", "not of the form module:Class"),
        ("no_such_module_here:X", "ModuleNotFoundError"),
        ("support_processors:Nothing", "AttributeError"),
        ("support_processors:np", "no subclass"),
        ("support_processors:Unmakeable", "OSError: no table"),
    ],
)
def test_what_cannot_be_used_is_named(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_processors([name], VOCAB, ROWS)
    assert f"logits processor {name} cannot be used" in str(caught.value)


def test_installed_packages_bring_their_own(monkeypatch):
    point = importlib.metadata.EntryPoint("stairs", STAIRCASE, ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == ENTRY_POINTS else []
    )
    made = load_processors([BROKEN], VOCAB, ROWS)
    assert [named.name for named in made] == ["stairs", BROKEN]
    assert isinstance(made[0].processor, Staircase)


def test_an_engine_with_plug_ins():
    llm = eager_llm(tiny_model("llama"), logits_processors=[STAIRCASE, BROKEN], **OPTIONS)
    check_plug_ins(llm)
    llm.close()


def test_a_core_in_another_process_with_plug_ins(process_llm):
    check_plug_ins(process_llm)


def check_plug_ins(llm):
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    stairs = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"staircase": 40})
    prompts = [[5, 6, 7]] * 3
    [before] = llm.generate(prompts[:1], plain)
    outputs = llm.generate(prompts, [plain, stairs, plain])
    assert outputs[1].outputs[0].token_ids == [40, 41, 42, 43, 44]
    for index in (0, 2):
        assert outputs[index].outputs[0].token_ids == before.outputs[0].token_ids
    with pytest.raises(RequestError, match="staircase is 'x'"):
        llm.generate(prompts[:1], SamplingParams(extra_args={"staircase": "x"}))
    for how in ("add", "apply"):
        with pytest.raises(EngineError, match=rf"processor {BROKEN} failed: \w+: '?{how}"):
            llm.generate(prompts[:1], SamplingParams(extra_args={"break": how}))
    assert llm.generate(prompts[:1], plain)[0].outputs[0].token_ids == before.outputs[0].token_ids


def test_a_row_shows_its_output():
    tokens = RowTokens(np.array([[1, 2, 3, 0]]), np.array([3]), np.array([1]))
    assert tokens.output(0).tolist() == [2, 3]
