"""A conversation of three turns about one text."""

from kvbench.interfaces.task import Sample

CONTEXT = "The river runs by the mill. Nobody knows who built the mill, but the miller does."
ASKED = ("\n\nWho built it? Answer:", "\n\nAnd when? Answer:", "\n\nWhy, then? Answer:")
SAID = ("a monk.", "in spring", "for bread")


def make_turns(said=SAID, name="talk", tokens=7, **more) -> tuple[Sample, ...]:
    return tuple(
        Sample(f"{name}/{i}", f"turn{i}", CONTEXT, asked, "", ("x",), tokens, name, conversation=name, said=own, **more)
        for i, (asked, own) in enumerate(zip(ASKED, said, strict=True))
    )
