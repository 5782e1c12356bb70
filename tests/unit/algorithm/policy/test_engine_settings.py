"""The engine of a run: strict settings, and when engine and trainer disagree."""

import pytest
from pydantic import TypeAdapter, ValidationError

from fulmen_algorithm.algorithms.grpo import GrpoSettings, MismatchMonitor
from fulmen_algorithm.policy.engine_settings import (
    EmbeddedEngine,
    EngineSettings,
    ExternalEngine,
    MismatchSettings,
    SwapMode,
    VllmEngine,
    each_engine,
)
from fulmen_algorithm.runs.failure import RunFailed

ENGINE = TypeAdapter(EngineSettings)
GAP = {"engine_mismatch_logprob_mean": 0.1, "engine_mismatch_logprob_max": 0.5, "engine_mismatch_tokens": 7.0}


def test_a_run_without_the_setting_is_served_by_the_embedded_engine():
    assert GrpoSettings().engine == EmbeddedEngine()


def test_each_kind_is_read_from_json_and_written_back():
    vllm = ENGINE.validate_json('{"kind": "vllm", "swap": "drain", "args": {"max-num-batched-tokens": 8192}}')
    assert isinstance(vllm, VllmEngine)
    assert (vllm.swap, vllm.args) == (SwapMode.DRAIN, {"max-num-batched-tokens": 8192})
    external = ENGINE.validate_json('{"kind": "external", "base_url": "http://10.0.0.7:8000/v1/"}')
    assert isinstance(external, ExternalEngine)
    assert external.base_url == "http://10.0.0.7:8000/v1"
    for engine in (vllm, external, EmbeddedEngine()):
        assert ENGINE.validate_json(ENGINE.dump_json(engine)) == engine


@pytest.mark.parametrize(
    "wrong",
    [
        '{"kind": "sglang"}',
        '{"kind": "embedded", "dtype": "float32"}',
        '{"kind": "vllm", "tensor_parallel": "2"}',
        '{"kind": "vllm", "gpu_memory_utilization": 1.5}',
        '{"kind": "vllm", "swap": "abort"}',
        '{"kind": "vllm", "args": {"port": 80}}',
        '{"kind": "vllm", "args": {"no-enable-lora": true}}',
        '{"kind": "vllm", "args": {"--seed": 1}}',
        '{"kind": "vllm", "args": {"enable-return-routed-experts": true}}',
        '{"kind": "vllm", "router_replay": "yes"}',
        '{"kind": "external", "base_url": "http://a/v1", "router_replay": true}',
        '{"kind": "vllm", "args": {"seed": ""}}',
        '{"kind": "external"}',
        '{"kind": "external", "base_url": "file:///etc/passwd"}',
        '{"kind": "external", "base_url": "http://user:word@host/v1"}',
        '{"kind": "external", "base_urls": []}',
        '{"kind": "external", "base_urls": ["http://a/v1"], "base_url": "http://b/v1"}',
        '{"kind": "external", "base_urls": ["http://a/v1", "http://a/v1/"]}',
        '{"kind": "external", "base_url": "http://a/v1", "replicas": 2}',
        '{"kind": "embedded", "replicas": 0}',
        '{"kind": "vllm", "replicas": 65}',
        '{"kind": "vllm", "replicas": 2, "gpus": [0, 1, 2]}',
        '{"kind": "vllm", "tensor_parallel": 2, "gpus": 1}',
        '{"kind": "vllm", "tensor_parallel": 2, "replicas": 2, "gpus": [0, 1]}',
        '{"kind": "vllm", "cluster": "ray", "gpus": [0]}',
        '{"kind": "embedded", "gpus": []}',
        '{"kind": "vllm", "cluster": "ray", "nodes": 2, "args": {"pipeline-parallel-size": 4}}',
    ],
)
def test_what_is_unknown_or_out_of_range_or_set_by_fulmen_is_refused(wrong):
    with pytest.raises(ValidationError):
        ENGINE.validate_json(wrong)


def test_several_engines_have_the_settings_of_one_each():
    vllm = ENGINE.validate_json('{"kind": "vllm", "replicas": 3, "dtype": "float32"}')
    assert each_engine(vllm) == [VllmEngine(kind="vllm", dtype="float32")] * 3
    assert each_engine(EmbeddedEngine()) == [EmbeddedEngine()]
    urls = ["http://a/v1", "http://b/v1"]
    external = ExternalEngine(kind="external", base_urls=urls, key_name="gpu")
    assert each_engine(external) == [ExternalEngine(kind="external", base_url=url, key_name="gpu") for url in urls]


def test_a_run_cannot_stop_before_it_warns():
    with pytest.raises(ValidationError, match="stop must be at least warn"):
        MismatchSettings(warn=0.1, stop=0.01)


def test_a_mismatch_warns_once_in_every_steps_and_one_too_large_fails_the_run():
    told: list[str] = []
    watch = MismatchMonitor(MismatchSettings(warn=0.1, stop=1.0, every=3), lambda _, text: told.append(text))
    for step in range(1, 8):
        watch.check(step, GAP | {"engine_mismatch_kl": 0.5})
    assert [text.partition(":")[0] for text in told] == [f"Engine and trainer disagree in step {n}" for n in (1, 4, 7)]
    watch.check(8, GAP | {"engine_mismatch_kl": 0.1})
    watch.check(9, {"loss": 1.0})
    assert len(told) == 3
    with pytest.raises(RunFailed, match=r"KL 1.5 nats per token.*engine_mismatch.stop is 1"):
        watch.check(10, GAP | {"engine_mismatch_kl": 1.5})


def test_a_run_without_a_stop_limit_continues_at_any_mismatch():
    told: list[str] = []
    MismatchMonitor(MismatchSettings(), lambda severity, _: told.append(severity)).check(
        0, GAP | {"engine_mismatch_kl": 1e9}
    )
    assert told == ["warning"]
