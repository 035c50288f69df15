"""The `girih` command: finds the verb, shows help, and turns errors into exit codes.

Exit codes: 0 done, 1 the work failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from girih import __version__
from girih.kernels.base.errors import ConfigError, GirihError
from girih.serve.cli.find_verb import family_of, find_verb
from girih.serve.cli.flags import FLAGS
from girih.serve.cli.verbs import VERBS, Options, Verb

COMPLETE = ["completion", "words"]  # what completion scripts ask; flags among the words are data


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == COMPLETE:
        from girih.serve.cli.completion import candidates

        print("\n".join(candidates(words[2:])))
        return 0
    flags = {word for word in words if word in FLAGS}
    try:
        return _dispatch([word for word in words if word not in FLAGS], flags)
    except BrokenPipeError:  # the reader of our output left; a second error on exit helps nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except GirihError as error:
        if "--debug" in flags:
            raise
        print(f"girih: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str], flags: set[str]) -> int:
    words, wants_help = _asks_for_help(words, flags)
    if words == ["version"] or flags & {"-V", "--version"}:
        print(f"girih {__version__}")
        return 0
    if not words:
        from girih.serve.cli.help import overview

        print(overview())
        return 0
    family = family_of(words[0])
    if wants_help and family and len(words) == 1:
        from girih.serve.cli.help import family_screen

        print(family_screen(family))
        return 0
    verb, rest = find_verb(words)
    if wants_help:
        from girih.serve.cli.help import verb_screen

        print(verb_screen(verb, full="--help-all" in flags))
        return 0
    rest = _settings(verb, rest)
    if "--cfg" in flags:
        return _print_settings(verb, rest)
    quiet = bool(flags & {"-q", "--quiet"})
    return verb.load().run(rest, Options(quiet=quiet, debug="--debug" in flags))


def _asks_for_help(words: list[str], flags: set[str]) -> tuple[list[str], bool]:
    """Return the words without `help`, and whether help is wanted."""
    if words[:1] == ["help"]:
        return words[1:], True
    *before, last = words or [""]
    if last == "help" and before and (" ".join(before) in VERBS or family_of(" ".join(before))):
        return before, True
    return words, bool(flags & {"-h", "--help", "--help-all"})


def _settings(verb: Verb, words: list[str]) -> list[str]:
    """Return `key=value` words; the name of a shell is none."""
    if verb.name == "completion" or all("=" in w.strip("=") and w[0] != "-" for w in words):
        return words
    from girih.serve.cli.words import as_settings

    return as_settings(verb.name, words)


def _print_settings(verb: Verb, words: list[str]) -> int:
    import yaml

    from girih.conf.compose import compose_config

    print(yaml.safe_dump(compose_config(verb.name, words), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
