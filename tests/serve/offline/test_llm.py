import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import support_tokenizer
from support_core import core_of, make_core  # noqa: F401 (loads the fake before the engine)
from support_serving import fake_engine

from girih.kernels.base.errors import (
    ConfigError,
    EngineError,
    QueueFullError,
    RequestError,
    SourceError,
)
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.start.context import target_of
from girih.runtime.start.launch import compile as compile_model
from girih.serve.config import SamplingConfig
from girih.serve.offline.llm import LLM
from girih.serve.offline.options import engine_config, option_names
from girih.serve.text.detokenizer import decode_output
from girih.serve.text.sampling_defaults import SamplingDefaults

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def llm():
    tokenizer = support_tokenizer.byte_level()
    made = LLM.from_engine(fake_engine(tokenizer), tokenizer)
    yield made
    core = core_of(made)
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
        assert only.text == decode_output(llm.tokenizer, only.token_ids)
        assert only.cumulative_logprob == pytest.approx(-0.5 * len(only.token_ids))


def test_prompts_are_scored_alone(llm):
    prompt = [3 + i % 50 for i in range(llm.facts.max_model_len)]
    [output] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert [record.token_id for record in output.prompt_logprobs[1:]] == prompt[1:]


def test_n_completions(llm):
    params = SamplingParams(temperature=1, seed=3, n=4, max_tokens=3)
    (output,) = llm.generate("a", params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    seeds = {
        request.sampling.seed for plan in core_of(llm).runner.plans for request in plan.new_requests
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
        ([[1, 2.0]], GREEDY, "token id 2.0"),
        ([[True]], GREEDY, "token id True"),
        ([[1]] * 2, [GREEDY] * 3, "3 sampling parameters"),
        ([[1] * 256], GREEDY, "256 tokens"),
        ("a", SamplingParams(logit_bias={99999: 1.0}), "vocabulary"),
        (5, GREEDY, "prompts is 5; it must be text, a list of token ids, "),
        (None, GREEDY, "prompts is None; it must be text"),
        (b"abc", GREEDY, "prompts is b'abc'; it must be text"),
        (["a", 5], GREEDY, r"prompts\[1\] is 5; it must be text"),
        ([1.5], GREEDY, r"prompts\[0\] is 1.5; it must be text"),
        ({"prompt_token_ids": 5}, GREEDY, "prompt_token_ids is 5; it must be a list of token ids"),
        ("a", {"temperature": 0}, "params is {'temperature': 0}; it must be a SamplingParams"),
        ("a", [5], r"params is \[5\]; it must be a SamplingParams"),
    ],
)
def test_bad_requests(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)


def test_prompts_may_come_from_an_iterator(llm):
    assert len(llm.generate((text for text in ("one", "two")), GREEDY)) == 2


def test_one_prompt_is_streamed(llm):
    with pytest.raises(RequestError, match="prompt is 5; it must be text"):
        list(llm.stream(5, GREEDY))


@pytest.mark.parametrize(
    "messages",
    ["hi", None, [], ["hi"], [[]], [["hi"]], {"role": "user", "content": "hi"}],
    ids=repr,
)
def test_what_is_no_conversation(llm, messages):
    with pytest.raises(
        RequestError, match=r"messages is .*; it must be a list of messages such as"
    ):
        llm.chat(messages, GREEDY)


def test_a_long_value_is_told_in_short(llm):
    with pytest.raises(RequestError, match=r"params is b'x{77}…; it must be"):
        llm.generate("a", b"x" * 5000)


