"""Run the checks of `kvbench check method` and `kvbench check task`, and print a line for each."""

import time
from collections.abc import Callable, Sequence

from kvbench.validation import ContractError, SettingError

Check = Callable[[], str]  # returns a remark on what it found


class CheckFailed(Exception):
    """A check found something wrong; the message is one line."""


class NotApplicable(Exception):
    """A check has nothing to check; the message says why."""


def print_checks(checks: Sequence[tuple[str, Check]]) -> int:
    """Run checks and print a line for each: `ok`, `FAIL` with the reason, or `-` where there is nothing to check.

    Args:
        checks: Title and check of each.

    Returns:
        How many failed.
    """
    failed, last, begin = 0, "", time.perf_counter()
    width = max(len(title) for title, _ in checks)
    for title, check in checks:
        try:
            mark, remark = "ok", check()
        except NotApplicable as reason:
            mark, remark = "-", str(reason)
        except Exception as error:
            known = isinstance(error, CheckFailed | ContractError | SettingError)
            line = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
            mark, remark = "FAIL", "the same" if line == last else line
            failed, last = failed + 1, line
        print(f"{mark:<5} {title:<{width}}  {remark}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} in {time.perf_counter() - begin:.0f} s")
    return failed
