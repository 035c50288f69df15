"""Which pass is at fault: halve the pipeline until the first bad prefix is found."""

from __future__ import annotations

from collections.abc import Callable

from girih.kernels.base.errors import PassError


def first_bad_pass(names: tuple[str, ...], is_good: Callable[[tuple[str, ...]], bool]) -> str:
    """Return the pass after which a check fails for the first time.

    Args:
        names: the passes that run, in order.
        is_good: the check, given the first passes of `names`; it is asked about log2(n) + 2 of
            these prefixes.

    Raises:
        PassError: the check fails without any pass, or holds with all of them.
    """
    if not is_good(()):
        raise PassError("the check fails without any pass, so no pass is at fault")
    if is_good(names):
        raise PassError(f"the check holds with all of {', '.join(names) or 'no passes'}")
    good, bad = 0, len(names)  # the check holds after `good` passes and fails after `bad`
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_good(names[:middle]):
            good = middle
        else:
            bad = middle
    return names[good]
