"""Agents written for Agent Lightning run in an attempt of Fulmen as they are, but for a line of import."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import fulmen.compat.agentlightning as agl
from fulmen.agent import Context, NotInAttempt, entered
from fulmen.emit import RewardInvalid
from fulmen_algorithm.algorithms.registry import load_registry

LIMIT_S = 60
ENVIRONMENT = {
    "OPENAI_BASE_URL": "http://proxy/v1",
    "OPENAI_API_KEY": "key",
    "FULMEN_AGENT_MODEL": "calc",
    "FULMEN_PROMPTS": json.dumps({"prompt": "Add {a} and {b}."}),
}


def attempt(mode: str = "train", **environment: str) -> Context:
    return Context(
        rollout="projects/default/rollouts/r1",
        attempt="projects/default/rollouts/r1/attempts/2",
        attempt_number=2,
        mode=mode,
        deadline=time.monotonic() + 60,
        environment=ENVIRONMENT | environment,
    )


@pytest.fixture
def context() -> Iterator[Context]:
    """Yields the attempt that runs during a test."""
    with entered(attempt()) as context:
        yield context


async def run(agent: Any, task: object, context: Context) -> Any:
    """Calls an agent as a runner does."""
    result = agent(task, context)
    return await result if inspect.isawaitable(result) else result


async def test_a_function_gets_the_model_the_key_and_the_rollout(context: Context) -> None:
    @agl.rollout
    async def solve(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
        assert (llm.endpoint, llm.model, llm.api_key) == ("http://proxy/v1", "calc", "key")
        assert llm.get_base_url("r1", "a1") == llm.endpoint
        assert (rollout.mode, rollout.rollout_id, rollout.input) == ("train", "r1", task)
        assert isinstance(rollout, agl.AttemptedRollout)
        assert rollout.attempt.sequence_id == 2
        return task["reward"]

    assert await run(solve, {"reward": 1}, context) == 1.0


async def test_a_prompt_template_is_the_prompt_of_the_rollout(context: Context) -> None:
    @agl.rollout
    def ask(task: dict[str, int], prompt_template: agl.PromptTemplate) -> None:
        agl.emit_reward(float(prompt_template.format(**task) == "Add 1 and 2."))

    assert await run(ask, {"a": 1, "b": 2}, context) is None
    assert context.rewards == {("reward", None, b""): 1.0}


async def test_a_prompt_is_the_trainers_first_one_where_the_rollout_has_none() -> None:
    @agl.prompt_rollout()
    def ask(task: str, prompt_template: agl.PromptTemplate) -> str:
        return f"{prompt_template.engine} {prompt_template.template}"

    first = {"FULMEN_PROMPTS": "", "FULMEN_FIRST_PROMPT": "{{ x }}", "FULMEN_PROMPT_ENGINE": "jinja"}
    with entered(attempt(**first)) as context:
        assert await run(ask, "t", context) == "jinja {{ x }}"


async def test_a_rollout_without_a_resource_that_the_function_takes_says_what_to_set() -> None:
    @agl.llm_rollout(strip_proxy=False)
    def ask(task: str, llm: agl.LLM) -> None: ...

    with entered(attempt(FULMEN_AGENT_MODEL="")) as context, pytest.raises(ValueError, match="set FULMEN_AGENT_MODEL"):
        await run(ask, "t", context)


async def test_a_class_runs_its_method_for_the_mode_and_tasks_that_are_no_objects_come_unwrapped() -> None:
    class Solver(agl.LitAgent[str]):
        def rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return float(task)

        def validation_rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return -float(task)

    class Slow(agl.LitAgent[str]):
        async def rollout_async(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return float(task) + len(resources)

    task = {"agentlightning_task": "3"}
    for mode, reward in (("train", 3.0), ("validation", -3.0)):
        with entered(attempt(mode)) as context:
            assert await run(Solver(), task, context) == reward
            assert await run(Slow(), task, context) == 5.0


def test_a_decorated_function_is_still_callable_as_it_was_written() -> None:
    @agl.rollout
    def solve(task: str, llm: agl.LLM) -> str:
        return task + llm.model

    assert solve("a", agl.LLM(endpoint="e", model="m")) == "am"
    assert solve(task="a", llm=agl.LLM(endpoint="e", model="m")) == "am"
    with pytest.raises(NotInAttempt, match="fulmen agent check"):
        solve("a")


def test_functions_with_other_parameters_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"\(question, llm\)"):
        agl.rollout(lambda question, llm: None)
    with pytest.raises(ValueError, match="'prompt_template'"):
        agl.prompt_rollout(lambda task, llm: None)


def test_the_last_reward_counts_and_the_primary_dimension_is_the_reward(context: Context) -> None:
    agl.emit_reward(0.25)
    span = agl.emit_reward({"Speed!": 2, "right": True}, primary_key="right", attributes={"note": {"by": "me"}})

    rewards = {dimension: value for (dimension, _, _), value in context.rewards.items()}
    assert rewards == {"reward": 1.0, "speed-": 2.0}
    assert agl.get_reward_value(span) == 1.0
    assert [tuple(each) for each in agl.get_rewards_from_span(span)] == [("right", 1.0), ("Speed!", 2.0)]
    assert span.attributes["note.by"] == "me"
    assert agl.find_final_reward([span, agl.emit_annotation({"a": 1}, propagate=False)]) == 1.0


def test_rewards_that_theirs_refuses_are_refused_and_infinite_ones_too(context: Context) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        agl.emit_reward("1")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="primary_key"):
        agl.emit_reward({"a": 1.0})
    with pytest.raises(ValueError, match="for key a"):
        agl.emit_reward({"a": "1"}, primary_key="a")
    with pytest.raises(RewardInvalid):
        agl.emit_reward(float("nan"))
    assert context.rewards == {}


def test_emitters_need_an_attempt_unless_nothing_is_to_be_recorded() -> None:
    for emit in (agl.emit_message, agl.emit_object, agl.emit_reward):
        with pytest.raises(RuntimeError, match="No attempt is running here"):
            emit(1.0 if emit is agl.emit_reward else "text")  # type: ignore[operator]  # one of three
    assert agl.get_reward_value(agl.emit_reward(0.5, propagate=False)) == 0.5
    assert agl.get_object_value(agl.emit_object({"a": [1]}, propagate=False)) == {"a": [1]}
    with pytest.raises(RuntimeError, match="JSON"):
        agl.emit_object(object(), propagate=False)


async def test_rewards_in_spans_that_a_rollout_returns_count(context: Context) -> None:
    @agl.rollout
    def solve(task: str, llm: agl.LLM) -> list[agl.SpanCoreFields]:
        return [agl.emit_reward(0.5, propagate=False), agl.emit_reward(0.75, propagate=False)]

    assert await run(solve, "t", context) == 0.75
    assert list(context.rewards.values()) == [0.75]


def test_operations_are_spans_with_what_went_in_and_came_out(context: Context) -> None:
    @agl.operation(step="plan")
    def plan(goal: str) -> str:
        return goal.upper()

    with agl.operation(user=7) as op:
        op.set_input(1, goal="x")
        op.set_output({"done": True})

    assert plan("go") == "GO"
    held = op.span().attributes
    assert (held["user"], held["agentlightning.operation.input.goal"]) == (7, "x")
    assert held["agentlightning.operation.output.done"] is True


PROGRAM = """
from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo import APO
from agentlightning.litagent import rollout
from agentlightning.reward import find_final_reward
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.types import Dataset, PromptTemplate
from agentlightning import Trainer, setup_logging
from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var

