"""What a method declares about CUDA graphs, in which the engine captures the steps of an answer.

A captured step runs the same operations on tensors at every token and never waits for the device. A method that
declares nothing is decoded through the model's modules, with the same results.

Hooks that a method hands over here are functions of its class, and get the method first:

    captured = Captured(capture_state=capture_state, release_state=release_state)
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.interfaces.observation import State
from kvbench.interfaces.row_reader import RowReader


@dataclass(frozen=True)
class Captured:
    """The hooks of a method can be captured in a CUDA graph, which then serves every position of an answer.

    Such hooks run the same operations on tensors at every token, remember nothing in the state (but see
    `capture_state`), and never wait for the device. `update` returns the same columns for every block. `cut` and
    `merge` leave the rows these columns, and return as many rows every time. While a graph is captured,
    `Observation.first` is a tensor on the device that broadcasts to `Rows.places`, so hooks may calculate with it and
    compare it with them, but not use it as a Python number. So is the quota of `protect` and `protect_sinks`, if it
    changes during the answer. Between two cuts, `update` gets rows of which some are absent and stand on the right
    (`Rows.list_newest`). The samples of a batch may be at different positions and follow different prompts.

    The only block of a prompt may also be captured, in one layer for others (`kvbench.engine.repeated_cuts`).
    `Observation.first` is a number then, and the state may be used as outside of a graph. Layers whose hooks ask for
    the layer's index, or change what all layers share, are not captured.

    Of a method that reads few of many rows (`Method.read`), `row_reader` alone is captured.
    """

    order_free: bool = False
    """Whether the hooks take rows in any order. While the method cuts after every token in a CUDA graph, they then get
    the rows as these lie in memory, and `Rows.order` says in which order they stand in the text.
    """
    streams: bool = False
    """Whether every head either keeps all rows or a number of them that stays while decoding (`head_quotas`), and
    `score` looks at nothing but positions. `rows` may then have no keys and values while a graph is captured.
    """
    capture_state: Callable[..., State | None] | None = None
    """Returns the state of a layer that `update` and `score` get inside a CUDA graph, or None if the modules must
    decode.

    A method that remembers something while it decodes needs this hook and `release_state`. It gets the method, the
    state that the layer has now, which must not change, and a `StateCapture`, which says how far the layer has read.
    The returned state holds tensors of its own, which `update` changes in place. Tokens may be undone, so what is
    remembered of one must not overwrite what tokens that are not undone need. Short blocks of a prompt are then left to
    the modules.
    """
    release_state: Callable[..., None] | None = None
    """Leaves the state of a layer as `update` would have left it outside of a CUDA graph.

    It gets the method, what `capture_state` returned, after further tokens, the state of the layer when it was
    captured, the number of tokens read so far, and the steps counted since the last cut, even if it evicted nothing.
    """
    row_reader: Callable[..., RowReader | None] | None = None
    """Returns an object that chooses the rows to attend to, or None if `read` must do so. It gets the method and a
    `CapturedAnswer`. The reader must choose the rows that `read` would choose.
    """
    reads_packed: bool = False
    """Whether `row_reader` can choose among rows that a codec has packed, whose keys it does not get."""

    def __post_init__(self) -> None:
        if (self.capture_state is None) != (self.release_state is None):
            raise TypeError("Captured: capture_state and release_state need each other")
