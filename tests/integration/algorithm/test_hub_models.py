"""A run begins with a model of a hub, over real HTTP: what is taken, what is refused, and what an interruption costs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.clients.hub import HubLimits, HubModels
from fulmen_algorithm.models.bases import BaseModels
from fulmen_algorithm.models.model_store import ModelStore
from fulmen_algorithm.runs.creation.rules import CreationRules
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.provenance import BASE
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState
from tests.support.algorithm.hub import Hub, Repository, commit_of, running_hub
from tests.support.algorithm.model_services import ModelResources
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import ALGORITHMS, working
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.sharded import sharded_model

LIMIT_S = 60.0
NAME = "Acme/Tiny-Qwen3"
MAX_BYTES = 50_000_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, bytes]:
    return sharded_model(tmp_path_factory.mktemp("sharded"), tiny_model)


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Runs a hub with one model, as the environment of the service names it."""
    with running_hub() as hub:
        hub.repositories[NAME] = Repository.of(files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(variable, raising=False)
        yield hub


def models(allowed: str = "*", *, max_bytes: int = MAX_BYTES, deadline_s: float = LIMIT_S) -> HubModels:
    return HubModels(allowed, HubLimits(max_bytes=max_bytes, deadline_s=deadline_s), first_wait_s=0.05)


class Notices(list[str]):
    def __call__(self, severity: str, text: str) -> None:
        self.append(f"{severity}: {text}")


def shards(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_model_in_several_shards_is_taken_whole_and_its_progress_is_told(hub, files):
    notices = Notices()
    folder = await models().fetched(f"hf:{NAME}", notices)
    assert len(shards(files)) > 2
    assert content(folder) == files
    assert folder.name == commit_of("main")
    total = sum(len(files[name]) for name in shards(files))
    assert notices[-1] == f"info: Downloading hf:{NAME}@main: {total} of {total} bytes (100%)."
    assert len(notices) <= 12


async def test_a_commit_that_is_cached_asks_the_hub_for_nothing(hub):
    folder = await models().fetched(f"hf:{NAME}", Notices())
    hub.asked.clear()
    assert await models().fetched(f"hf:{NAME}@{folder.name}", Notices()) == folder
    assert hub.asked == []


async def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(hub, files):
    large = files | {shards(files)[0]: b"x" * 25_000_000}
    hub.repositories[NAME] = Repository.of(large)
    hub.cut_after = {shards(files)[0]: 12_000_000}
    assert content(await models().fetched(f"hf:{NAME}", Notices())) == large
    # What came before the last piece of 10 MiB.
    assert hub.ranges == [f"bytes={10 * 2**20}-"]


async def test_a_download_that_is_ended_keeps_the_files_that_were_finished(hub, files, tmp_path):
    *others, last = shards(files)
    hub.held[last] = Event()
    task = asyncio.create_task(models().fetched(f"hf:{NAME}", Notices()))

    async def only_the_last_is_missing() -> bool:
        there = all([*(tmp_path / "cache").rglob(f"snapshots/*/{name}")] for name in others)
        return there and last in hub.files_asked()

    await eventually(only_the_last_is_missing, what="the last file is asked for, and the others are taken")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    hub.held.pop(last).set()
    assert content(await models().fetched(f"hf:{NAME}", Notices())) == files
    asked = hub.files_asked()
    assert [asked.count(name) for name in others] == [1] * len(others)
    assert asked.count(last) == 2


async def test_a_hub_that_does_not_answer_is_waited_for(hub, files):
    hub.fails, notices = True, Notices()
    task = asyncio.create_task(models().fetched(f"hf:{NAME}", notices))

    async def told() -> bool:
        return bool(notices)

    await eventually(told, what="the outage is reported")
    hub.fails = False
    assert content(await task) == files
    assert notices[0] == (
        f"warning: hf:{NAME}@main cannot be downloaded: the hub cannot be reached, or closed the connection. It is retried."
    )


async def test_a_hub_that_never_answers_ends_the_run_at_the_deadline_with_its_setting(hub):
    hub.fails = True
    with pytest.raises(RunFailed, match="FULMEN_ALGORITHM_HUB_DEADLINE_S"):
        await models(deadline_s=0.1).fetched(f"hf:{NAME}", Notices())


async def refused(source: str, **options: object) -> str:
    """Returns why a run cannot begin with a model: the same at its creation and at its start."""
    problem = await models(**options).problem(source)
    with pytest.raises(RunFailed) as failed:
        await models(**options).fetched(source, Notices())
    assert problem
    assert problem in failed.value.message
    return problem


async def test_an_unknown_name_is_refused_with_those_that_are_like_it(hub):
    problem = await refused("hf:Acme/Tiny-Qwen4")
    assert f"similar: {NAME}" in problem
    assert "HF_TOKEN" in problem


async def test_an_unknown_revision_is_refused_with_those_that_there_are(hub):
    hub.repositories[NAME].refs["stable"] = commit_of("main")
    assert await refused(f"hf:{NAME}@v9") == f"{NAME} has no revision v9; it has main, stable"


async def test_a_private_model_needs_the_token_of_the_service(hub, files):
    hub.repositories[NAME] = Repository.of(files, needs_token=True)
    assert "does not give access to it" in await refused(f"hf:{NAME}")
    given = HubModels(
        "*", HubLimits(max_bytes=MAX_BYTES, deadline_s=LIMIT_S), variables={"HF_TOKEN": hub.token, "HF_HOME": ""}
    )
    assert content(await given.fetched(f"hf:{NAME}", Notices())) == files


async def test_a_gated_model_says_so_and_names_the_setting(hub, files, monkeypatch):
    hub.repositories[NAME] = Repository.of(files, is_gated=True)
    assert re.search(r"is gated: accept its terms .* HF_TOKEN", await refused(f"hf:{NAME}"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert content(await models().fetched(f"hf:{NAME}", Notices())) == files


async def test_a_token_that_the_hub_refuses_is_named_and_never_shown(hub, monkeypatch, capfd):
    wrong = "hf_" + "wr0ng" * 7
    monkeypatch.setenv("HF_TOKEN", wrong)
    monkeypatch.setenv("FULMEN_ALGORITHM_TOKEN", "a secret of the service")
    problem = await refused(f"hf:{NAME}")
    assert (
        problem
        == f"the hub refuses to send hf:{NAME}@main: check FULMEN_ALGORITHM_HUB_TOKEN or HF_TOKEN of the algorithm service"
    )
    assert hub.tokens == {wrong}
    printed = capfd.readouterr()
    assert wrong not in problem + printed.out + printed.err


async def test_offline_the_cached_copy_is_taken_and_a_missing_one_is_refused(hub, files, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in await refused(f"hf:{NAME}")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = await models().fetched(f"hf:{NAME}", Notices())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert await models().problem(f"hf:{NAME}") == ""
    assert await models().fetched(f"hf:{NAME}", Notices()) == folder
    assert hub.asked == []


async def test_a_hub_that_cannot_be_reached_is_replaced_by_the_cache(hub):
    folder = await models().fetched(f"hf:{NAME}", Notices())
    hub.fails = True
    assert await models().fetched(f"hf:{NAME}", Notices()) == folder


async def test_an_incomplete_copy_is_never_taken(hub, files, monkeypatch):
    folder = await models().fetched(f"hf:{NAME}", Notices())
    (folder / shards(files)[0]).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no complete copy" in await refused(f"hf:{NAME}@{folder.name}")


async def test_nothing_is_taken_that_runs_code_or_lies_elsewhere(hub, files, tmp_path):
    hostile = {
        "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"a pickle",
        "../../../escaped.json": b"{}",
        "/absolute.json": b"{}",
        "inner/config.json": b"{}",
        ".hidden.json": b"{}",
        "consolidated.safetensors": b"the same weights again",
    }
    hub.repositories[NAME] = Repository.of(files | hostile)
    assert content(await models().fetched(f"hf:{NAME}", Notices())) == files
    assert not [*tmp_path.rglob("escaped.json")]


async def test_weights_that_are_pickles_are_refused(hub, files):
    hub.repositories[NAME] = Repository.of({"config.json": files["config.json"], "pytorch_model.bin": b"a pickle"})
    assert "pytorch_model.bin is a pickle" in await refused(f"hf:{NAME}")


def with_config(files: dict[str, bytes], **changed: object) -> dict[str, bytes]:
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | changed).encode()}


async def failure(**options: object) -> str:
    with pytest.raises(RunFailed) as failed:
        await models(**options).fetched(f"hf:{NAME}", Notices())
    return failed.value.message


async def test_a_model_that_needs_code_of_its_repository_is_refused(hub, files):
    code = {"AutoModelForCausalLM": "modeling_tiny.Tiny"}
    hub.repositories[NAME] = Repository.of(with_config(files, auto_map=code, model_type="tiny-and-new"))
    assert "never run" in await failure()
    # Many models that transformers has by now still name the code that they once came with.
    hub.repositories["Acme/Known"] = Repository.of(with_config(files, auto_map=code))
    assert (await models().fetched("hf:Acme/Known", Notices())).is_dir()


@pytest.mark.parametrize(
    "index",
    [
        b'{"weight_map": {"a": "../../model.safetensors"}}',
        b'{"weight_map": {"a": "absent.safetensors"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 7}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
async def test_an_index_that_names_what_is_no_file_of_weights_is_refused(hub, files, index):
    hub.repositories[NAME] = Repository.of(files | {"model.safetensors.index.json": index})
    assert "model.safetensors.index.json" in await failure()


async def test_a_model_that_is_too_large_is_refused_before_its_weights_are_asked_for(hub, files):
    assert "FULMEN_ALGORITHM_HUB_MAX_BYTES" in await failure(max_bytes=60_000)
    assert not {*hub.files_asked()} & {*shards(files)}


async def test_a_model_that_is_larger_than_the_hub_told_is_broken_off(hub, files):
    hub.repositories[NAME] = Repository.of(files | {shards(files)[0]: b"x" * 50_000_000})
    hub.repositories[NAME].told_sizes = {shards(files)[0]: 10}
    assert "FULMEN_ALGORITHM_HUB_MAX_BYTES" in await failure(max_bytes=20_000_000)


async def test_only_models_that_the_operator_allows_are_asked_for(hub):
    problem = await refused(f"hf:{NAME}", allowed="Qwen/*,HuggingFaceTB/*")
    assert "FULMEN_ALGORITHM_HUB_MODELS" in problem
    assert "qwen/*" in problem
    assert "allows none" in await refused(f"hf:{NAME}", allowed="")
    assert hub.asked == []
    assert await models("acme/*").problem(f"hf:{NAME}") == ""


@pytest.mark.parametrize("source", ["hf:", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b@../c", "a/b", "hf:http://evil/x"])
async def test_a_name_of_another_form_is_refused_with_the_form(hub, source):
    assert await models().problem(source) == (
        "must be hf:organisation/name or hf:organisation/name@revision, such as hf:Qwen/Qwen3-0.6B@main"
    )
    assert hub.asked == []


async def test_a_run_is_refused_at_its_creation_and_nothing_is_created(hub, world, sft_draft, tmp_path):
    draft = replace(sft_draft, policy=PolicySpec(name="tiny", origin=PolicyOrigin.BASE, source="hf:Acme/None"))
    rules = CreationRules(registry=ALGORITHMS, models=BaseModels(ModelStore(tmp_path), models()))
    with pytest.raises(SettingsInvalid) as invalid:
        await checked_runs([draft], rules=rules, resources=ModelResources(world), now=now())
    (violation,) = invalid.value.violations
    assert violation.field == "policy.base"
    assert "no model Acme/None" in violation.description


async def test_a_run_keeps_to_the_commit_that_it_began_with(hub, files, world, sft_draft, open_service, tmp_path):
    draft = replace(sft_draft, policy=PolicySpec(name="tiny", origin=PolicyOrigin.BASE, source=f"hf:{NAME}"))
    rules = CreationRules(registry=ALGORITHMS, models=BaseModels(ModelStore(tmp_path), models()))
    [run] = await checked_runs([draft], rules=rules, resources=ModelResources(world), now=now())
    async with working(open_service(world, hub=models())) as service:
        service.runs.add(run)
        done = await service.finish(run)
    assert done.state is RunState.SUCCEEDED, done.failure_message
    assert done.provenance[BASE] == f"hf:{NAME}@{commit_of('main')}"

    later = {**files, "README.md": b"later"}
    hub.repositories[NAME].commits[commit_of("later")] = later
    hub.repositories[NAME].refs["main"] = commit_of("later")
    again = replace(run, name=f"{run.name}-again", provenance={BASE: done.provenance[BASE]})
    hub.asked.clear()
    async with working(open_service(world, hub=models())) as service:
        service.runs.add(again)
        ended = await service.finish(again)
    assert ended.state is RunState.SUCCEEDED, ended.failure_message
    assert hub.asked == []
