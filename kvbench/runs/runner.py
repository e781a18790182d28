"""Samples in, records out: reads prompts into the cache, lets the model answer, scores, writes one line a sample."""

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvbench.cache.guard import extra_reads
from kvbench.config.provenance import find_revision, replay_hash, source_hashes
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.runs.prompt import Prompt
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, list_turns
from kvbench.runs.shared_runs import RunGroup
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder, claim_all, claim_samples
from kvbench.validation import ContractError, SettingError


def execute_run(run: RunSpec, results: Path, bench: Resources) -> dict[str, dict]:
    """All records of the run, by uid: those on disk, and the missing ones made now. A finished run returns at once."""
    [folder] = execute_runs([run], results, bench)
    return folder.records()


def execute_runs(runs: Sequence[RunSpec], results: Path, bench: Resources) -> list[RunFolder]:
    """Make the missing records of runs that differ only in what they keep of a prompt, each sample's in all of them
    before the next. Of several, one that fails is left out: alone it says why.
    """
    with make_records_folder(results, results / "runs"):
        folders = {RunFolder(results / "runs", run.value): run for run in runs}
        open_ = {folder: run for folder, run in folders.items() if not folder.finished}
        if not open_:
            return list(folders)
        prompts = bench.prompts
        longest = runs[0].checkpoint.longest()
        for sample, prompt in prompts.values():
            need = len(prompt.ids) + prompt.unknown + sample.max_new_tokens
            if need > longest:
                raise SettingError(f"task: {sample.uid} needs {need} tokens, the model takes {longest}")
        for run in open_.values():
            check_extra_reads(run, bench, longest)
    if runs[0].fidelity:
        base = runs[0].baseline()
        full = [folder for folder, run in folders.items() if run.value == base.value]
        bench.full = full[0] if full else RunFolder(results / "runs", base.value)
        open_ = {folder: open_[folder] for folder in [*full, *open_] if folder in open_}  # others compare with it
    company = RunGroup(open_, partial(Responder, bench=bench), bench.reload_model)
    name = runs[0].groups["method"]["name"] if len(runs) == 1 else f"{len(open_)} together"
    with ExitStack() as stack:
        for folder, run in open_.items():
            stack.enter_context(folder.open(describe_process(run), len(prompts)))
            folder.refresh()

        def made_so_far() -> int:
            """Records on the disk, whoever made them."""
            return sum(folder.is_recorded(uid) for folder in open_ for uid in prompts)

        bar = tqdm(total=len(prompts) * len(open_), initial=made_so_far(), desc=f"{name:>10}", file=sys.stderr)
        stack.enter_context(bar)
        for uid, free in claim_samples(company.readers, list(prompts)):
            turns = list_turns(uid, prompts)
            batch = turns or [uid, *claim_companions(uid, prompts, runs[0], free)]
            own = {folder: [uid, *filter(folder.claim, turns)] if turns else batch for folder in free}
            for folder, records in company.answer(free, [prompts[other] for other in batch]):
                for record in records:
                    if record["uid"] in own[folder]:  # an earlier turn that was answered before is only read again
                        folder.append(record)
                        bar.update()
            for folder, uids in own.items():  # of one that was left out
                for other in uids:
                    folder.release(other)
            bar.update(made_so_far() - bar.n)
        bar.update(made_so_far() - bar.n)
        for folder in company.readers:
            folder.finish(list(prompts))
    return list(folders)


@contextmanager
def make_records_folder(results: Path, folder: Path) -> Iterator[None]:
    """`folder` is there or can be made; what was made is gone again if it is empty when a setting cannot be used."""
    try:
        absent = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"results={results}: {error.strerror}") from None
    try:
        yield
    except (SettingError, ContractError):
        for path in absent:
            with suppress(OSError):
                path.rmdir()
        raise


def check_extra_reads(run: RunSpec, bench: Resources, longest: int) -> None:
    """SettingError if a method lets the model read so much about a prompt that it comes beyond what the model takes."""
    method = run.choice().method
    if not method.needs_extra_reads:
        return
    for uid, (_, prompt) in bench.prompts.items():
        if prompt.earlier:  # nothing is cut at a later turn
            continue
        ids = torch.tensor([prompt.context if run.question == "hidden" else prompt.ids])
        most = max(
            reading.ids.shape[1]
            for reading in extra_reads(method, ids, prompt.prefix, make_prompt_encoder(bench.tokenizer))
        )
        quota = run.budget.rows(ids.shape[1], ids.shape[1])
        if quota is not None and quota < ids.shape[1] and ids.shape[1] + most > longest:
            raise SettingError(
                f"task: {uid} has {ids.shape[1]} tokens, {method.name} lets the model read {most} more about them; it "
                f"takes {longest}: a smaller task.length or method.chunk"
            )


def claim_companions(
    uid: str, prompts: dict[str, tuple[Sample, Prompt]], run: RunSpec, folders: Sequence[RunFolder]
) -> Iterator[str]:
    """Further samples, claimed in all `folders`, of the same lengths, up to `max_batch` with the first. On a CPU none:
    there a sample in a batch would not give exactly what it gives alone.
    """
    room = run.max_batch - 1 if run.device != "cpu" else 0
    own = batch_key(*prompts[uid])
    for other, (another, its) in prompts.items():
        if room == 0:
            return
        if other != uid and not another.conversation and batch_key(another, its) == own and claim_all(folders, other):
            room -= 1
            yield other


def batch_key(sample: Sample, prompt: Prompt) -> tuple[Any, ...]:
    """What samples of one batch have in common."""
    ends = (sample.max_new_tokens, sample.min_new_tokens, sample.ends, sample.until)
    return len(prompt.context), len(prompt.rest), prompt.prefix, *ends


def describe_process(run: RunSpec) -> dict[str, Any]:
    """What a process writes beside its records: for people, and to make the run again."""
    return describe_machine(run.device) | {"settings": run.settings, "sources": source_hashes(run.sources())}


def describe_machine(device: str) -> dict[str, Any]:
    """What ran it: for people, not for the hash."""
    packages = ("torch", "transformers", "tokenizers", "triton", "numpy")
    return {
        "code": find_revision(),
        "replay": replay_hash(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
        "versions": {name: version(name) for name in packages if find_spec(name)},
    }
