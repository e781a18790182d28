"""The commands of `kvbench <command>`, one module each. `GROUPS` says where the help lists them."""

GROUPS = {
    "Run": ("run", "plan", "warm", "sweep-status", "model", "data"),
    "Read results": (
        *("results", "show", "compare", "report", "dashboard", "figures", "curves", "grid", "export", "explain"),
        "wandb-sync",
    ),
    "Check results": ("audit", "grade", "bundle", "verify", "leaderboard"),
    "Compare with papers": ("papers", "table", "study"),
    "Measure cost": ("efficiency",),
    "Write a method": ("check-method", "check-task", "calibrate", "docs-tables"),
    "For the maintainers of kvbench": (
        *("train", "evaluate", "choose-solvable", "replay", "prompt-excerpts", "record-schema", "bench-methods"),
        *("bench-share", "measured"),
    ),
}
