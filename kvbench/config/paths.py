"""Where the files of kvbench lie: beside the package in a checkout, inside it where a wheel was installed.

A checkout has `kernels/`, `methods/`, `tasks/` and `conf/` beside the package `kvbench/`. A wheel holds all of them
inside the package, because a package of its own called `kernels` would overwrite Hugging Face's. Everything else keeps
its place below `FILES`, so no other module needs to know which of the two it runs in.
"""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # the folder from which Python imports kvbench
IS_CHECKOUT = not (PACKAGE / "conf" / "config.yaml").is_file()
FILES = ROOT if IS_CHECKOUT else PACKAGE
CONF = FILES / "conf"
GROUPS = ("model", "method", "allocator", "codec", "task", "logger")  # folders of conf/ that a name chooses from
PUBLISHED = FILES / "results" / "published"  # numbers that the papers print
REPLAY = FILES / "tests" / "replay"  # data of the replay net
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
MODELS = ROOT / ".models" if IS_CHECKOUT else CACHE / "models"  # downloaded and converted models


def make_environment() -> dict[str, str]:
    """Return the environment in which a new process finds this kvbench, wherever it starts."""
    if not IS_CHECKOUT:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
