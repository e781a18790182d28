"""Errors that a user sees in one line, the checks that raise them, and the handling of garbage."""

import errno
import gc
import json
import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")
Count = TypeVar("Count")  # int, or a tensor, which this module does not import

EMBEDDED_MODELS = ("reference", "reference_v2")  # models whose weights the project holds
LISTED = 10  # most names that a message lists if it can do without
CLOSE = 0.7  # least similarity of two names of which one may be misspelt, as difflib measures it
SHORTENED = 3  # fewest letters of a name from which the whole one is guessed
STORAGE = tuple(
    getattr(errno, f"E{name}")
    for name in (
        *("NOSPC", "DQUOT", "FBIG", "ROFS", "ACCES", "PERM", "IO", "NAMETOOLONG"),  # what cannot be written
        *("MFILE", "NFILE", "INTR", "BUSY", "TXTBSY", "XDEV", "MLINK", "INVAL", "NXIO", "NODEV", "NOTDIR", "ISDIR"),
        *("NOLCK", "NOTSUP", "OPNOTSUPP", "NOSYS", "STALE", "REMOTEIO", "TIMEDOUT", "HOSTDOWN"),  # network file systems
    )
    if hasattr(errno, f"E{name}")
)  # errors of a file that are about its disk or its name, and not about kvbench


class SettingError(ValueError):
    """A setting cannot be used. The message is one line: the setting, its value, and what is allowed."""


class ContractError(RuntimeError):
    """A method, an allocator, a codec or a task broke its contract. The message is one line that names it and its hook.

    Args:
        message: The line.
        spoils_model: Whether the model's weights were changed. If so, the model must be loaded again.
    """

    def __init__(self, message: str, spoils_model: bool = False) -> None:
        super().__init__(message)
        self.spoils_model = spoils_model


def make_contract_error(owner: str, hook: str, error: BaseException, where: str = "") -> ContractError:
    """Return the error about a hook that raised. It names the last line of code that is not in an installed package.

    Args:
        owner: Who has the hook, such as "method=snapkv".
        hook: The hook's name.
        error: What it raised.
        where: Follows the hook's name in the message, such as " of layer 3".
    """
    from traceback import extract_tb  # imported only when something is wrong

    frames = extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "-packages" not in frame.filename), frames[-1])
    reason = " ".join(str(error).split()) or "no message"
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return ContractError(f"{owner}: {hook}{where} raised {type(error).__name__}: {reason} ({place})")


def call_hook(
    owner: str,
    hook: str,
    work: Callable[[], T],
    where: str = "",
    passed_on: tuple[type[BaseException], ...] = (ContractError, SettingError),
) -> T:
    """Call what somebody else wrote: a hook of a method or codec, or a task.

    Args:
        owner: Whose it is, such as "method=snapkv" or "task=ruler".
        hook: The hook's name.
        work: Calls the hook.
        where: Follows the hook's name in the message, such as " of layer 3".
        passed_on: Errors that pass as they are, because they already say what is wrong.

    Raises:
        ContractError: The hook raised any other error. The message names the last line that is not in an installed
            package.
    """
    try:
        return work()
    except passed_on:
        raise
    except (Exception, SystemExit) as error:
        raise make_contract_error(owner, hook, error, where) from error


class NumericalError(ContractError):
    """The model computed numbers that are not finite. The message is one line that names the model and its dtype."""


def summarize(error: BaseException) -> str:
    """Return the message of another library's error as one line of at most 120 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:120]


@contextmanager
def refuse_on_error(label: str) -> Iterator[None]:
    """Turn any error of another library inside into a SettingError of one line, which begins with `label`.

    Libraries that read files may fail in any way on damaged ones, also with a panic of Rust, which is no `Exception`.
    That a GPU's memory does not suffice is passed on.
    """
    try:
        yield
    except (SettingError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise SettingError(f"{label} ({summarize(error)})") from None


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no cyclic garbage inside."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def exempt_imports_from_collection() -> None:
    """Let the search for cyclic garbage skip all that exists now, once per process.

    PyTorch and its companions leave half a million objects, which every full collection would visit. To be called
    before a model is loaded, because what exists then and becomes cyclic garbage is never freed.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def name_file_in_errors(path: Path | str) -> Iterator[None]:
    """Add the file's name to an OSError that has none, because Python's `write` raises such errors."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def describe_write_error(error: OSError) -> str | None:
    """Return the line about a file that could not be written, for example because the disk is full or read-only.

    Returns:
        The line, or None if the error is about something else.
    """
    if error.errno not in STORAGE or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}"


def format_value(value: object) -> str:
    """Format a value as it is typed after `setting=`: `null`, `true`, `[a,b]`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(format_value, value)) + "]"
    return str(value)


def require_choice(name: str, value: object, allowed: Iterable[object], listed_by: str | None = None) -> None:
    """Raise a SettingError unless `value` is one of `allowed`. `describe_choices` says what the message contains."""
    allowed = list(allowed)
    if value not in allowed:
        raise SettingError(f"{name}={format_value(value)}: {describe_choices(value, allowed, listed_by)}")


