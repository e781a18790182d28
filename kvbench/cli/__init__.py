"""The commands: `python -m kvbench <command>`, one file each."""
