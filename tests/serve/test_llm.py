import pytest
import support_tokenizer
from support_core import make_core  # noqa: F401 (loads the fake before the engine)
from support_serving import fake_handle

from girih.kernels.errors import ConfigError, EngineError, RequestError
from girih.runtime.sampling_params import SamplingParams
from girih.serve.config import SamplingConfig
from girih.serve.llm import LLM
from girih.serve.options import engine_config, option_names
from girih.serve.sampling_defaults import SamplingDefaults

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def llm():
    tokenizer = support_tokenizer.byte_level()
    made = LLM.from_engine(fake_handle(tokenizer), tokenizer)
    yield made
    core = made.handle.core
    assert not core.has_work()
    core.check_integrity()
    assert core.scheduler.kv_cache.pool.num_free == core.scheduler.kv_cache.pool.num_usable


def test_prompt_forms(llm):
    ids = llm.tokenizer.encode("one two")
    as_text = llm.generate("one two", GREEDY)[0]
    assert as_text.prompt == "one two"
    assert as_text.prompt_token_ids == ids
    for form in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": "one two"}]):
        (output,) = llm.generate(form, GREEDY)
        assert output.outputs[0].text == as_text.outputs[0].text
    assert len(llm.generate(["one", "two"], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []


def test_outputs_are_complete_and_in_order(llm):
    params = [SamplingParams(temperature=0, max_tokens=count, logprobs=0) for count in (9, 2, 5)]
    outputs = llm.generate([[1], [2], [3]], params)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [9, 2, 5]
    for output in outputs:
        (only,) = output.outputs
        assert output.finished
        assert only.finish_reason == "length"
        assert only.text == llm.tokenizer.decode(only.token_ids)
        assert only.cumulative_logprob == pytest.approx(-0.5 * len(only.token_ids))


def test_n_completions(llm):
    params = SamplingParams(temperature=1, seed=3, n=4, max_tokens=3)
    (output,) = llm.generate("a", params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    seeds = {
        request.sampling.seed
        for plan in llm.handle.core.runner.plans
        for request in plan.new_requests
    }
    assert seeds == {3, 4, 5, 6}


def test_stop_strings(llm):
    full = llm.generate("a", SamplingParams(temperature=0, max_tokens=30))[0].outputs[0].text
    stop = full[9:12]
    cut = llm.generate("a", SamplingParams(temperature=0, max_tokens=30, stop=(stop,)))[0]
    assert cut.outputs[0].text == full[: full.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop


def test_stream_is_generate_and_may_be_left_early(llm):
    whole = llm.generate("a", GREEDY)[0].outputs[0].text
    assert "".join(delta.text for delta in llm.stream("a", GREEDY)) == whole
    for _ in llm.stream("a", SamplingParams(max_tokens=100)):
        break


def test_chat_and_prefix_cache(llm):
    messages = [{"role": "user", "content": "hello " * 20}]
    first = llm.chat(messages, GREEDY)[0]
    again = llm.chat([messages, messages], GREEDY)[0]
    assert first.outputs[0].text == again.outputs[0].text
    assert again.num_cached_tokens > 0
    llm.reset_prefix_cache()
    assert llm.chat(messages, GREEDY)[0].num_cached_tokens == 0


def test_progress_bar_goes_to_stderr(llm, capsys):
    llm.generate(["a", "b"], GREEDY, use_progress=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ([[1, 99999]], GREEDY, "99999"),
        ({"text": "a"}, GREEDY, "prompt_token_ids"),
        ([[1]] * 2, [GREEDY] * 3, "3 sampling parameters"),
        ([[1] * 256], GREEDY, "256 tokens"),
        ("a", SamplingParams(logit_bias={99999: 1.0}), "vocabulary"),
    ],
)
def test_bad_requests(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)


def test_a_failed_step_is_an_engine_error_and_leaves_nothing():
    tokenizer = support_tokenizer.byte_level()
    llm = LLM.from_engine(fake_handle(tokenizer, fail_at={1: ValueError("boom")}), tokenizer)
    with pytest.raises(EngineError, match="boom"):
        llm.generate(["a", "b"], GREEDY)
    assert not llm.handle.core.has_work()
    assert llm.generate("a", GREEDY)[0].finished


def test_options_become_the_engine_configuration():
    config = engine_config(
        "DIR", {"dtype": "float32", "opt": "O0", "max_num_seqs": 3, "bundle": "B", "threads": 2}
    )
    assert config.model.source == "DIR"
    assert config.model.dtype == "float32"
    assert (config.opt.level, config.opt.compile) == ("O0", False)
    assert config.scheduler.max_num_seqs == 3
    assert config.compile.bundle == "B"
    assert config.target.threads == 2
    assert engine_config("DIR", {}).opt.passes.pack_linears.enabled


def test_option_names_are_unambiguous():
    sections = [section for section, _ in option_names().values()]
    assert set(sections) == {"model", "target", "scheduler", "cache", "runtime", "compile"}
    assert len(set(option_names().values())) == len(sections)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 1}, "max_num_seqs"),
        ({"opt": "O9"}, "O0"),
        ({"dtype": "float99"}, "float32"),
        ({"block_size": 7}, "multiple of 16"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        engine_config("DIR", options)


def test_a_server_default_of_zero_counts() -> None:
    defaults = SamplingDefaults({"temperature": 0.6}, SamplingConfig(temperature=0.0))
    assert defaults.build({}, max_tokens=8).temperature == 0.0
    assert SamplingDefaults({"temperature": 0.6}).build({}, max_tokens=8).temperature == 0.6
