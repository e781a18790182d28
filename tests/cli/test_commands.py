"""`python -m kvbench <command>` finds its file, imports no other, and says which commands there are."""

import subprocess
import sys
from pathlib import Path

import kvbench
from kvbench.__main__ import list_commands, main

ROOT = Path(kvbench.__file__).parents[1]


def test_no_command_and_an_unknown_one_list_all(capsys):
    for given, first in (([], "kvbench: which command? one of"), (["no"], "kvbench: no: no such command; one of")):
        assert main(given) == 2
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert not out and lines[0] == first and len(lines) == 1 + len(list_commands())
        assert "  curves " in err and "  sweep-status " in err


def test_every_command_says_what_it_does_and_has_a_main():
    known = list_commands()
    assert len(known) > 15
    for name, text in known.items():
        assert 10 < len(text) < 120, name
        assert "\ndef main(" in (ROOT / f"kvbench/cli/{name.replace('-', '_')}.py").read_text()


def test_a_command_imports_what_it_needs():
    code = (
        "import sys; from kvbench.__main__ import main; code = main(['grid', 'nowhere']);"
        "sys.exit(code if code != 2 else {'torch', 'kvbench.cli.curves', 'kvbench.cli.run'} & sys.modules.keys() or 3)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 3, found.stderr
    assert found.stderr.startswith("kvbench: ") and found.stderr.count("\n") == 1
