"""Orders of a cut (`kvbench.kernels.cut_order`), each of which reverses one step of the usual one."""

from dataclasses import replace

from kvbench.kernels.cut_order import FIRST, NEWEST, ORDER, RECENTS, SINKS

ORDERS = {
    "kinds": replace(ORDER, protected=((RECENTS, NEWEST), (SINKS, FIRST))),
    "sinks": replace(ORDER, protected=((SINKS, NEWEST), (RECENTS, NEWEST))),
    "recents": replace(ORDER, protected=((SINKS, FIRST), (RECENTS, FIRST))),
    "rows left to the scores": replace(ORDER, scored=3),
    "scores": replace(ORDER, largest=False),
    "ties": replace(ORDER, earliest=False),
}
