"""The modules of kvbench: their files and names."""

from pathlib import Path

from tests.support.repository import ROOT

MODULE_FILES = sorted(
    path for folder in ("kvbench", "kernels", "methods", "tasks") for path in (ROOT / folder).rglob("*.py")
)


def find_module_name(path: Path) -> str:
    """What Python calls the module in a file of the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kvbench" else ("kvbench", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(name: str, *roots: str) -> bool:
    """Whether a module is one of `roots` or lies below one."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)
