"""Beam search against a search written out over the fake model's distribution."""

import msgspec
import pytest
import support_tokenizer
import torch
from support_fake_runner import fake_next_token
from support_serving import FakeEngine, fake_engine
from support_tensor_runner import TensorFakeRunner

from girih.kernels.base.errors import RequestError
from girih.serve.offline.beam_search import BeamSearchParams
from girih.serve.offline.llm import LLM

TOKENIZER = support_tokenizer.byte_level()
VOCAB = TOKENIZER.vocab_size


def make_llm(eos=()):
    runner = TensorFakeRunner(16, 128, 16, VOCAB)
    engine = fake_engine(TOKENIZER, eos=eos, runner=runner, max_model_len=128, max_num_seqs=16)
    facts = msgspec.structs.replace(engine.facts, vocab_size=VOCAB)
    return LLM.from_engine(FakeEngine(engine.core, facts), TOKENIZER)


def logprobs_after(tokens):
    """The fake model's distribution: falling from its choice, over ids upwards."""
    best = fake_next_token(tokens, VOCAB)
    return (-((torch.arange(VOCAB) - best) % VOCAB).float()).log_softmax(-1)


def search(prompt, width, max_tokens, eos, penalty):
    """Keep the `width` best sequences, looking at the whole vocabulary each time."""
    live, ended = [([], 0.0)], []
    for _ in range(max_tokens):
        found = []
        for tokens, total in live:
            values = logprobs_after(prompt + tokens)
            found += [([*tokens, i], total + float(values[i])) for i in range(VOCAB)]
        found.sort(key=lambda entry: -entry[1])
        found = found[: 2 * width]
        ended += [entry for entry in found if entry[0][-1] in eos]
        live = [entry for entry in found if entry[0][-1] not in eos][:width]
    ranked = sorted(ended + live, key=lambda entry: -entry[1] / len(entry[0]) ** penalty)
    return ranked[:width]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_finds_what_an_exhaustive_beam_search_finds(width, penalty):
    prompts = [[1, 2, 3, 4], [9] * 40, [7]]
    # ids that some sequence meets: the fake model's first choices and their neighbours
    eos = tuple((fake_next_token(prompts[0], VOCAB) + k) % VOCAB for k in (1,))
    llm = make_llm(eos)
    params = BeamSearchParams(beam_width=width, max_tokens=4, length_penalty=penalty)
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = search(prompt, width, 4, eos, penalty)
        assert [sequence.token_ids for sequence in found] == [tokens for tokens, _ in expected]
        for sequence, (tokens, total) in zip(found, expected, strict=True):
            assert sequence.logprob == pytest.approx(total, abs=1e-3)
            assert sequence.finish_reason == ("stop" if tokens[-1] in eos else "length")
            assert sequence.text == TOKENIZER.decode(tokens)


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(RequestError, match="beam_width is 0"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(RequestError, match="no field 'width'; did you mean 'beam_width'"):
        BeamSearchParams(width=3)
    with pytest.raises(RequestError, match="max_tokens is None; it must be an integer"):
        BeamSearchParams(max_tokens=None)
    with pytest.raises(RequestError, match="params is 5; it must be a BeamSearchParams"):
        make_llm().beam_search([[1]], 5)
    with pytest.raises(RequestError, match="max_model_len allows 128"):
        make_llm().beam_search([[1] * 100], BeamSearchParams(max_tokens=64))
