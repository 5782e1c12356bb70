"""A program of the `tinker` package beyond what the recipes call. Prints what it found as JSON; run with its environment."""

import json
import logging
import sys

import tinker
import torch
from tinker import types
from tinker.types.tensor_data import TensorData

NAME = sys.argv[1]
logging.disable(logging.WARNING)


def datum(tokens: list[int]) -> types.Datum:
    """Returns an example of next tokens."""
    targets = TensorData.from_torch(torch.tensor(tokens[1:]))
    weights = TensorData.from_torch(torch.ones(len(tokens) - 1))
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def total(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss of the program's own: the cross-entropy."""
    return -sum(each.sum() for each in logprobs), {"own": 1.0}


service = tinker.ServiceClient()
models = [service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result() for _ in range(2)]
tokens = models[0].get_tokenizer().encode("Repeat the number 4.")
data = [datum(tokens), datum(tokens[2:])]
rate = types.AdamParams(learning_rate=1e-2)
found: dict[str, object] = {}
# The program's own loss and the one of the service train alike.
built_in = models[0].forward_backward(data, "cross_entropy").result()
own = models[1].forward_backward_custom(data, total).result()
for model in models:
    model.optim_step(rate).result()
found["losses"] = [built_in.metrics["loss:sum"], own.metrics["loss:sum"]]
after = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in models]
found["after"] = after
# A sampler scores a prompt as the model does; one by path, and one of a checkpoint that is loaded again.
sampler = models[0].save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokens)
scores = sampler.compute_logprobs(prompt).result()
found["first_score"] = scores[0]
found["score"] = -sum(scores[1:])
found["expected"] = -sum(models[0].forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
path = models[0].save_weights_for_sampler("kept").result().path
greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
by_path = service.create_sampling_client(model_path=path)
drawn = [each.sample(prompt, 1, greedy).result().sequences[0] for each in (sampler, by_path)]
found["drawn"] = [list(each.tokens) for each in drawn]
found["ids"] = [each.sequence_id for each in drawn]
state = models[0].save_state("state").result().path
again = service.create_training_client_from_state_with_optimizer(state).result()
found["again"] = again.forward(data, "cross_entropy").result().metrics["loss:sum"]
try:
    again.forward_backward([datum([10**6, 1])], "cross_entropy").result()
except tinker.RequestFailedError as error:
    found["refused"] = str(error)
found["capabilities"] = len(service.get_server_capabilities().supported_models)
print(json.dumps(found))
service.close("success").result()
