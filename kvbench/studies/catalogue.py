"""Find studies by their names, and the studies that a paper's exhibits need (conf/papers/exhibits/)."""

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import kvbench.studies
from kvbench.interfaces.layout import Layout
from kvbench.models.checkpoint import Checkpoint
from kvbench.papers.exhibits import Exhibit, list_studies
from kvbench.studies.policy_reads import check_policies
from kvbench.studies.policy_study import PolicyStudy
from kvbench.studies.study import ClosedForm, LayerStudy, PromptStudy, Study
from kvbench.studies.training_study import TrainingStudy
from kvbench.validation import SettingError

DEPTH = re.compile(r"0?\.\d+|[01]\.0*")
KINDS = (LayerStudy, PolicyStudy, TrainingStudy, PromptStudy, ClosedForm)


@cache
def load_studies() -> dict[str, type[Study]]:
    """Return every study of kvbench/studies/ by its name, in alphabetical order."""
    studies: dict[str, type[Study]] = {}
    for module in iter_modules(kvbench.studies.__path__, "kvbench.studies."):
        for member in vars(import_module(module.name)).values():
            if is_study(member) and member.__module__ == module.name:
                studies[member.name] = member
    return dict(sorted(studies.items()))


def is_study(value: object) -> bool:
    """Return whether a value is the class of a study, and not one of the interfaces."""
    return isinstance(value, type) and issubclass(value, KINDS) and value not in KINDS


def prepare_studies(
    exhibits: Mapping[str, Exhibit], seed: int, checkpoint: Checkpoint, compressors: str | None
) -> tuple[list[Study], dict[str, SettingError]]:
    """Prepare the studies that fill exhibits for a model.

    Args:
        exhibits: Specifications of exhibits, by name.
        seed: Seed of the studies.
        checkpoint: The model.
        compressors: A file of DeltaKV's compressors, or None.

    Returns:
        The studies; and of each exhibit that the model cannot have, the reason.

    Raises:
        SettingError: The file of the compressors was given, and it cannot be used.
    """
    prepared: list[Study] = []
    missing: dict[str, SettingError] = {}
    for name in list_studies(exhibits):
        try:
            study = load_studies()[name](seed).prepare(checkpoint, compressors)
            if isinstance(study, PolicyStudy):
                check_policies(study, checkpoint.layout())
            prepared.append(study)
        except SettingError as error:
            if compressors is not None:
                raise
            missing |= {exhibit: error for exhibit, spec in exhibits.items() if spec["study"] == name}
    if compressors is not None and not any(study.inputs for study in prepared):
        raise SettingError(f"codec.path={compressors}: none of these exhibits shows codes; leave it out")
    return prepared, missing


def choose_layers(text: str, layout: Layout) -> tuple[int, ...]:
    """Return the layers that figures of single heads show.

    Args:
        text: Indices such as ``16,20``, or relative depths with a point such as ``0.5,0.625``, which stand for the
            nearest layer that has a full cache.
        layout: The model's layout.

    Raises:
        SettingError: A layer does not exist or holds no rows, or the text is neither of both.
    """
    full, layers = layout.held, []
    for word in text.split(","):
        if word.isdecimal():
            layers.append(int(word))
        elif DEPTH.fullmatch(word):
            layers.append(min(full, key=lambda layer: abs(layer - float(word) * (layout.layers - 1))))
        else:
            raise SettingError(f"layers={text}: indices such as 0,5, or depths from 0.0 to 1.0 such as 0.5")
    if wrong := [layer for layer in layers if layer not in full]:
        there = f"0 to {full[-1]}" if len(full) == layout.layers else ", ".join(map(str, full))
        raise SettingError(
            f"layers={text}: the model has no full cache in layer {wrong[0]}; its layers are {there}, and a depth such "
            "as 0.5 stands for the nearest one"
        )
    return tuple(sorted(set(layers)))
