"""The `girih` command: finds the verb, shows help, and turns errors into exit codes.

Exit codes: 0 done, 1 the work failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from girih import __version__
from girih.kernels.errors import ConfigError, GirihError
from girih.serve.cli_flags import FLAGS
from girih.serve.commands import VERBS, Options, Verb

COMPLETE = ["completion", "words"]  # what completion scripts ask; flags among the words are data


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == COMPLETE:
        from girih.serve.cli_completion import candidates

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
    wants_help = bool(flags & {"-h", "--help", "--help-all"})
    if "--version" in flags:
        print(f"girih {__version__}")
        return 0
    if not words:
        from girih.serve.cli_help import overview

        print(overview())
        return 0
    family = _family(words[0])
    if wants_help and family and len(words) == 1:
        from girih.serve.cli_help import family_screen

        print(family_screen(family))
        return 0
    verb, rest = _find_verb(words)
    if wants_help:
        from girih.serve.cli_help import verb_screen

        print(verb_screen(verb, full="--help-all" in flags))
        return 0
    _refuse_unknown_flags(rest)
    if "--cfg" in flags:
        return _print_settings(verb, rest)
    quiet = bool(flags & {"-q", "--quiet"})
    return verb.load().run(rest, Options(quiet=quiet, debug="--debug" in flags))


def _find_verb(words: list[str]) -> tuple[Verb, list[str]]:
    """Return the verb, of one word or two, and the words after it."""
    for count in (2, 1):
        verb = VERBS.get(" ".join(words[:count]))
        if verb is not None:
            return verb, words[count:]
    family = _family(words[0])
    if family:
        seen = f", not '{words[1]}'" if len(words) > 1 else ""
        allowed = " or ".join(f"`girih {verb.name}`" for verb in family)
        raise ConfigError(f"`girih {words[0]}` needs a second word: {allowed}{seen}")
    from difflib import get_close_matches

    close = get_close_matches(words[0], VERBS, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise ConfigError(f"unknown verb '{words[0]}'; {hint}Verbs: {', '.join(VERBS)}")


def _family(word: str) -> list[Verb]:
    """Return the verbs of two words that begin with `word`, unless it is one by itself."""
    if word in VERBS:
        return []
    return [verb for name, verb in VERBS.items() if name.startswith(f"{word} ")]


def _refuse_unknown_flags(words: list[str]) -> None:
    for word in words:
        if word.startswith("-"):
            key = word.lstrip("-").partition("=")[0]
            raise ConfigError(
                f"unknown flag '{word}'; settings are written without dashes, e.g. "
                f"{key.replace('-', '_') or 'key'}=VALUE, and flags are {', '.join(FLAGS)}"
            )


def _print_settings(verb: Verb, words: list[str]) -> int:
    import yaml

    from girih.conf.compose import compose_config

    print(yaml.safe_dump(compose_config(verb.name, words), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