def test_a_failed_step_is_an_engine_error_and_leaves_nothing():
    tokenizer = support_tokenizer.byte_level()
    llm = LLM.from_engine(fake_engine(tokenizer, fail_at={1: ValueError("boom")}), tokenizer)
    with pytest.raises(EngineError, match="boom"):
        llm.generate(["a", "b"], GREEDY)
    assert not core_of(llm).has_work()
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
        ({"block_size": "a"}, "cache.block_size is 'a'; it must be an integer"),
        ({"max_num_seqs": True}, "scheduler.max_num_seqs is True; it must be an integer"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be true or false"),
        ({"memory_fraction": "half"}, "cache.memory_fraction is 'half'; it must be a number"),
        ({"bundle": 5}, "compile.bundle is 5; it must be text or None"),
        ({"max_model_len": 1.5}, "max_model_len is 1.5; it must be an integer, text or None"),
        ({"replay_tokens": 4}, "runtime.replay_tokens is 4; it must be a list of integers"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        engine_config("DIR", options)


def test_options_may_be_paths_and_lists(tmp_path):
    config = engine_config(tmp_path, {"bundle": tmp_path / "b", "replay_tokens": [8, 16]})
    assert config.model.source == str(tmp_path)
    assert config.compile.bundle == str(tmp_path / "b")
    assert config.runtime.replay_tokens == (8, 16)


@pytest.mark.parametrize("model", [None, 5, ["smollm2"]])
def test_a_model_is_named_by_text(model):
    with pytest.raises(ConfigError, match=r"model is .*; it must be text: a built-in name such as"):
        LLM(model)


def test_a_model_that_is_nowhere():
    with pytest.raises(SourceError, match=r"unknown model 'no/such/dir': nothing is at .*/no/such"):
        LLM("no/such/dir")


def test_threads_are_refused_before_they_are_set():
    with pytest.raises(ConfigError, match=r"target.threads is -1; it must be 0"):
        target_of(engine_config("DIR", {"threads": -1}))


@pytest.mark.parametrize("config", [None, "smollm2"])
def test_compile_takes_a_configuration(config):
    with pytest.raises(
        ConfigError, match=r"it takes an EngineConfig. By a model's name: `girih co"
    ):
        compile_model(config)


def test_a_server_default_of_zero_counts() -> None:
    defaults = SamplingDefaults({"temperature": 0.6}, SamplingConfig(temperature=0.0))
    assert defaults.build({}, max_tokens=8).temperature == 0.0
    assert SamplingDefaults({"temperature": 0.6}).build({}, max_tokens=8).temperature == 0.6


def test_streams_read_in_turns_lose_nothing(llm):
    whole = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in ("a", "bcd", "ef")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("a", "bcd", "ef")]
    read = [[] for _ in streams]
    for news in itertools.zip_longest(*streams):
        for found, delta in zip(read, news, strict=True):
            found += delta.token_ids if delta is not None else []
    assert read == [output.token_ids for output in whole]


def test_prompts_may_be_completed_while_a_stream_is_read(llm):
    other = llm.generate("bcd", GREEDY)[0].outputs[0].text
    whole = llm.generate("a", GREEDY)[0].outputs[0].token_ids
    read = []
    for delta in llm.stream("a", GREEDY):
        read += delta.token_ids
        assert llm.generate("bcd", GREEDY)[0].outputs[0].text == other
    assert read == whole


def test_threads_share_a_model(llm):
    prompts = ["a", "bcd", "ef", "ghij"]
    params = SamplingParams(temperature=0, max_tokens=30)
    alone = [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]

    def ask(place):
        stop = SamplingParams(temperature=0, max_tokens=30, stop=(alone[place][9:12],))
        for _ in range(10):
            next(llm.stream(prompts[place], params))  # left early
            assert llm.generate(prompts[place], stop)[0].outputs[0].text == alone[place][:9]
            with pytest.raises(RequestError):
                llm.generate([[1], [99999]], params)
            assert llm.generate(prompts[place], params)[0].outputs[0].text == alone[place]
        return True

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert all(threads.map(ask, range(len(prompts))))


def test_a_refusal_leaves_what_others_run():
    tokenizer = support_tokenizer.byte_level()
    llm = LLM.from_engine(fake_engine(tokenizer, max_num_waiting=2), tokenizer)
    whole = llm.generate("a", GREEDY)[0].outputs[0].text
    stream = llm.stream("a", GREEDY)
    text = next(stream).text
    with pytest.raises(QueueFullError, match="max_num_waiting"):
        llm.generate(["b", "c", "d"], GREEDY)
    text += "".join(delta.text for delta in stream)
    assert text == whole
    assert not core_of(llm).has_work()


def test_a_closed_model_says_so():
    tokenizer = support_tokenizer.byte_level()
    made = LLM.from_engine(fake_engine(tokenizer), tokenizer)
    stream = made.stream("a", GREEDY)
    next(stream)
    made.close()
    made.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        made.generate("a", GREEDY)
    with pytest.raises(EngineError, match="closed"):
        made.reset_prefix_cache()


def test_a_seed_at_the_end_of_its_range_has_successors(llm):
    params = SamplingParams(temperature=1, seed=2**64 - 1, n=2, max_tokens=3)
    assert len(llm.generate("a", params)[0].outputs) == 2
