"""The command line: `python run.py method=dropkv budget=0.05 task=ruler`. Settings: conf/config.yaml and its groups."""

import sys

from kvbench.cli.command import run_command
from kvbench.cli.run import main

if __name__ == "__main__":
    sys.exit(run_command(main))
