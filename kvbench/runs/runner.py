"""Execute runs: read prompts into the cache, let the model answer, score, and write one record for each sample."""

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvbench.cache.hook_table import guard_hooks
from kvbench.config.imports import sources_unchanging
from kvbench.config.provenance import find_revision, replay_hash, source_hashes
from kvbench.engine.spending import spend
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.runs.group_watch import GroupWatch, Untrusted
from kvbench.runs.joint_samples import find_batch_size, limit_claim
from kvbench.runs.prompt import Prompt, batch_key
from kvbench.runs.resources import Resources
from kvbench.runs.responder import list_turns
from kvbench.runs.spec import RunSpec
from kvbench.runs.warming import make_warm_group
from kvbench.store.run_folder import RunFolder, claim_all, claim_samples
from kvbench.validation import ContractError, SettingError


def execute_run(run: RunSpec, results: Path, bench: Resources) -> dict[str, dict]:
    """Execute a run and return all of its records by uid.

    Records that are on disk are not made again, so a finished run returns at once.

    Args:
        run: The run.
        results: The results folder.
        bench: Tokenizer, model and prompts.

    Raises:
        SettingError: A sample does not fit the model, or the results folder cannot be used.
    """
    [folder] = execute_runs([run], results, bench)
    return folder.records()


def execute_runs(runs: Sequence[RunSpec], results: Path, bench: Resources) -> list[RunFolder]:
    """Make the missing records of runs that differ only in method, allocator, codec or budget.

    Each sample is answered in all runs before the next one. A run that fails is dropped from a group; executed alone,
    it raises. If a method changes weights or code, records are set aside (`kvbench.runs.group_watch`); so is a run of
    it that was executed alone.

    Args:
        runs: The runs.
        results: The results folder.
        bench: Tokenizer, model and prompts.

    Returns:
        The folders of the runs.

    Raises:
        SettingError: A sample does not fit the model, or the results folder cannot be used.
        DamagedRun: The files of a run were changed. With several runs, this one is dropped instead.
    """
    with make_records_folder(results, results / "runs"):
        folders = {RunFolder(results / "runs", run.value): run for run in runs}
        open_ = {folder: run for folder, run in folders.items() if not folder.finished}
        if len(runs) == 1 and open_ and (line := bench.accused.get(runs[0].choice_name)):
            raise Untrusted(line)
        open_ = {folder: run for folder, run in open_.items() if run.choice_name not in bench.accused}
        if len(runs) > 1:  # executed alone, a damaged run says why
            open_ = {folder: run for folder, run in open_.items() if not folder.is_damaged}
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
        # the full cache's run comes first, because the others are compared with it
        open_ = {folder: open_[folder] for folder in [*full, *open_] if folder in open_}
    try:
        with GroupWatch(open_, bench) as watch:
            make_records(open_, bench, watch)
    except Untrusted as error:
        if len(runs) == 1:
            raise
        tqdm.write(f"kvbench: {error}; {len(open_)} runs are left to their own cells", file=sys.stderr)
    return list(folders)


def make_records(open_: Mapping[RunFolder, RunSpec], bench: Resources, watch: GroupWatch) -> None:
    """Answer the samples that lack a record in the runs of a group, and finish those that then lack none."""
    prompts = bench.prompts
    bench.check_probed()
    with spend("warming up"):
        company = make_warm_group(open_, bench)
    name = next(iter(open_.values())).groups["method"]["name"] if len(open_) == 1 else f"{len(open_)} together"
    with spend("starting"), sources_unchanging():
        processes = [describe_process(run) for run in open_.values()]
    with ExitStack() as stack:
        for folder, process in zip(open_, processes, strict=True):
            with spend("writing"):
                stack.enter_context(folder.open(process, len(prompts)))
                folder.refresh()

        def made_so_far() -> int:
            """Count the records on disk, whichever process made them."""
            return sum(folder.is_recorded(uid) for folder in open_ for uid in prompts)

        bar = tqdm(total=len(prompts) * len(open_), initial=made_so_far(), desc=f"{name:>10}", file=sys.stderr)
        stack.enter_context(bar)
        claims, size = claim_samples(company.readers, list(prompts)), find_batch_size(list(open_.values()))
        while (claimed := wait_for(claims)) is not None:
            uid, free = claimed
            turns = list_turns(uid, prompts)
            batches = [turns or [uid, *claim_companions(uid, prompts, size, free)]]
            if not turns and company.most_batches > 1:
                others = (other for other in prompts if any(folder.is_free(other) for folder in free))
                # if so many samples are left, `limit_claim` limits nothing
                enough = company.most_batches * size * bench.processes
                left = len(batches[0]) + sum(1 for _ in islice(others, enough))
                most = limit_claim(company.most_batches, size, left, bench.processes)
                batches += claim_batches(uid, prompts, size, free, most - 1)
            every = list(chain(*batches))
            claimed_by = {folder: [uid, *filter(folder.claim, turns)] if turns else every for folder in free}
            asked = [[prompts[other] for other in batch] for batch in batches]
            for folder, records in company.answer(free, asked):
                for record in records:
                    if record["uid"] in claimed_by[folder]:  # a turn that was answered earlier is only read again
                        with spend("writing"):
                            folder.append(record)
                        bar.update()
            for folder, uids in claimed_by.items():  # a dropped run still holds its claims
                for other in uids:
                    folder.release(other)
            bar.update(made_so_far() - bar.n)
            watch.look()
            watch.compare_alone(company.readers, every)
        watch.compare_alone(company.readers, (), last=True)
        watch.look(again=True)
        bar.update(made_so_far() - bar.n)
        for folder in company.readers:
            folder.finish(list(prompts))