def describe_choices(value: object, allowed: Iterable[object], listed_by: str | None = None) -> str:
    """Say what may be given instead of a value: the closest names, and all of them where they are few.

    A long list is left out if a name is close, or if a command prints it.

    Args:
        value: What was given.
        allowed: What may be given.
        listed_by: The command that lists all of `allowed`, such as "kvbench run --help".
    """
    names = [format_value(choice) for choice in allowed]
    long = len(names) > LISTED
    close = find_closest(value, names, 3 if long else 1) if isinstance(value, str) else []
    meant = f"did you mean {' or '.join(close)}?" if close else ""
    if long and listed_by is not None:
        return f"{meant} {listed_by} lists all" if close else f"choose one that {listed_by} lists"
    if long and close:
        return meant
    return f"{meant} {'Choose' if close else 'choose'} one of {', '.join(names)}".lstrip()


def find_closest(value: str, names: Iterable[str], most: int) -> list[str]:
    """Return at most `most` names that a misspelt or shortened one may stand for, the closest first."""
    from difflib import get_close_matches  # imported only when something is wrong

    spelt = {name.lower(): name for name in names}
    close = get_close_matches(value.lower(), spelt, most, CLOSE)
    longer = [name for name in spelt if name.startswith(value.lower())] if len(value) >= SHORTENED else []
    return [spelt[name] for name in close or (longer if len(longer) <= most else [])]


def resolve_subtasks(
    name: str, value: object, allowed: Sequence[str], sets: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Resolve the setting that chooses subtasks.

    Args:
        name: The setting's name, for messages.
        value: ``all``, the name of a set, one subtask, or a list of different subtasks.
        allowed: All subtasks.
        sets: Subtasks by the name of a set.

    Returns:
        The chosen subtasks.

    Raises:
        SettingError: The value is none of these.
    """
    sets = {**(sets or {}), "all": allowed}
    names: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for one in names:
        require_choice(name, one, allowed if len(names) > 1 else (*sets, *allowed))
    if not names or len(set(names)) < len(names):
        raise SettingError(f"{name}={names}: {', '.join(sets)}, one subtask, or a list of different ones")
    return list(sets.get(names[0], names)) if len(names) == 1 else names


def require_length(name: str, value: object, most: int, needs: Mapping[str, int], why: str) -> None:
    """Raise a SettingError if a subtask needs more tokens than there are. It names all of these, and those that fit.

    Args:
        name: The setting that decides, such as ``task.length``.
        value: Its value.
        most: The number of tokens that there are.
        needs: The tokens that each subtask needs.
        why: What the message says behind the needs.
    """
    short = [f"{need} for {subtask}" for subtask, need in needs.items() if need > most]
    if short:
        fit = ",".join(subtask for subtask, need in needs.items() if need <= most)
        line = f"{name}={format_value(value)}: at least {', '.join(short)} {why}"
        raise SettingError(line + (f"; what fits: task.subtasks=[{fit}]" if fit else ""))


def require_writable(name: str, folder: Path) -> None:
    """Raise a SettingError unless `folder` can be written or created. This does not create it."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long
        raise SettingError(f"{name}={folder}: {error.strerror}") from None
    leads_nowhere = any(path.is_symlink() and not path.exists() for path in (folder, *folder.parents))
    if leads_nowhere or not (there.is_dir() and os.access(there, os.W_OK)):
        raise SettingError(f"{name}={folder}: a folder that can be written")


def require_int(name: str, value: object, least: int) -> None:
    """Raise a SettingError unless `value` is an int (no bool) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value}: a whole number of at least {least}")


def check_sampling(temperature: object, top_p: object) -> None:
    """Raise a SettingError unless `temperature` is at least 0 and `top_p` is in (0, 1]."""
    if not is_number(temperature) or not temperature >= 0:
        raise SettingError(f"temperature={temperature}: a number from 0 (greedy) on")
    if not is_number(top_p) or not 0 < top_p <= 1:
        raise SettingError(f"top_p={top_p}: a share in (0, 1]")


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file."""
    return path.lower().endswith(".gguf")


def check_model_path(path: str, setting: str = "model.path") -> None:
    """Raise a SettingError for a missing folder or GGUF file. Anything else may be an id of the hub."""
    if is_gguf(path):
        if not Path(path).expanduser().is_file():
            raise SettingError(f"{setting}={path}: no such file")
    elif path[:1] in "/.~" and not Path(path).expanduser().is_dir():
        raise SettingError(f"{setting}={path}: no such folder")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def exact_share(share: float, count: Count) -> Count:
    """Return ⌊share · count⌋ in exact decimal arithmetic, because int(0.29 * 100) is 28.

    Args:
        share: A number in [0, 1].
        count: A whole number of at most 2^32, or an int64 tensor of such numbers.
    """
    digits: list[int] = []
    rest = Fraction(str(share))  # nine decimal digits at once, so that no product exceeds 64 bits
    while rest or not digits:
        digits.append(int(rest * 10**9))
        rest = rest * 10**9 % 1
    product: Any = 0
    for digit in reversed(digits):
        product = (product + count * digit) // 10**9  # type: ignore[operator]
    return product


def escape(text: str) -> str:
    """Write out the characters of a text that could control a terminal or break a line."""

    def steers(char: str) -> bool:
        return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")

    return "".join(char.encode("unicode_escape").decode() if steers(char) else char for char in text)
