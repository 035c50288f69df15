import dataclasses
import itertools

import pytest

from girih.conf import schema
from girih.conf.compose import compose_config, to_engine_config
from girih.conf.files import default_settings, group_options, load_opt_level, read_option
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.records import to_record
from girih.passes.options import PASS_NAMES
from girih.runtime.records.config import EngineConfig
from girih.serve.config import SamplingConfig, ServeConfig


@pytest.mark.parametrize("verb", schema.VERBS)
def test_reading_without_hydra_gives_what_hydra_composes(verb):
    assert default_settings(verb) == compose_config(verb, [])


def test_defaults_are_the_records_own():
    config = to_engine_config(compose_config("generate", []))
    own = EngineConfig()
    assert dataclasses.replace(config, opt=own.opt) == own
    served = to_engine_config(compose_config("serve", []))
    serving = dataclasses.replace(
        own,
        runtime=dataclasses.replace(own.runtime, process="process"),
        scheduler=dataclasses.replace(own.scheduler, target_step_ms=100.0),
    )
    assert dataclasses.replace(served, opt=own.opt) == serving
    assert to_record(ServeConfig, compose_config("serve", [])["serve"]) == ServeConfig()
    assert to_record(SamplingConfig, compose_config("serve", [])["sampling"]) == SamplingConfig()


@pytest.mark.parametrize("verb", ["serve", "bench offline"])
def test_every_group_option_composes(verb):
    groups = [group for group in schema.GROUPS if group in schema.VERBS[verb].sections]
    options = {g: [o for o in group_options(g) if o != "custom"] for g in groups}
    for index in range(max(map(len, options.values()))):
        chosen = {group: names[index % len(names)] for group, names in options.items()}
        config = compose_config(verb, [f"{group}={name}" for group, name in chosen.items()])
        assert config["opt"]["level"] == chosen["opt"]


def test_levels_grow_strictly():
    def switched_on(level):
        passes = load_opt_level(level).passes
        return {f.name for f in dataclasses.fields(passes) if getattr(passes, f.name).enabled}

    levels = group_options("opt")
    assert levels == sorted(levels)
    for lower, higher in itertools.pairwise(levels):
        assert switched_on(lower) <= switched_on(higher)
        assert load_opt_level(lower) != load_opt_level(higher)
        assert read_option("opt", higher)["level"] == higher
    assert not load_opt_level("O0").compile
    assert load_opt_level("O2").compile


def test_every_pass_is_a_switch():
    names = PASS_NAMES
    for level, value in (("O0", "true"), ("O2", "false")):
        for form in ("", ".enabled"):
            words = [f"opt.passes.{name}{form}={value}" for name in names]
            opt = to_engine_config(compose_config("explain", [f"opt={level}", *words])).opt
            assert opt.runs() == (PASS_NAMES if value == "true" else ())


@pytest.mark.parametrize(
    "text",
    ["a, b = ${c} '\"\n", "[1, 2]", "{x}", "null and void", "x=y", "ünï 😀 你好", "\\", "#!"],
)
def test_prompts_are_taken_literally(text):
    assert compose_config("generate", [f"prompt={text}"])["prompt"] == text


def test_lists_and_null():
    config = compose_config("generate", ["prompts=[a,'b, c']", "stop=###", "seed=null"])
    assert config["prompts"] == ("a", "b, c")
    assert config["sampling"]["stop"] == ("###",)
    assert config["sampling"]["seed"] is None
    two = compose_config("generate", ["stop=['a','b']", "bundle=null"])
    assert two["sampling"]["stop"] == ("a", "b")
    assert two["compile"]["bundle"] is None


def test_words_for_true_numbers_and_nothing_are_understood():
    words = ["chat=yes", "stop=[1,a]", "seed=None", "temperature=1", "opt.strict=off"]
    config = compose_config("generate", words)
    assert config["chat"] is True
    assert config["opt"]["strict"] is False
    assert config["sampling"]["stop"] == ("1", "a")
    assert config["sampling"]["seed"] is None
    assert config["sampling"]["temperature"] == 1.0


