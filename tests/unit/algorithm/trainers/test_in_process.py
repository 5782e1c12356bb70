"""A trainer in the service's process frees its memory when its run is over."""

import gc

import torch
from transformers import PreTrainedModel

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.settings import LoraSettings, OptimizerSettings


def models() -> set[int]:
    return {id(each) for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)}


async def test_a_trainer_that_is_closed_gives_its_memory_back_without_being_collected(model_dir):
    thread = TorchThread(torch_threads=torch.get_num_threads())
    setup = TrainerSetup(
        model_dir=model_dir, optimizer=OptimizerSettings(learning_rate=1e-3), seed=0, lora=LoraSettings(rank=2)
    )
    gc.collect()
    gc.disable()
    try:
        before = models()
        trainer = await InProcessTrainer.open(setup, thread=thread, device="cpu")
        assert models() - before
        await trainer.close()
        await thread.run(lambda: None)
        assert not models() - before
    finally:
        gc.enable()
        thread.close()
