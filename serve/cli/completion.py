"""Completion of the command line in a shell: the scripts, and what they ask for.

The scripts know nothing: on every Tab they run `girih completion words CURRENT WORD…`, so what is
offered is what this version takes.
"""

from __future__ import annotations

from collections.abc import Iterable

from girih.conf import schema
from girih.conf.files import group_options
from girih.serve.cli.flags import FLAGS
from girih.serve.cli.verbs import VERBS

SHELLS = ("bash", "zsh", "fish")
FILES = "<files>"
"""Stands for "a path": the shell completes it."""

PATHS = (
    "file",
    "input",
    "output",
    "load",
    "bundle",
    "dump",
    "json",
    "records",
    "plots",
    "workload_file",
    "source",
    "before",
    "after",
)
"""Last parts of keys whose text is a path."""

_BASH = """\
_girih() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    local -a words
    IFS=' ' read -r -a words <<< "$line"
    [[ "$line" == *' ' ]] && words+=('')
    local current="${words[-1]}"
    local found
    found=$(girih completion words "${words[@]:1}" 2>/dev/null) || return
    local key=""
    [[ "$current" == *=* ]] && key="${current%%=*}="
    if [[ "$found" == '<files>' ]]; then
        COMPREPLY=($(compgen -f -- "${current#"$key"}"))
        compopt -o filenames 2>/dev/null
        return
    fi
    COMPREPLY=($(compgen -W "$found" -- "$current"))
    # bash breaks words at "=": it replaces only what follows the last one.
    COMPREPLY=("${COMPREPLY[@]#"$key"}")
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _girih girih
"""
_ZSH = """\
#compdef girih
_girih() {
    local -a found keys rest
    found=("${(@f)$(girih completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ "$found[1]" == '<files>' ]]; then
        compset -P '*='
        _files
        return
    fi
    keys=("${(@M)found:#*=}")
    rest=("${(@)found:#*=}")
    (( $#keys )) && compadd -S '' -- "${(@)keys}"
    (( $#rest )) && compadd -- "${(@)rest}"
}
compdef _girih girih
"""
_FISH = """\
function __girih_words
    set -l words (commandline -opc)[2..-1] (commandline -ct)
    set -l found (girih completion words $words 2>/dev/null)
    if test "$found" = '<files>'
        set -l key (string match -r '^[^=]*=' -- (commandline -ct))
        for path in (__fish_complete_path (string replace -r '^[^=]*=' '' -- (commandline -ct)))
            echo "$key$path"
        end
        return
    end
    printf '%s\\n' $found
end
complete -c girih -f -a '(__girih_words)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str) -> str:
    """Return the completion script of a shell in `SHELLS`."""
    return _SCRIPTS[shell]


def candidates(words: list[str]) -> list[str]:
    """Return what the last word may become.

    Args:
        words: what follows `girih` on the line; the last one is being typed, maybe empty.

    Returns:
        Whole words; those that end in "=" want a value. `[FILES]` asks for a path.
    """
    *before, current = words or [""]
    is_help = before[:1] == ["help"]
    before = before[is_help:]
    verb = _verb_of(before)
    if current.startswith("-"):
        return _starting(current, FLAGS)
    if verb is None or is_help:
        return _starting(current, [*_next_verb_words(before), *([] if before else ["help"])])
    if verb == "completion":
        return _starting(current, SHELLS) if len(before) == 1 else []
    key, equals, value = current.partition("=")
    if equals:
        return _values(verb, key, value)
    words = [*_next_verb_words(before), *(f"{key}=" for key in schema.key_names(verb))]
    return _starting(current, words + (_bare_words(verb) if current else []))


def _bare_words(verb: str) -> list[str]:
    """Values that may stand alone."""
    if verb == "models rm":
        from girih.serve.cli.local_models import local_models

        return [model.name for model in local_models() if model.path is not None]
    if schema.VERBS[verb].positional != "model":
        return []
    return [name for name in group_options("model") if name != "custom"]


def _verb_of(before: list[str]) -> str | None:
    words = [word for word in before if not word.startswith("-")]
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in VERBS:
            return name
    return None


def _next_verb_words(before: list[str]) -> list[str]:
    typed = [word for word in before if not word.startswith("-")]
    names = [name.split() for name in VERBS]
    return list(
        dict.fromkeys(
            name[len(typed)]
            for name in names
            if name[: len(typed)] == typed and len(name) > len(typed)
        )
    )


def _values(verb: str, key: str, typed: str) -> list[str]:
    if key in schema.GROUPS and key in schema.VERBS[verb].sections:
        options = [name for name in group_options(key) if name != "custom"]
        found = [f"{key}={name}" for name in options if name.startswith(typed)]
        return found if found or key != "model" else [FILES]
    full = schema.ALIASES.get(key, key)
    kind = schema.leaf_types(verb).get(full)
    known = ("true", "false") if kind is bool else schema.choices(verb).get(full)
    if known is not None:
        return _starting(f"{key}={typed}", (f"{key}={value}" for value in known))
    is_path = kind in (str, str | None) and key.rpartition(".")[2] in PATHS
    return [FILES] if is_path else []


def _starting(word: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(word)]