def test_short_names_reach_their_keys():
    for name, key in schema.ALIASES.items():
        verbs = [verb for verb in schema.VERBS if key in schema.leaf_types(verb)]
        assert verbs, f"{name} stands for {key}, which no verb has"
    config = compose_config("serve", ["port=81", "bundle=/b c/d", "max_model_len=99"])
    assert config["serve"]["port"] == 81
    assert config["compile"]["bundle"] == "/b c/d"
    assert config["model"]["max_model_len"] == 99
    assert compose_config("serve", ["max_model_len=auto"])["model"]["max_model_len"] == "auto"
    with pytest.raises(ConfigError, match="'long'; it must be at least 2 tokens, or 'auto'"):
        to_engine_config(compose_config("serve", ["max_model_len=long"]))


@pytest.mark.parametrize("source", ["./some dir/x", "/a/b.gguf", "b.gguf", "org/name", "gpt2"])
def test_a_model_may_be_any_source(source):
    config = to_engine_config(compose_config("generate", [f"model={source}", "dtype=float32"]))
    assert config.model.source == source
    assert config.model.dtype == "float32"


def test_a_model_may_be_a_directory_here(tmp_path, monkeypatch):
    (tmp_path / "smolm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert compose_config("fetch", ["model=smolm2"])["model"]["source"] == "smolm2"


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("scheduler.max_num_seq=3", "did you mean 'scheduler.max_num_seqs'"),
        ("schedular.x=1", "did you mean 'scheduler"),
        ("opt.passes.pack_linear.enabled=true", "did you mean 'opt.passes.pack_linears.enabled'"),
        ("opt.passes.pack_linear=true", "did you mean 'opt.passes.pack_linears'"),
        ("max_token=3", "did you mean 'max_tokens'"),
        ("promt=x", "did you mean 'prompt'"),
        ("zzz=1", "unknown key 'zzz'"),
        ("port=1", "unknown key 'port'"),
        ("opt=O9", "Allowed: O0"),
        ("model=smolm2", "did you mean 'smollm2'"),
        ("model=", "unknown option"),
        ("sampling=greddy", "did you mean 'greedy'"),
        ("max_tokens=many", "sampling.max_tokens is 'many'; it must be an integer or None"),
        ("max_tokens=1.5", "it must be an integer"),
        ("temperature=warm", "it must be a number"),
        ("chat=maybe", "chat is 'maybe'; it must be true or false"),
        ("prompts=[a", "cannot read 'prompts=[a'; a list is written [a,b]"),
        ("kv_dtype=int8", "did you mean 'cache.kv_dtype'?"),
        ("seed=1,2", "'sampling.seed=1,2'"),
        ("prompts=[${nothing}]", "nothing"),
        ("opt.level=O0", "opt.level is only a name; write opt=O0"),
        ("word", "not a setting"),
        ("+x=1", "unknown key"),
        ("~opt", "not a setting"),
    ],
)
def test_mistakes_are_explained(word, words):
    with pytest.raises(ConfigError) as caught:
        compose_config("generate", [word])
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_values_outside_their_range_are_config_errors():
    for word in ("scheduler.max_num_seqs=0", "dtype=float99", "cache.block_size=5"):
        with pytest.raises(ConfigError):
            to_engine_config(compose_config("generate", [word]))


def test_a_misspelt_value_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="one of fcfs, priority; did you mean 'fcfs'"):
        to_engine_config(compose_config("generate", ["scheduler.policy=fcsf"]))


def test_every_key_has_a_description():
    for record in (*schema.SECTIONS.values(), *(verb.keys for verb in schema.VERBS.values())):
        notes = schema.describe(record)
        missing = {field.name for field in dataclasses.fields(record)} - set(notes)
        assert missing <= {"dump"}, f"{record.__name__} does not describe {missing}"


def test_composing_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose_config("serve", [])
    assert list(tmp_path.iterdir()) == []
