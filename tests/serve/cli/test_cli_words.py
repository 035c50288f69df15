"""What people write who know other tools: accepted where it is certain, else corrected."""

import pytest

from girih import __version__
from girih.conf import schema
from girih.kernels.base.errors import ConfigError
from girih.serve.cli import main as cli
from girih.serve.cli.find_verb import MEANT
from girih.serve.cli.verbs import VERBS
from girih.serve.cli.words import OTHER_NAMES, as_settings


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("serve smollm2", "model=smollm2"),
        ("serve smolm2", "model=smolm2"),  # composing names the nearest
        ("serve org/name port=1", "model=org/name port=1"),
        ("serve ./x.gguf", "model=./x.gguf"),
        ("serve --port 8000", "port=8000"),
        ("serve --port=8000 --host 0.0.0.0", "port=8000 host=0.0.0.0"),
        ("serve -p 1 -m smollm2", "port=1 model=smollm2"),
        ("serve --max-model-len 99", "max_model_len=99"),
        ("serve --max-num-batched-tokens 9", "scheduler.max_num_batched_tokens=9"),
        ("serve --served-model-name x", "serve.model_names=x"),
        ("serve --api-key k", "serve.api_keys=k"),
        ("chat --api-key k", "api_key=k"),
        ("serve --enable-prefix-caching", "cache.enable_prefix_caching=true"),
        ("serve --no-enable-prefix-caching", "cache.enable_prefix_caching=false"),
        (
            "generate -p Hi -n 3 --temp 0.5 --seed -1",
            "prompt=Hi max_tokens=3 temperature=0.5 seed=-1",
        ),
        ("generate --chat --prompt a", "chat=true prompt=a"),
        ("generate --chat false", "chat=false"),
        ("generate prompt=--x", "prompt=--x"),
        ("chat http://127.0.0.1:1", "url=http://127.0.0.1:1"),
        ("chat --base-url URL", "url=URL"),
        ("chat localhost:8000", "url=localhost:8000"),
        ("chat 127.0.0.1:8000/v1", "url=127.0.0.1:8000/v1"),
        ("run-batch -i a -o b", "input=a output=b"),
        ("bench serve --url URL --model m", "base_url=URL model=m"),
        ("sweep smollm2 opt=O0,O1", "model=smollm2 opt=O0,O1"),
    ],
)
def test_what_is_certain_becomes_a_setting(line, settings):
    verb, words = _split(line)
    assert as_settings(verb, words) == settings.split()


def _split(line):
    words = line.split()
    count = 2 if " ".join(words[:2]) in VERBS else 1
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serve --port", "--port needs a value: write port=VALUE"),
        ("serve --port --host x", "--port needs a value"),
        ("serve --prot 1", "did you mean port=VALUE"),
        ("serve --max-batched-tokens 1", "did you mean scheduler.max_num_batched_tokens=VALUE"),
        ("serve --tensor-parallel-size 2", "one device runs the whole model"),
        ("serve --enforce-eager", "opt=O0"),
        ("serve -x", "unknown flag '-x'"),
        ("serve port = 8000", "write port=8000, without spaces"),
        ("serve port =8000", "write port=8000, without spaces"),
        ("serve port= 8000", "write port=8000, without a space"),
        ("serve port 8000", "write port=8000, without spaces"),
        ("serve port", "write port=VALUE"),
        ("serve smollm2 minilm", "one word too many after 'smollm2'"),
        ("serve =8000", "no key before the ="),
        ("serve prot", "did you mean port=VALUE"),
        ("serve zzzzz", "nor a model: gemma3_270m, minilm, smollm2, a directory"),
        ("serve smollm2 8000", "did you mean port=8000?"),
        ("serve localhost:8000", "'localhost:8000' is neither a setting"),
        ("run-batch a.jsonl b.jsonl", "a file is input=a.jsonl"),
        ("cache prune --all", "max_gib=0 removes all"),
        ("generate hello", "a text is prompt=hello"),
        ("generate smollm2 hello", "a text is prompt=hello"),
        ("cache list zzz", "settings are written key=value ("),
        ("bench serve http://x", "'http://x' is not a setting"),
    ],
)
def test_what_is_not_certain_is_told_with_the_words_to_write(line, told):
    verb, words = _split(line)
    with pytest.raises(ConfigError) as caught:
        as_settings(verb, words)
    assert told in str(caught.value)


def test_a_text_of_several_words_is_quoted_in_the_correction():
    with pytest.raises(ConfigError, match="prompt='hello there'"):
        as_settings("generate", ["hello there"])


def test_a_directory_is_a_model_even_with_a_space(tmp_path, monkeypatch):
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_settings("serve", ["my model"]) == ["model=my model"]


def test_names_of_other_tools_lead_to_keys_of_some_verb():
    known = {key for verb in schema.VERBS for key in schema.key_names(verb)}
    assert {key for keys in OTHER_NAMES.values() for key in keys} <= known


def test_every_flag_of_a_verb_is_understood():
    for verb in schema.VERBS:
        for key in schema.key_names(verb):
            flag = "--" + key.replace("_", "-")
            assert as_settings(verb, [f"{flag}=x"]) == [f"{key}=x"]


def run(capsys, *words):
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        (["help"], []),
        (["help", "serve"], ["serve", "--help"]),
        (["serve", "help"], ["serve", "--help"]),
        (["help", "bench"], ["bench", "--help"]),
        (["bench", "help"], ["bench", "--help"]),
        (["bench", "serve", "help"], ["bench", "serve", "--help"]),
        (["help", "serve", "--help-all"], ["serve", "--help-all"]),
        (["version"], ["--version"]),
        (["-V"], ["--version"]),
    ],
)
def test_ways_to_ask_for_help(capsys, words, same_as):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert (code, out, err) == run(capsys, *same_as)


def test_a_text_may_be_help(capsys):
    code, out, _ = run(capsys, "generate", "--prompt", "help", "--cfg")
    assert (code, "prompt: help" in out) == (0, True)


def test_what_other_tools_call_a_verb_leads_to_ours():
    for ours in MEANT.values():
        assert ours.removesuffix(" --cfg") in VERBS


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pull", "smollm2"], "did you mean `girih fetch smollm2`?"),
        (["run", "smollm2"], "did you mean `girih chat smollm2`?"),
        (["serv", "smollm2", "--port", "1"], "did you mean `girih serve smollm2 --port 1`?"),
        (["models", "remove", "x"], "did you mean `girih models rm x`?"),
        (["serv"], "did you mean `girih serve`?"),
        (["model"], "did you mean `girih models`?"),
        (["girih", "serve"], "did you mean `girih serve`?"),
        (["cache"], "needs a second word"),
        (["cache", "ls"], "did you mean `girih cache list`?"),
        (["cache", "lst"], "did you mean `girih cache list`?"),
        (["--port", "1"], "'--port' is no verb; one comes first: `girih serve`"),
        (["model=smollm2"], "`girih serve model=smollm2`"),
        (["org/name"], "`girih serve org/name`"),
        (["smollm2"], "`girih serve smollm2`"),
        (["xyz"], "`girih help` lists the verbs"),
    ],
)
def test_an_unknown_verb_is_answered_in_one_short_line(capsys, words, told):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err) < 200


def test_the_version_is_the_package_s(capsys):
    assert run(capsys, "version")[1] == f"girih {__version__}\n"
