"""Attention over rows with mass: softmax(q·k·scaling + log mass)·v, causal within the block."""

from torch import Tensor

from kvbench.kernels.attend.reference import attend_reference
from kvbench.kernels.attend.sdpa import attend_sdpa, attend_sdpa_lse


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor | None,
    scaling: float,
    *,
    look: Tensor | None = None,
    lse: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (B, Hq, T, d) in the queries' dtype and, if `lse`, the log-sum-exp (B, Hq, T) in at least float32.

    queries (B, Hq, T, d); keys, values (B, H, n, d), H dividing Hq, whose last T rows are the block: query t sees
    rows up to n - T + t. mass (B, H, n) >= 0, None for all ones; rows of mass 0 do not exist. look (B, Hq, n) bool:
    rows a query head may see, None for all. implementation: "reference" | "sdpa"; None chooses.
    ValueError for shapes that do not fit and for an implementation that cannot do what is asked.
    """
    batch, query_heads, tokens, dim = queries.shape
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim:
        raise ValueError(
            f"attend: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    if query_heads % keys.shape[1] or keys.shape[2] < tokens:
        raise ValueError(
            f"attend: {query_heads} query heads on {keys.shape[1]} KV heads, {tokens} tokens of {keys.shape[2]} rows"
        )
    if mass is not None and mass.shape != keys.shape[:3]:
        raise ValueError(f"attend: mass {tuple(mass.shape)} for keys {tuple(keys.shape)}")
    whole = mass is None and look is None and tokens == keys.shape[2] and queries.device.type == "cpu"
    implementation = implementation or ("reference" if lse and not whole else "sdpa")
    if implementation == "reference":
        return attend_reference(queries, keys, values, mass, scaling, look, lse)
    if implementation != "sdpa" or (lse and not whole):
        raise ValueError(f"attend: implementation {implementation!r} with lse={lse}")
    if lse:
        return attend_sdpa_lse(queries, keys, values, scaling)
    return attend_sdpa(queries, keys, values, mass, scaling, look), None