@rollout
def greet(task: dict, prompt_template: PromptTemplate) -> float:
    return float(prompt_template.format(**task) == "Hello, Ada!")

setup_logging()
algorithm = APO[dict](None, beam_width=2, beam_rounds=1)
trainer = Trainer(algorithm=algorithm, n_runners=8, adapter=TraceToMessages(), tracer=AgentOpsTracer())
store, runner = InMemoryLightningStore(), LitAgentRunner[dict](AgentOpsTracer())
"""
CHECK = """
import time
from fulmen.agent import Context, entered
context = Context(rollout="r", attempt="a", attempt_number=1, mode="train", deadline=time.monotonic() + 60,
    environment={"OPENAI_BASE_URL": "u", "OPENAI_API_KEY": "k", "FULMEN_PROMPTS": '{"prompt": "Hello, {name}!"}'})
with entered(context):
    print(greet({"name": "Ada"}))
"""


def test_a_program_with_many_imports_of_agentlightning_runs_after_one_added_line() -> None:
    program = "import fulmen.compat.agentlightning.alias" + PROGRAM + CHECK

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert (ran.stdout, ran.returncode) == ("1.0\n", 0), ran.stderr


def test_what_a_service_replaces_says_where_it_is() -> None:
    assert agl.OtelTracer() is not None
    with pytest.raises(agl.NotPorted, match=r"LitAgentRunner\.step is not available: .*fulmen agent check"):
        agl.LitAgentRunner(agl.OtelTracer()).step({})
    with pytest.raises(agl.NotPorted, match=r"docs/trainers\.md"):
        agl.Trainer(algorithm=object())  # type: ignore[arg-type]  # what is refused
    with pytest.raises(TypeError, match="n_workerz"):
        agl.Trainer(n_workerz=1)


def test_environment_variables_are_read_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "off")
    monkeypatch.setenv("AGL_SERVER_PORT", "many")

    assert agl.resolve_bool_env_var(agl.LightningEnvVar.AGL_MANAGED_STORE, fallback=True) is False
    assert agl.resolve_str_env_var(agl.LightningEnvVar.AGL_SERVER_HOST, fallback="here") == "here"
    with pytest.raises(ValueError, match="AGL_SERVER_PORT must be an integer"):
        agl.resolve_int_env_var(agl.LightningEnvVar.AGL_SERVER_PORT)


def test_in_the_role_of_a_runner_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    agent = agl.rollout(lambda task, llm: None)

    assert agl.Trainer(algorithm=agl.VERL({"algorithm": {"adv_estimator": "grpo"}})).fit(agent, [{}]) is None


def test_a_program_that_a_runner_imports_must_not_train(context: Context) -> None:
    agent = agl.rollout(lambda task, llm: None)

    with pytest.raises(RuntimeError, match="__main__"):
        agl.Trainer(algorithm=agl.VERL({"algorithm": {"adv_estimator": "grpo"}})).fit(agent, [{}])


CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {"n": 4, "name": "vllm", "gpu_memory_utilization": 0.6},
        "actor": {
            "ppo_mini_batch_size": 16,
            "optim": {"lr": 1e-6},
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
        },
        "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct", "enable_gradient_checkpointing": True, "lora_rank": 8},
    },
    "trainer": {"total_epochs": 2, "test_freq": 32, "save_freq": -1},
}


def test_verls_configuration_becomes_settings_of_the_same_meaning() -> None:
    planned = agl.VERL(CONFIG).planned(100)

    assert planned.algorithm.name == "grpo"
    assert dict(planned.algorithm.settings) == {
        "prompts_per_step": 32,
        "max_tokens": 2048,
        "group_size": 4,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "steps": 8,
        "minibatches": 2,
        "validate_every": 32,
        "loss": {"kind": "clip", "low": 0.2, "high": 0.3},
        "kl": {"kind": "loss", "coefficient": 0.01},
        "lora": {"rank": 8, "alpha": 16.0},
    }
    assert planned.base == "hf:Qwen/Qwen2.5-1.5B-Instruct"
    assert planned.left_out == (
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.name",
        "data.max_prompt_length",
    )
    with pytest.raises(ValueError, match="'remax' has no counterpart"):
        agl.VERL({"algorithm": {"adv_estimator": "remax"}})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_settings_that_a_configuration_becomes_are_those_of_the_algorithm(estimator: str) -> None:
    planned = agl.VERL(CONFIG | {"algorithm": {"adv_estimator": estimator}}).planned(64)

    load_registry()[planned.algorithm.name].settings.model_validate(dict(planned.algorithm.settings))


def test_a_prompt_search_keeps_its_shape_and_models() -> None:
    class Elsewhere:
        base_url = "http://critic.example/v1/"

    planned = agl.APO(Elsewhere(), gradient_model="big", beam_width=2, beam_rounds=5, run_initial_validation=False)
    settings = planned.planned(10).algorithm.settings
    load_registry()["apo"].settings.model_validate(dict(settings))

    assert settings["critic"] == {"model": "big", "base_url": "http://critic.example/v1"}
    assert (settings["beam_width"], settings["steps"]) == (2, 5)
    assert planned.planned(10).left_out == ("run_initial_validation",)
