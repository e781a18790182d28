"""The command line: `python run.py method=dropkv budget=0.05 task=ruler`. Settings: conf/config.yaml and its groups."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("hydra") is None:
        sys.exit(
            "kvbench: this Python lacks its packages; `make setup` installs them in .venv: .venv/bin/python run.py …"
        )
    from kvbench.cli.command import run_command
    from kvbench.cli.run import main

    sys.exit(run_command(main))