@spend("waiting")
def wait_for(claims: Iterator[tuple[str, list[RunFolder]]]) -> tuple[str, list[RunFolder]] | None:
    """Return the next claimed sample and its runs, or None after the last one."""
    return next(claims, None)


@contextmanager
def make_records_folder(results: Path, folder: Path) -> Iterator[None]:
    """Create `folder`. If the body finds an invalid setting, remove the created folders that are empty."""
    try:
        absent = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # a file, or a link that leads nowhere
        raise SettingError(f"results={results}: a folder that can be written") from None
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
    """Raise a SettingError if a method's extra reads and a prompt together have more tokens than the model takes."""
    method = guard_hooks(run.choice().method)
    if not method.needs_extra_reads:
        return
    for uid, (_, prompt) in bench.prompts.items():
        if prompt.earlier:  # later turns evict nothing
            continue
        ids = torch.tensor([prompt.context if run.question == "hidden" else prompt.ids])
        most = max(
            reading.ids.shape[1]
            for reading in method.extra_reads(ids, prompt.prefix, make_prompt_encoder(bench.tokenizer))
        )
        quota = run.budget.rows(ids.shape[1], ids.shape[1])
        if quota is not None and quota < ids.shape[1] and ids.shape[1] + most > longest:
            raise SettingError(
                f"task: {uid} has {ids.shape[1]} tokens, {method.name} lets the model read {most} more about them; it "
                f"takes {longest}: a smaller task.length or method.chunk"
            )


def claim_companions(
    uid: str, prompts: dict[str, tuple[Sample, Prompt]], size: int, folders: Sequence[RunFolder]
) -> Iterator[str]:
    """Claim further samples with the same lengths in all `folders`, up to `size` together with the first one."""
    room = size - 1
    key = batch_key(*prompts[uid])
    for other, (another, its) in prompts.items():
        if room == 0:
            return
        if other != uid and not another.conversation and batch_key(another, its) == key and claim_all(folders, other):
            room -= 1
            yield other


def claim_batches(
    uid: str, prompts: dict[str, tuple[Sample, Prompt]], size: int, folders: Sequence[RunFolder], most: int
) -> list[list[str]]:
    """Claim up to `most` further batches of samples in all `folders`, in the task's order after the sample `uid`.

    None is claimed where the next sample continues a conversation or asks about the same context, which is then read
    once for both.
    """
    batches: list[list[str]] = []
    order = list(prompts)
    group = prompts[uid][0].group or uid
    for other in order[order.index(uid) + 1 :]:
        sample = prompts[other][0]
        if len(batches) >= most or sample.conversation or (sample.group or other) == group:
            break
        if claim_all(folders, other):
            batches.append([other, *claim_companions(other, prompts, size, folders)])
        group = sample.group or other
    return batches


def describe_process(run: RunSpec) -> dict[str, Any]:
    """Describe the process that makes records, for people and for executing the run again."""
    return describe_machine(run.device) | {"settings": run.settings, "sources": source_hashes(run.sources())}


def describe_machine(device: str) -> dict[str, Any]:
    """Describe the machine, for people. It is no part of the run's hash."""
    return {
        "code": find_revision(),
        "replay": replay_hash(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
        "versions": find_versions(),
    }


@cache
def find_versions() -> dict[str, str]:
    """Return the versions of the packages that scores and times depend on. Looking them up takes 10 ms."""
    packages = ("torch", "transformers", "tokenizers", "triton", "numpy")
    return {name: version(name) for name in packages if find_spec(name)}
