"""Define the paths of kvbench's files, in a checkout and in an installed wheel.

A checkout has `kernels/`, `methods/`, `tasks/` and `conf/` beside the package `kvbench/`. A wheel has them inside the
package, because a separate package `kernels` would overwrite the one of Hugging Face. `FILES` is the folder that
contains them in either case, so no other module needs to distinguish the two.
"""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # the folder from which Python imports kvbench
IS_CHECKOUT = not (PACKAGE / "conf" / "config.yaml").is_file()
FILES = ROOT if IS_CHECKOUT else PACKAGE
CONF = FILES / "conf"
GROUPS = ("model", "method", "allocator", "codec", "task", "logger")  # a setting such as method=NAME chooses a file
PUBLISHED = FILES / "results" / "published"  # numbers that papers report
REPLAY = FILES / "tests" / "replay"  # data of the replay net
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
MODELS = ROOT / ".models" if IS_CHECKOUT else CACHE / "models"  # downloaded and converted models


def make_environment() -> dict[str, str]:
    """Return the environment for a new process that has to import this kvbench, whatever its current folder is."""
    if not IS_CHECKOUT:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
